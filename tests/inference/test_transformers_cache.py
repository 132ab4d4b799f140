"""Generation with the cache for transformers, against an emulation of it: keys and values rounded in float64, in
transformers' own cache, with transformers' own attention.
"""

import copy
import pickle

import pytest
import torch
from generation_examples import DTYPES, LARGEST, Emulated, greedy, model_of, prompts
from operation_counts import operations
from tiny_models import with_slow
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from octavo.calibration.calibrator import Calibration
from octavo.calibration.site_statistics import Statistics
from octavo.inference.kv_cache import DTYPES as LAYER_DTYPES
from octavo.inference.packed_linear import ServedAttention, serve_attention
from octavo.inference.transformers_cache import CACHE, QuantizedKVCache, scales_from_calibration


def check(name: str, dtype: str, padded: bool, scales=None) -> QuantizedKVCache:
    model, inputs = model_of(name), prompts(padded)
    model.set_attn_implementation("sdpa")
    required, exact = greedy(model, inputs, Emulated(model.config, dtype, scales))
    cache = QuantizedKVCache.for_model(model, 25, dtype, scales=scales)
    tokens, logits = greedy(model, inputs, cache)
    assert torch.equal(tokens, required)
    assert torch.allclose(logits, exact, atol=2e-4)
    return cache


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", with_slow(["llama", "mistral", "qwen2", "qwen3"], ("llama", "mistral")))
def test_generation_is_that_of_rounded_keys_and_values(name, dtype, padded):
    """With padding, scales are given: a warm-up counts the padding, whose keys differ between the attentions."""
    scales = [(torch.tensor([0.03]), torch.tensor([0.02]))] * 2 if padded and dtype != "bf16" else None
    cache = check(name, dtype, padded, scales)
    assert [int(store.length) for store in cache.stores] == [24, 24]
    assert [store.warming for store in cache.stores] == [False, False]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_given_scales(dtype):
    scales = [(torch.tensor([0.02, 0.03]), torch.tensor([0.01])), (torch.tensor([0.04]), torch.tensor([0.02, 0.01]))]
    cache = check("llama", dtype, False, scales)
    assert torch.equal(cache.stores[0].k_scale, scales[0][0])
    assert torch.equal(cache.stores[1].k_scale, scales[1][0].expand(2))
    assert cache.clipped.shape == (2, 2)
    assert int(cache.clipped.sum()) > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_cache_in_the_dtype_of_the_model_equals_transformers_own_bit_for_bit(dtype):
    model, inputs = model_of("llama").to(LAYER_DTYPES[dtype]), prompts(False)
    model.set_attn_implementation("sdpa")
    tokens, logits = greedy(model, inputs, DynamicCache(config=model.config))
    found = greedy(model, inputs, QuantizedKVCache.for_model(model, 25, dtype))
    assert torch.equal(found[0], tokens)
    assert torch.equal(found[1], logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_text_into_a_cache_that_holds_something(dtype):
    model, ids = model_of("llama"), prompts(False)["input_ids"]
    caches = {"sdpa": Emulated(model.config, dtype), "octavo": QuantizedKVCache(model.config, 25, dtype)}
    found = []
    for attention, cache in caches.items():
        model.set_attn_implementation(attention)
        with torch.no_grad():
            model(ids[:, :4], **{CACHE: cache})
            found.append(model(ids[:, 4:], **{CACHE: cache}).logits)
    assert torch.allclose(*found, atol=2e-4)


@pytest.mark.parametrize(("rows", "settings"), [(3, {"num_beams": 3}), (1, {"prompt_lookup_num_tokens": 3})])
def test_beams_and_candidates(rows, settings):
    model, inputs = model_of("qwen2"), {name: x[-rows:] for name, x in prompts(True).items()}
    required, _ = greedy(model, inputs, Emulated(model.config, "bf16"), **settings)
    tokens, _ = greedy(model, inputs, QuantizedKVCache.for_model(model, 25, "bf16"), **settings)
    assert torch.equal(tokens, required)


def test_a_cache_serves_again_after_reset_with_the_same_scales():
    model, inputs = model_of("llama"), prompts(False)
    cache = QuantizedKVCache.for_model(model, 25, "fp8")
    greedy(model, prompts(True), cache)
    scale, found = cache.stores[0].k_scale.clone(), []
    for _ in range(2):
        cache.reset()
        found.append(greedy(model, inputs, cache)[1])
    assert torch.equal(*found)
    assert torch.equal(cache.stores[0].k_scale, scale)


def test_a_warm_up_by_hand():
    model, inputs = model_of("llama"), prompts(False)
    cache = QuantizedKVCache.for_model(model, 25, "int8", warm_up="manual")
    with pytest.raises(RuntimeError, match="run a prompt"):
        cache.freeze()
    greedy(model, inputs, cache)
    assert all(store.warming for store in cache.stores)
    assert not cache.clipped.any()
    cache.freeze()
    assert not any(store.warming for store in cache.stores)


def test_compiled_steps_are_one_graph_and_the_same():
    model, ids = model_of("llama"), prompts(False)["input_ids"]
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        cache = QuantizedKVCache.for_model(model, 25, "fp8")
        graphs = CompileCounterWithBackend("aot_eager")
        run = torch.compile(model, fullgraph=True, backend=graphs) if compiled else model
        with torch.no_grad():
            logits = [model(ids, **{CACHE: cache}).logits[:, -1:]]
            for _ in range(4):
                logits.append(run(input_ids=logits[-1].argmax(-1), **{CACHE: cache}).logits)
        found.append(torch.cat(logits, 1))
        assert graphs.frame_count == compiled
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("cached", [False, True])
def test_the_attention_without_our_cache_is_that_of_transformers(cached):
    model, inputs = model_of("qwen3"), prompts(True)
    found = []
    for attention in ("sdpa", "octavo"):
        QuantizedKVCache(model.config, 9)  # which registers it
        model.set_attn_implementation(attention)
        if cached:
            found.append(greedy(model, inputs, DynamicCache(config=model.config))[1])
        else:
            with torch.no_grad():
                found.append(model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()])
    assert torch.allclose(*found, atol=2e-4)


