"""Attention that rotates and stores in one operation, against transformers' own forward with the same cache."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_cache_examples import DTYPES, model_of, prompts
from operation_counts import operations
from torch import Tensor
from transformers import DynamicCache

from octavo.kv_cache.served_attention import ServedAttention, serve_attention
from octavo.kv_cache.transformers_cache import QuantizedKVCache

ROTATE = "octavo::rotate_append"
NAMES = ["llama", "mistral", "qwen2", "qwen3"]


def both(name: str) -> tuple[Any, Any]:
    """The same BF16 model twice: as transformers runs it, and with its attention served."""
    model = model_of(name).bfloat16()
    served = copy.deepcopy(model)
    serve_attention(served)
    return model, served


def run(model: Any, cache: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of a prompt in two pieces, of three tokens, and of the whole prompt into the cache, reset."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    found = []
    with torch.no_grad():
        padded = torch.cat((mask, mask.new_ones(len(mask), 3)), 1)
        for begin, end, stored in ((0, 6, 6), (6, 9, 9), (3, 4, 10), (5, 6, 11), (0, 1, 12)):
            seen = padded[:, :stored]
            found.append(model(ids[:, begin:end], attention_mask=seen, past_key_values=cache).logits)
        cache.reset()
        found.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
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
    cache = QuantizedKVCache.for_model(model, 25, "bf16")
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.int64), past_key_values=cache)
        seen = operations(lambda: model(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache))
    assert (seen[ROTATE], seen["octavo::append_kv"]) == (2, 0)


def filled(model: Any) -> QuantizedKVCache:
    cache = QuantizedKVCache.for_model(model, 25, "bf16")
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.int64), past_key_values=cache)
    return cache


def step(model: Any, cache: Any) -> int:
    """How many layers run the one operation in a decoding step."""
    return operations(lambda: model(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache))[ROTATE]


def in_training(model: Any) -> None:
    model.train()


def hooked(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [in_training, hooked])
def test_the_own_forward_runs_where_the_operation_would_not_do_the_same(change: Callable[[Any], None]):
    _, model = both("qwen3")
    cache = filled(model)
    with torch.no_grad():
        assert step(model, cache) == 2
        change(model)
        assert step(model, cache) == 0
        assert int(cache.stores[1].length) == 6


def test_gradients_autocast_and_another_cache_run_the_own_forward():
    _, model = both("llama")
    cache = filled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert step(model, cache) == 0
    with pytest.raises(RuntimeError, match="no_grad"):
        step(model, cache)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        assert step(model, DynamicCache(config=model.config)) == 0
        own = model_of("llama").bfloat16()
        ids = prompts(False)["input_ids"]
        assert torch.equal(model(ids).logits, own(ids).logits)


def test_hooks_of_projections_are_called():
    _, model = both("llama")
    cache, called = filled(model), []
    for name in ("q_proj", "o_proj"):
        getattr(model.model.layers[0].self_attn, name).register_forward_hook(lambda *_: called.append(True))
    with torch.no_grad():
        step(model, cache)
    assert len(called) == 2


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
