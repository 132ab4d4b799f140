"""The size of the cache for transformers, and the models, masks and settings that it refuses."""

import pytest
import torch
from kv_cache_examples import DTYPES, Emulated, greedy, model_of, prompts
from transformers import DeepseekV3Config, Gemma2Config, Qwen3NextConfig

from octavo.kv_cache.model import UnservedError
from octavo.kv_cache.transformers_cache import QuantizedKVCache


def test_bytes_of_the_cache():
    model = model_of("llama")
    sizes = {}
    for dtype in DTYPES:
        cache = QuantizedKVCache.for_model(model, 64, dtype)
        greedy(model, prompts(False), cache, max_new_tokens=1)
        sizes[dtype] = cache.nbytes
        assert tuple(cache.stores[0].keys.shape) == (3, 2, 64, 16)
    assert sizes["bf16"] == 2 * 2 * 3 * 2 * 64 * 16 * 2
    assert sizes["fp8"] == sizes["int8"] == sizes["bf16"] // 2 + 2 * 2 * 2 * 4


def test_it_holds_no_more_than_it_has_room_for():
    model = model_of("llama")
    cache = QuantizedKVCache.for_model(model, 12)
    with pytest.raises(RuntimeError, match="a cache of 12 tokens is full: it holds 12 and got 1 more"):
        greedy(model, prompts(False), cache)


def test_another_attention_is_refused():
    model = model_of("llama")
    cache = QuantizedKVCache(model.config, 20)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="the attention 'sdpa' cannot read"):
        model(prompts(False)["input_ids"], past_key_values=cache)


@pytest.mark.parametrize("row", [[1] * 8 + [0], [1, 0] + [1] * 7, [0] * 9])
def test_padding_that_is_not_on_the_left_is_refused(row):
    model, inputs = model_of("llama"), prompts(False)
    inputs["attention_mask"][1] = torch.tensor(row)
    cache = QuantizedKVCache.for_model(model, 20)
    with pytest.raises(ValueError, match="padding on the left only"):
        model(**inputs, past_key_values=cache)


def test_a_mask_of_queries_by_keys_is_refused():
    model, inputs = model_of("llama"), prompts(False)
    cache = QuantizedKVCache.for_model(model, 20)
    mask = torch.ones(3, 1, 9, 9).tril().bool()
    with pytest.raises(ValueError, match="two-dimensional attention_mask"), torch.no_grad():
        model(inputs["input_ids"], attention_mask=mask, past_key_values=cache)


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(sliding_window=99), r"without a softcap \(attn_logit_softcapping\)"),
        (DeepseekV3Config(), "the same head size, got 192 and 128"),
        (Qwen3NextConfig(), r"layers of the kind \['linear_attention'\]"),
    ],
    ids=["gemma2", "deepseek", "qwen3next"],
)
def test_attention_of_another_kind_is_refused(config, message):
    with pytest.raises(UnservedError, match=message):
        QuantizedKVCache(config, 9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "at least one token"),
        ({"max_tokens": 9, "dtype": "e4m3"}, "unknown dtype 'e4m3'"),
        ({"max_tokens": 9, "warm_up": "never"}, "'prompt' or 'manual', got 'never'"),
        ({"max_tokens": 9, "scales": [(torch.ones(1), torch.ones(1))]}, "2 layers, and scales were given for 1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        QuantizedKVCache(model_of("llama").config, **settings)


def test_layers_that_keep_something_else_are_refused():
    config = model_of("qwen2").config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        QuantizedKVCache(config, 9)
