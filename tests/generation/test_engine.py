"""The engine: sessions that stay, prompts that share a prefix, and texts of models of ours."""

from typing import Any

import pytest
import torch
from generation_examples import answers, batch, pair, sessions
from model_examples import GPT, GQA, lively, tokens

from octavo.generation import Engine, Sampling
from octavo.generation.memory import capacity_for
from octavo.generation.prompts import Prompts


def greedy(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def run(engine: Engine, prompts: Prompts, new: int) -> torch.Tensor:
    *_, (ids, _) = engine.run(prompts, new, greedy, None, watched=False)
    return ids


@pytest.mark.parametrize(
    ("tokens", "context", "capacity"),
    [(1, 4096, 256), (256, 4096, 256), (257, 4096, 384), (385, 4096, 512), (3000, 4096, 3072), (1, 100, 100)],
)
def test_few_sizes_serve_all_lengths(tokens, context, capacity):
    assert capacity_for(tokens, context) == capacity


def test_a_session_serves_later_calls():
    _, fast = pair("llama")
    answers(fast, batch(length=11), do_sample=False)
    (session,) = fast.octavo_engine.sessions
    keys = session.cache.stores[0].keys
    answers(fast, batch(length=20, padding=(0, 3, 1)), do_sample=False)
    assert fast.octavo_engine.sessions == [session]
    assert session.cache.stores[0].keys is keys
    answers(fast, batch(rows=2), do_sample=False)
    assert [each.batch for each in fast.octavo_engine.sessions] == [3, 2]
    for rows in (4, 5, 6):
        answers(fast, batch(rows=rows), do_sample=False)
    assert [each.batch for each in fast.octavo_engine.sessions] == [2, 4, 5, 6]


@pytest.mark.parametrize("padding", [(), (0, 9, 3, 17)], ids=["equal", "padded"])
@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8"])
def test_a_shared_prefix_is_computed_once(monkeypatch, padding, kv_cache):
    """The tokens are those of prompts computed apart; a forward pass sees the prefix in one row only."""
    _, fast = pair("llama", torch.float32, kv_cache=kv_cache)
    inputs = batch(rows=4, length=60, padding=padding)
    prefix = torch.randint(8, 97, (40,), generator=torch.Generator().manual_seed(0))
    for row, begin in enumerate(padding or (0, 0, 0, 0)):
        inputs["input_ids"][row, begin : begin + 40] = prefix
    shapes: list[tuple[int, ...]] = []
    fast.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    monkeypatch.setattr("octavo.generation.session.SHARED", 10_000)
    required, apart = answers(fast, inputs, do_sample=False), list(shapes)
    shapes.clear()
    monkeypatch.setattr("octavo.generation.session.SHARED", 100)
    found = answers(fast, inputs, do_sample=False)
    assert apart[0] == (4, 60)
    assert shapes[:2] == [(1, 40), (4, 20)]
    if kv_cache == "auto":
        assert torch.equal(found, required)
    else:  # the scales are those of other keys, and later pieces read rounded keys
        assert (found == required).float().mean() > 0.8


def test_a_second_generation_in_the_same_thread_is_an_error():
    model = lively(GQA)
    engine = Engine(model, context=model.config.context)
    first = engine.run(Prompts(tokens(), (0, 0)), 5, greedy, None, watched=True)
    next(first)
    with pytest.raises(RuntimeError, match="finish that generation, or close its iterator"):
        run(engine, Prompts(tokens(), (0, 0)), 5)
    first.close()
    run(engine, Prompts(tokens(), (0, 0)), 5)


@pytest.mark.parametrize("config", [GQA, GPT], ids=["llama", "gpt2"])
def test_a_model_of_ours_generates_its_most_likely_tokens(config):
    model = lively(config)
    engine = Engine(model, context=model.config.context)
    text = run(engine, Prompts(tokens(2, 9), (0, 0)), 12)
    with torch.no_grad():
        assert torch.equal(model(text[:, :-1]).argmax(-1)[:, 8:], text[:, 9:])


@pytest.mark.parametrize("config", [GQA, GPT], ids=["llama", "gpt2"])
def test_padding_does_not_change_a_text_of_ours(config):
    model: Any = lively(config)
    engine = Engine(model, context=model.config.context)
    ids = tokens(2, 9)
    alone = run(engine, Prompts(ids[1:, 4:], (0,)), 6)[0, 5:]
    padded = run(engine, Prompts(ids, (0, 4)), 6)[1, 9:]
    assert torch.equal(padded, alone)


def test_warm_up_makes_the_session_of_the_next_call():
    _, fast = pair("llama")
    fast.octavo_engine.warm_up(batch=3, tokens=20)
    (session,) = fast.octavo_engine.sessions
    answers(fast, batch(), do_sample=False)
    assert fast.octavo_engine.sessions == [session]


def test_a_model_that_was_cast_gets_a_new_cache():
    model, fast = pair("llama")
    assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))
    model.float()
    fast.float()
    assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))
    assert [session.cache.stores[0].keys.dtype for session in sessions(fast)] == [torch.float32]


def test_prompts_may_be_a_tensor():
    model, _ = pair("llama")
    engine, ids = Engine(model, context=128), batch()["input_ids"]
    sampling = Sampling(temperature=0)
    assert list(engine.generate(ids, 5, sampling)) == list(engine.generate(ids.tolist(), 5, sampling))


def test_another_default_device():
    model, fast = pair("llama")
    inputs, text = batch(), torch.arange(8, 97).repeat(4)[None, :120].expand(4, -1)
    required = [answers(model, each, do_sample=False, max_new_tokens=5) for each in (inputs, {"input_ids": text})]
    with torch.device("meta"):
        assert torch.equal(answers(fast, inputs, do_sample=False, max_new_tokens=5), required[0])
        shared = answers(fast, {"input_ids": text}, do_sample=False, max_new_tokens=5)  # a prefix of all prompts
    assert torch.equal(shared, required[1])