# ---- The size of the cache for transformers, and the models, masks and settings that it refuses


def test_a_sliding_window_must_hold_the_cache():
    model = model_of("mistral", sliding_window=20)
    with pytest.raises(ValueError, match="a sliding window of 20 tokens, this cache to all of its 21"):
        QuantizedKVCache.for_model(model, 21)
    inputs = prompts(True)
    required, _ = greedy(model, inputs, Emulated(model.config, "bf16"), max_new_tokens=8)
    tokens, _ = greedy(model, inputs, QuantizedKVCache.for_model(model, 20, "bf16"), max_new_tokens=8)
    assert torch.equal(tokens, required)
    with pytest.raises(ValueError, match="without sliding windows"):
        model(torch.ones(1, 30, dtype=torch.long), use_cache=False)


# ---- The scales of keys and values that a calibration gives


def calibration() -> Calibration:
    sites = {}
    for layer in range(11):
        for kind, name in (("key", "k"), ("value", "v"), ("query", "q")):
            site = f"model.layers.{layer}.self_attn.{name}"
            sites[site] = Statistics(site, kind).update(torch.randn(5, 32) * (layer + 1))
    return Calibration(sites, "", {}, {}, 5, 5)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_scales_of_a_calibration(dtype, heads):
    source = calibration()
    result = scales_from_calibration(source, dtype, heads=heads)
    assert list(result) == [f"model.layers.{layer}.self_attn" for layer in range(11)]
    for name, scales in result.items():
        for scale, kind in zip(scales, "kv", strict=True):
            amax = source.sites[f"{name}.{kind}"].channel_amax.view(heads or 1, -1).amax(1)
            assert torch.allclose(scale, amax / LARGEST[dtype])
    if dtype == "fp8" and heads is None:
        name = "model.layers.3.self_attn"
        assert torch.equal(result[name][0].view(()), source.scale(f"{name}.k"))


