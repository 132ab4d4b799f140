"""The models of bench/gpu/serve_models.py, small and on the CPU."""

import pytest
import torch
from torch._dynamo.utils import counters

from bench.gpu import serve_models as models
from bench.gpu.timing import decibels
from octavo.kv_cache.layer import DTYPES
from octavo.models import LlamaConfig
from octavo.runtime.fused import fuse

pytestmark = pytest.mark.slow

SMALL = LlamaConfig(vocabulary=512, layers=3, width=256, heads=4, kv_heads=2, mlp_width=512, context=64, tied=False)


@pytest.fixture
def wide():
    return models.build_bf16(SMALL, "cpu")


def stores(model, *dtypes):
    return models.random_stores(model.config, 2, 16, "cpu", *dtypes)


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 512, (2, length))


def test_the_forward_pass_is_that_of_transformers(wide):
    text = ids(32)
    assert torch.equal(models.forward(wide, text), wide(text, use_cache=False, logits_to_keep=1).logits[:, 0])


def test_a_token_at_the_end_of_a_full_cache_gives_what_the_whole_text_gives(wide):
    text, kept = ids(16), [models.PlainCache(store) for store in stores(wide, "bf16")["bf16"]]
    expected = models.forward(wide, text)
    for number, layer in enumerate(wide.model.layers):
        layer.self_attn.layer_idx = number  # for the cache of transformers
    filled = wide(text[:, :15], use_cache=True).past_key_values
    for ours, theirs in zip(kept, filled.layers, strict=True):
        ours.keys[:, :, :15], ours.values[:, :, :15] = theirs.keys, theirs.values
    assert decibels(expected, models.forward(wide, text[:, 15:], 15, kept)) > 30
    kept[1].keys[:, :, 3].add_(1)
    assert decibels(expected, models.forward(wide, text[:, 15:], 15, kept)) < 30


def test_packed_it_is_near_and_half_as_large(wide):
    packed, text = models.build_fp8(wide, "cpu"), ids(32)
    exact, apart = models.forward(wide, text), models.forward(packed, text)
    fuse(packed)
    fused = models.forward(packed, text)
    assert min(decibels(exact, fused), decibels(exact, apart)) > 15
    linears = 3 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512)
    assert models.held(wide, linears=True) == 2 * linears
    assert linears < models.held(packed, linears=True) < 1.02 * linears
    rest, packed_rest = (models.held(m, linears=False) - models.held(m, linears=True) for m in (wide, packed))
    assert rest == packed_rest


@pytest.mark.parametrize(("dtype", "least", "most", "compiled"), [("bf16", 35, float("inf"), 40), ("fp8", 20, 35, 60)])
def test_keys_and_values_in_octavos_caches_are_those_of_the_plain_ones(wide, dtype, least, most, compiled):
    text, kept = ids(1), stores(wide, "bf16", dtype)
    exact = models.forward(wide, text, 15, [models.PlainCache(store) for store in kept["bf16"]])
    caches = models.octavo_caches(wide, kept[dtype])
    actual = models.forward_again(wide, text, 15, caches)
    assert least < decibels(exact, actual) <= most
    assert {layer.store.keys.dtype for layer in caches} == {DTYPES[dtype]}
    assert {int(layer.store.length) for layer in caches} == {15}
    models.compile_layers(wide, backend="aot_eager")
    for _ in range(2):
        assert decibels(actual, models.forward_again(wide, text, 15, caches)) > compiled


def test_one_layers_code_serves_all(wide):
    torch.compiler.reset()
    counters.clear()
    packed = models.build_fp8(wide, "cpu")
    fuse(packed)
    kept = stores(wide, "bf16", "fp8")
    plain = [models.PlainCache(store) for store in kept["bf16"]]
    for graphs, model in ((2, wide), (4, packed)):
        models.compile_layers(model, backend="aot_eager")
        models.forward(model, ids(16))
        models.forward(model, ids(1), 15, plain)
        assert counters["stats"]["unique_graphs"] == graphs
    models.forward_again(packed, ids(1), 15, models.octavo_caches(packed, kept["fp8"]))
    assert counters["stats"]["unique_graphs"] == 5
    assert wide.config._attn_implementation == "sdpa"
