"""Generation with the cache for transformers, against an emulation of it: keys and values rounded in float64, in
transformers' own cache, with transformers' own attention."""

from typing import Any

import pytest
import torch
from kv_cache_examples import DTYPES, Emulated, greedy, model_of, prompts
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from octavo.kv_cache.layer import DTYPES as LAYER_DTYPES
from octavo.kv_cache.transformers_cache import QuantizedKVCache


def check(name: str, dtype: str, padded: bool, scales: Any = None, **settings: Any) -> QuantizedKVCache:
    model, inputs = model_of(name), prompts(padded)
    model.set_attn_implementation("sdpa")
    required, exact = greedy(model, inputs, Emulated(model.config, dtype, scales))
    cache = QuantizedKVCache.for_model(model, 25, dtype, scales=scales, **settings)
    tokens, logits = greedy(model, inputs, cache)
    assert torch.equal(tokens, required)
    assert torch.allclose(logits, exact, atol=2e-4)
    return cache


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_generation_is_that_of_rounded_keys_and_values(name, dtype, padded):
    """With padding, scales are given: a warm-up counts the padding, whose keys differ between the attentions."""
    scales = [(torch.tensor([0.03]), torch.tensor([0.02]))] * 2 if padded and dtype != "bf16" else None
    cache = check(name, dtype, padded, scales)
    assert [int(store.length) for store in cache.stores] == [24, 24]
    assert [store.warming for store in cache.stores] == [False, False]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_rounding_shows(dtype):
    """Without rounding in the emulation, the comparison above would fail."""
    model, inputs = model_of("llama"), prompts(False)
    _, exact = greedy(model, inputs, DynamicCache(config=model.config), max_new_tokens=2)
    _, logits = greedy(model, inputs, QuantizedKVCache.for_model(model, 25, dtype), max_new_tokens=2)
    assert torch.equal(logits[0], exact[0]) or torch.allclose(logits[0], exact[0], atol=1e-4)
    assert (logits[1] - exact[1]).abs().max() > 1e-2


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


def test_a_bf16_model_with_a_bf16_cache_is_near_transformers_own():
    model = model_of("llama").bfloat16()
    inputs = prompts(False)
    tokens, exact = greedy(model, inputs, DynamicCache(config=model.config))
    cache = QuantizedKVCache.for_model(model, 25, "bf16")
    with torch.no_grad():
        found = model(**inputs, past_key_values=cache).logits[:, -1:]
        for t in range(9, 24):
            found = torch.cat((found, model(tokens[:, t : t + 1], past_key_values=cache).logits), 1)
    noise = (found.transpose(0, 1).double() - exact.double()).square().mean()
    assert noise <= 3e-4 * exact.double().square().mean()  # 35 dB: what BF16 is good for


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_text_into_a_cache_that_holds_something(dtype):
    model, ids = model_of("llama"), prompts(False)["input_ids"]
    caches = {"sdpa": Emulated(model.config, dtype), "octavo": QuantizedKVCache(model.config, 25, dtype)}
    found = []
    for attention, cache in caches.items():
        model.set_attn_implementation(attention)
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
            found.append(model(ids[:, 4:], past_key_values=cache).logits)
    assert torch.allclose(*found, atol=2e-4)


def test_beams():
    model, inputs = model_of("qwen2"), prompts(True)
    required, _ = greedy(model, inputs, Emulated(model.config, "bf16"), num_beams=3)
    tokens, _ = greedy(model, inputs, QuantizedKVCache.for_model(model, 25, "bf16"), num_beams=3)
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
            logits = [model(ids, past_key_values=cache).logits[:, -1:]]
            for _ in range(4):
                logits.append(run(input_ids=logits[-1].argmax(-1), past_key_values=cache).logits)
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
