"""`generate` of a model with an engine gives what transformers' own loop gives, token for token."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from generation_examples import SAMPLED, answers, batch, model_of, pair, sessions
from tiny_models import with_slow
from transformers import AutoTokenizer, DynamicCache, StoppingCriteriaList

from octavo.inference.transformers_cache import CACHE
from octavo.inference.transformers_generate import Accelerated, accelerate_generate
from octavo.models.tokenizer import ByteTokenizer


@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("padding", [(), (0, 4, 9)], ids=["equal", "padded"])
@pytest.mark.parametrize("name", with_slow(["llama", "mistral", "qwen2", "qwen3", "opt"]))
def test_tokens_are_those_of_transformers(name, padding, settings):
    model, fast = pair(name)
    inputs = batch(padding=padding)
    for seed in range(2):
        required = answers(model, inputs, seed, **settings)
        assert torch.equal(answers(fast, inputs, seed, **settings), required)
    assert len(sessions(fast)) == 1
    assert fast.octavo_notices == set()


def texts(model, rows: int) -> torch.Tensor:
    return answers(model, batch(rows=rows), do_sample=False, eos_token_id=None)[:, 11:]


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (1, lambda m: {"eos_token_id": int(texts(m, 1)[0, 4])}),  # the text ends early
        (4, lambda m: {"eos_token_id": [int(texts(m, 4)[row, n]) for row, n in ((0, 3), (1, 9), (2, 17))]}),
        (3, lambda m: {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] % 5 == 0], "pad_token_id": 0}),
        (3, lambda m: {"no_repeat_ngram_size": 2, "min_new_tokens": 5}),
        (1, lambda m: SAMPLED | {"num_return_sequences": 3}),
    ],
    ids=["one end", "ends of their own", "criteria", "processors", "several texts"],
)
def test_settings_of_transformers(rows, settings):
    model, fast = pair("llama")
    given = {"do_sample": False} | settings(model)
    if "stopping_criteria" in given:
        given["stopping_criteria"] = StoppingCriteriaList(given["stopping_criteria"])
    required = answers(model, batch(rows=rows), **given)
    assert torch.equal(answers(fast, batch(rows=rows), **given), required)
    assert not {"eos_token_id", "stopping_criteria"} & given.keys() or required.shape[1] < 35 or rows == 4
    assert rows < 4 or len({tuple((row == 0).tolist()) for row in required}) > 1  # others go on beside padding


def test_draws_go_on_from_the_same_random_numbers():
    """The step that is queued when the text ends draws no token: what is drawn later does not change."""
    model, fast = pair("llama")
    inputs, found = batch(rows=1), []
    end = int(answers(model, inputs, **SAMPLED, eos_token_id=None)[0, 15])
    for each in (model, fast):
        answers(each, inputs, **SAMPLED, eos_token_id=end)
        found.append(torch.rand(4))
    assert torch.equal(*found)


def test_strings_that_end_a_text(tmp_path):
    model, fast = pair("llama")
    ByteTokenizer().save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = batch(rows=1)
    last = answers(model, inputs, do_sample=False)[0, 15]
    settings = {"do_sample": False, "stop_strings": [tokenizer.decode(last)], "tokenizer": tokenizer}
    required = answers(model, inputs, **settings)
    assert required.shape[1] <= 16
    assert torch.equal(answers(fast, inputs, **settings), required)
    assert len(sessions(fast)) == 1


class Listener:
    """A streamer that records what it gets, and after how many steps."""

    def __init__(self) -> None:
        self.got, self.seen, self.steps = list[list[int]](), list[int](), list[int]()
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())
        self.seen.append(len(self.steps))

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_every_token_while_the_text_grows():
    model, fast = pair("llama")
    listeners, computed = [Listener(), Listener()], list[int]()
    fast.lm_head.register_forward_hook(lambda *_: computed.append(1))
    for each, listener in zip((model, fast), listeners, strict=True):
        listener.steps = computed
        answers(each, batch(rows=1), do_sample=False, streamer=listener, max_new_tokens=60, eos_token_id=None)
    assert listeners[1].ended
    assert listeners[1].got == listeners[0].got
    seen = listeners[1].seen
    assert len(seen) == 61  # the first is the prompt
    assert all(steps <= tokens + 1 for tokens, steps in enumerate(seen))  # the GPU computes the next meanwhile


def test_a_cache_in_eight_bits_as_it_was_asked_for():
    _, fast = pair("llama", kv_cache="int8")
    inputs = batch(padding=(0, 4, 9))
    text = answers(fast, inputs, do_sample=False)
    assert {store.keys.dtype for store in sessions(fast)[0].cache.stores} == {torch.int8}
    # The scales are those of this prompt, whatever the session held before.
    answers(fast, batch(length=9), do_sample=False)
    assert torch.equal(answers(fast, inputs, do_sample=False), text)


def test_prompts_in_pieces():
    """A piece attends to the pieces before it: the tokens are those of the whole prompt."""
    model, fast = pair("llama", torch.float32)
    for padding in ((), (0, 4, 9)):
        inputs = batch(length=40, padding=padding)
        required = answers(model, inputs, do_sample=False)
        assert torch.equal(answers(fast, inputs, do_sample=False, prefill_chunk_size=7), required)


# --- The model stays a model -------------------------------------------------------------------------------------


def test_names_copies_and_pickles():
    _, fast = pair("llama")
    text = answers(fast, batch(), do_sample=False)
    assert type(fast).__name__ == "LlamaForCausalLM"
    assert isinstance(fast, Accelerated)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert other.octavo_engine.model is other
        assert sessions(other) == []
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert not torch.equal(answers(other, batch(), do_sample=False, eos_token_id=None)[:, :20], text[:, :20])
    assert torch.equal(answers(fast, batch(), do_sample=False), text)


def test_threads_take_turns():
    model, fast = pair("llama")
    inputs = [batch(length=n) for n in (9, 10, 12)]
    required = [answers(model, each, do_sample=False) for each in inputs]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda each: fast.generate(**each, max_new_tokens=24, do_sample=False), inputs)
    assert all(map(torch.equal, found, required))


def test_an_error_in_the_middle_leaves_the_engine_usable():
    model, fast = pair("llama")
    broken = StoppingCriteriaList([lambda ids, scores, **_: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        answers(fast, batch(), do_sample=False, stopping_criteria=broken)
    assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))


# ---- Calls of `generate` that run on transformers' own loop, and calls that are refused


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (lambda model: {"return_dict_in_generate": True}, "a dictionary is asked for"),
        (lambda model: {"use_cache": False}, "use_cache is False"),
        (lambda model: {CACHE: DynamicCache(config=model.config)}, "a cache is given"),
        (lambda model: {"position_ids": torch.arange(3, 14)[None]}, "position_ids"),
        (lambda model: {"num_beams": 3}, "beams are asked for"),
        (lambda model: {"prompt_lookup_num_tokens": 3}, "candidates of .* are asked for"),
        (lambda model: {"assistant_model": copy.deepcopy(model)}, "candidates of .* are asked for"),
    ],
    ids=["dictionary", "no cache", "a cache", "positions", "beams", "lookup", "assistant"],
)
@pytest.mark.parametrize("kv_cache", with_slow(["auto", "fp8"], ("auto",)))
def test_what_the_engine_does_not_cover_is_transformers_own(settings, reason, kv_cache):
    model, fast = pair("llama", kv_cache=kv_cache)

    def call(each):
        found = answers(each, batch(rows=1), do_sample=False, **settings(model))
        return found if isinstance(found, torch.Tensor) else found.sequences

    required = call(model)
    with pytest.warns(UserWarning, match=f"transformers' own loop, which is slower: .*{reason}") as said:
        assert torch.equal(call(fast), required)
    assert said[0].filename.endswith("generation_examples.py")  # the caller's line
    assert torch.equal(call(fast), required)  # says it once: a warning is an error
    assert sessions(fast) == []


def test_a_sliding_window_that_the_text_may_exceed():
    model = model_of("mistral", sliding_window=32).bfloat16()
    fast = copy.deepcopy(model)
    accelerate_generate(fast, 128)
    long, short = batch(length=30), {"inputs": batch(), "do_sample": False, "max_new_tokens": 8}
    assert torch.equal(answers(fast, **short), answers(model, **short))
    required = answers(model, long, do_sample=False)
    with pytest.warns(UserWarning, match="the sliding window of 32 tokens"):
        assert torch.equal(answers(fast, long, do_sample=False), required)


@pytest.mark.parametrize(("name", "reason"), [("gemma2", "softcap"), ("mamba", "attention from outside")])
def test_a_model_that_the_cache_does_not_serve(name, reason):
    model = model_of(name, query_pre_attn_scalar=16, sliding_window=128).bfloat16()
    asked = copy.deepcopy(model)
    accelerate_generate(asked, 128, kv_cache="fp8")
    with pytest.raises(ValueError, match=f"{reason}.*: open the model without kv_cache"):
        answers(asked, batch(), do_sample=False)
    fast = copy.deepcopy(model)
    accelerate_generate(fast, 128)
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))


def test_hooks_see_every_step():
    model, fast = pair("llama")
    calls: list[int] = []
    fast.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    required = answers(model, batch(), do_sample=False)
    assert torch.equal(answers(fast, batch(), do_sample=False), required)
    assert len(calls) >= required.shape[1] - 11
