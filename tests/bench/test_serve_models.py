"""The models of bench/gpu/serve_models.py, small and on the CPU."""

import pytest
import torch
from torch._dynamo.utils import counters

from bench.gpu.serve_models import (
    build_bf16,
    build_fp8,
    caches,
    compile_layers,
    forward,
    forward_again,
    held,
    quantized_caches,
)
from bench.gpu.timing import decibels
from octavo.runtime.fused import fuse

SMALL = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def wide():
    return build_bf16(3, "cpu", **SMALL)


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 512, (2, length))


def test_the_forward_pass_is_that_of_transformers(wide):
    text = ids(32)
    assert torch.equal(forward(wide, text), wide(text, use_cache=False, logits_to_keep=1).logits[:, 0])


def test_a_token_at_the_end_of_a_full_cache_gives_what_the_whole_text_gives(wide):
    text, kept = ids(16), caches(wide, 2, 16, "cpu")
    required = forward(wide, text)
    for number, layer in enumerate(wide.model.layers):
        layer.self_attn.layer_idx = number  # for the cache of transformers
    filled = wide(text[:, :15], use_cache=True).past_key_values
    for ours, theirs in zip(kept, filled.layers, strict=True):
        ours.keys[:, :, :15], ours.values[:, :, :15] = theirs.keys, theirs.values
    assert decibels(required, forward(wide, text[:, 15:], 15, kept)) > 30
    kept[1].keys[:, :, 3].add_(1)
    assert decibels(required, forward(wide, text[:, 15:], 15, kept)) < 30


def test_packed_it_is_near_and_half_as_large(wide):
    packed, text = build_fp8(wide, "cpu"), ids(32)
    exact, apart = forward(wide, text), forward(packed, text)
    fuse(packed)
    fused = forward(packed, text)
    assert min(decibels(exact, fused), decibels(exact, apart)) > 15
    linears = 3 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512)
    assert held(wide, linears=True) == 2 * linears
    assert linears < held(packed, linears=True) < 1.02 * linears
    rest, packed_rest = (held(m, linears=False) - held(m, linears=True) for m in (wide, packed))
    assert rest == packed_rest


def test_keys_and_values_in_fp8_are_those_of_the_full_cache(wide):
    packed, text = build_fp8(wide, "cpu"), ids(1)
    fuse(packed)
    kept = caches(wide, 2, 16, "cpu")
    exact = forward(packed, text, 15, kept)
    held_in_fp8 = quantized_caches(packed, kept)
    found = forward_again(packed, text, 15, held_in_fp8)
    assert 20 < decibels(exact, found) < 60
    assert {layer.store.keys.dtype for layer in held_in_fp8} == {torch.float8_e4m3fn}
    assert {int(layer.store.length) for layer in held_in_fp8} == {15}
    compile_layers(packed, backend="aot_eager")
    for _ in range(2):
        assert decibels(found, forward_again(packed, text, 15, held_in_fp8)) > 60
    assert wide.config._attn_implementation == "sdpa"


def test_one_layers_code_serves_all(wide):
    torch.compiler.reset()
    counters.clear()
    packed = build_fp8(wide, "cpu")
    fuse(packed)
    kept = caches(wide, 2, 16, "cpu")
    for graphs, model in ((2, wide), (4, packed)):
        compile_layers(model, backend="aot_eager")
        forward(model, ids(16))
        forward(model, ids(1), 15, kept)
        assert counters["stats"]["unique_graphs"] == graphs
    forward_again(packed, ids(1), 15, quantized_caches(packed, kept))
    assert counters["stats"]["unique_graphs"] == 5