def test_scales_by_name_go_to_their_layers():
    order = (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)
    scales = {f"model.layers.{i}.self_attn": (torch.tensor([i + 1.0]), torch.tensor([1.0])) for i in order}
    cache = QuantizedKVCache(model_of("llama", num_hidden_layers=11).config, 9, scales=scales)
    assert [float(k) for k, _ in cache.model_cache.scales] == [i + 1.0 for i in range(11)]


# ---- Attention that rotates and stores in one operation, against transformers' own forward with the same cache


ROTATE = "octavo::rotate_append"
NAMES = ["llama", "mistral", "qwen2", "qwen3"]


def both(name: str) -> tuple:
    """The same BF16 model twice: as transformers runs it, and with its attention served."""
    model = model_of(name).bfloat16()
    served = copy.deepcopy(model)
    serve_attention(served)
    return model, served


def run(model, cache, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of a prompt in two pieces, of three tokens, and of the whole prompt into the cache, reset."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    found = []
    with torch.no_grad():
        padded = torch.cat((mask, mask.new_ones(len(mask), 3)), 1)
        for begin, end, stored in ((0, 6, 6), (6, 9, 9), (3, 4, 10), (5, 6, 11), (0, 1, 12)):
            found.append(model(ids[:, begin:end], attention_mask=padded[:, :stored], **{CACHE: cache}).logits)
        cache.reset()
        found.append(model(ids, attention_mask=mask, **{CACHE: cache}).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", with_slow(NAMES, ("llama", "qwen3")))
def test_the_logits_are_those_of_transformers_own_forward(name, dtype, padded):
    inputs, found, caches = prompts(padded), [], []
    for model in both(name):
        caches.append(QuantizedKVCache.for_model(model, 25, dtype))
        found.append(run(model, caches[-1], inputs).float())
    if name == "qwen3":  # its norms sum in another order
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.05 * float(found[0].abs().max()))
    else:
        assert torch.equal(*found)
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(*(c.stores for c in caches), strict=True))
    assert [int(store.length) for store in caches[1].stores] == [9, 9]
    assert caches[1].is_initialized


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_rotates_and_stores_in_one_operation(name):
    _, model = both(name)
    cache = filled(model)
    with torch.no_grad():
        seen = operations(lambda: model(torch.ones(1, 1, dtype=torch.int64), **{CACHE: cache}))
    assert (seen[ROTATE], seen["octavo::append_kv"]) == (2, 0)


def filled(model) -> QuantizedKVCache:
    cache = QuantizedKVCache.for_model(model, 25, "bf16")
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.int64), **{CACHE: cache})
    return cache


def step(model, cache) -> int:
    """How many layers run the one operation in a decoding step."""
    return operations(lambda: model(torch.ones(1, 1, dtype=torch.int64), **{CACHE: cache}))[ROTATE]


def hook_norms(model) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [lambda model: model.train(), hook_norms], ids=["training", "hooks"])
def test_the_own_forward_runs_where_the_operation_would_not_do_the_same(change):
    _, model = both("qwen3")
    cache = filled(model)
    with torch.no_grad():
        assert step(model, cache) == 2
        with torch.autocast("cpu", torch.bfloat16):
            assert step(model, cache) == 0
        change(model)
        assert step(model, cache) == 0
        assert int(cache.stores[1].length) == 7


def test_gradients_and_another_cache_run_the_own_forward():
    _, model = both("llama")
    with pytest.raises(RuntimeError, match="no_grad"):
        step(model, filled(model))
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        assert step(model, DynamicCache(config=model.config)) == 0
        ids = prompts(False)["input_ids"]
        assert torch.equal(model(ids).logits, model_of("llama").bfloat16()(ids).logits)


def test_names_parameters_and_pickles_stay():
    own, model = both("llama")
    attention = model.model.layers[0].self_attn
    assert type(attention).__name__ == "LlamaAttention"
    assert isinstance(attention, type(own.model.layers[0].self_attn))
    assert list(model.state_dict()) == list(own.state_dict())
    before = type(attention)
    serve_attention(model)
    assert type(attention) is before
    assert isinstance(pickle.loads(pickle.dumps(attention)), ServedAttention)
