"""Calls of `generate` that run on transformers' own loop, and calls that are refused."""

import copy
from typing import Any

import pytest
import torch
from generation_examples import answers, batch, pair, sessions
from kv_cache_examples import model_of
from transformers import DynamicCache

from octavo.generation.transformers_generate import accelerate_generate


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"return_dict_in_generate": True}, "a dictionary is asked for"),
        ({"use_cache": False}, "use_cache is False"),
        ({"past_key_values": True}, "a cache is given"),
        ({"position_ids": True}, "position_ids"),
    ],
)
@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_what_the_engine_does_not_cover(settings, reason, kv_cache):
    model, fast = pair("llama", kv_cache=kv_cache)
    inputs = batch()

    def call(each: Any) -> Any:
        given = dict(settings)
        if "past_key_values" in given:
            given["past_key_values"] = DynamicCache(config=model.config)
        if "position_ids" in given:
            given["position_ids"] = torch.arange(3, 14)[None].expand(3, -1)
        found = answers(each, inputs, do_sample=False, **given)
        return found if isinstance(found, torch.Tensor) else found.sequences

    required = call(model)
    with pytest.warns(UserWarning, match=f"transformers' own loop, which is slower: .*{reason}"):
        assert torch.equal(call(fast), required)
    assert torch.equal(call(fast), required)  # says it once: a warning is an error
    assert sessions(fast) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"num_beams": 3}, "beams"), ({"prompt_lookup_num_tokens": 3}, "candidates"), ({"assistant": True}, "candidates")],
)
def test_other_ways_of_decoding_are_transformers_own(settings, reason):
    model, fast = pair("llama")

    def call(each: Any) -> Any:
        given = {"assistant_model": copy.deepcopy(model)} if "assistant" in settings else settings
        return answers(each, batch(rows=1), do_sample=False, **given)

    required = call(model)
    with pytest.warns(UserWarning, match=f"transformers' own loop, which is slower: {reason}.*asked for") as said:
        assert torch.equal(call(fast), required)
    assert said[0].filename.endswith("generation_examples.py")  # the caller's line
    assert torch.equal(call(fast), required)  # says it once: a warning is an error
    assert sessions(fast) == []


def test_a_sliding_window_that_the_text_may_exceed():
    model = model_of("mistral", sliding_window=32).bfloat16()
    fast = copy.deepcopy(model)
    accelerate_generate(fast, 128)
    short, long = batch(), batch(length=30)
    assert torch.equal(
        answers(fast, short, do_sample=False, max_new_tokens=8),
        answers(model, short, do_sample=False, max_new_tokens=8),
    )
    required = answers(model, long, do_sample=False)
    with pytest.warns(UserWarning, match="the sliding window of 32 tokens"):
        assert torch.equal(answers(fast, long, do_sample=False), required)


def test_a_model_that_the_cache_does_not_serve():
    model = model_of("gemma2", query_pre_attn_scalar=16, sliding_window=128).bfloat16()
    asked = copy.deepcopy(model)
    accelerate_generate(asked, 128, kv_cache="fp8")
    with pytest.raises(ValueError, match="softcap.*: open the model without kv_cache"):
        answers(asked, batch(), do_sample=False)
    fast = copy.deepcopy(model)
    accelerate_generate(fast, 128)
    with pytest.warns(UserWarning, match="softcap"):
        assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))


def test_hooks_see_every_step():
    model, fast = pair("llama")
    calls: list[int] = []
    fast.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    required = answers(model, batch(), do_sample=False)
    assert torch.equal(answers(fast, batch(), do_sample=False), required)
    assert len(calls) >= required.shape[1] - 11


# --- Bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "settings", "error", "message"),
    [
        (
            batch(length=120),
            {"max_new_tokens": 24},
            ValueError,
            "128 tokens: after a prompt of 120 it can generate 9 more",
        ),
        (batch(length=130), {"max_new_tokens": 1}, ValueError, "sees 128 tokens, and the prompt has 130"),
        (batch(), {"no_such_setting": 1}, ValueError, "no_such_setting"),
        (batch(), {"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
    ],
)
def test_bad_input(inputs, settings, error, message):
    _, fast = pair("llama")
    seen: list[int] = []
    fast.model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(error, match=message):
        answers(fast, inputs, **settings)
    assert seen == []  # before anything runs


def test_padding_on_the_right_is_refused():
    _, fast = pair("llama")
    inputs = batch()
    inputs["attention_mask"][1, -2:] = 0
    with pytest.raises(ValueError, match=r"row 1 of attention_mask \[3, 11\] .* tokenizer.padding_side = 'left'"):
        answers(fast, inputs, do_sample=False)


def test_an_unknown_dtype_of_the_cache():
    with pytest.raises(ValueError, match="unknown dtype 'fp4' of keys and values"):
        pair("llama", kv_cache="fp4")
