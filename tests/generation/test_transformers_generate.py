"""`generate` of a model with an engine gives what transformers' own loop gives, token for token."""

import copy
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from generation_examples import answers, batch, pair, sessions
from transformers import AutoTokenizer, StoppingCriteriaList, TextIteratorStreamer

from octavo.generation.transformers_generate import Accelerated, accelerate_generate
from octavo.models.tokenizer import ByteTokenizer

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}


@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("padding", [(), (0, 4, 9)], ids=["equal", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_tokens_are_those_of_transformers(name, padding, settings):
    model, fast = pair(name)
    inputs = batch(padding=padding)
    for seed in range(2):
        required = answers(model, inputs, seed, **settings)
        assert torch.equal(answers(fast, inputs, seed, **settings), required)
    assert len(sessions(fast)) == 1
    assert fast.octavo_notices == set()


def test_a_model_with_learned_positions():
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=128, word_embed_proj_dim=64)).bfloat16().eval()
    fast = copy.deepcopy(model)
    accelerate_generate(fast, 128)
    inputs = batch(padding=(0, 4, 9))
    assert torch.equal(answers(fast, inputs, do_sample=False), answers(model, inputs, do_sample=False))
    assert fast.octavo_notices == set()


def test_sequences_end_at_their_own_places():
    """Rows end at different tokens; the others go on, and the ended ones are padded."""
    model, fast = pair("llama")
    inputs = batch(rows=4)
    text = answers(model, inputs, do_sample=False, eos_token_id=None)[:, 11:]
    ends = [int(text[0, 3]), int(text[1, 9]), int(text[2, 17])]
    required = answers(model, inputs, do_sample=False, eos_token_id=ends)
    assert len({tuple((row == 0).tolist()) for row in required}) > 1
    assert torch.equal(answers(fast, inputs, do_sample=False, eos_token_id=ends), required)


def test_a_text_ends_early():
    model, fast = pair("llama")
    inputs = batch(rows=1)
    end = int(answers(model, inputs, do_sample=False)[0, 15])
    required = answers(model, inputs, do_sample=False, eos_token_id=end)
    assert required.shape[1] < 11 + 24
    assert torch.equal(answers(fast, inputs, do_sample=False, eos_token_id=end), required)


def test_draws_go_on_from_the_same_random_numbers():
    """The step that is queued when the text ends draws no token: what is drawn later does not change."""
    model, fast = pair("llama")
    inputs, found = batch(rows=1), []
    end = int(answers(model, inputs, **SAMPLED, eos_token_id=None)[0, 15])
    for each in (model, fast):
        answers(each, inputs, **SAMPLED, eos_token_id=end)
        found.append(torch.rand(4))
    assert torch.equal(*found)


def test_other_criteria_and_processors_of_transformers():
    model, fast = pair("llama")
    inputs, settings = batch(padding=(0, 4, 9)), {"do_sample": False, "no_repeat_ngram_size": 2, "min_new_tokens": 5}
    assert torch.equal(answers(fast, inputs, **settings), answers(model, inputs, **settings))
    criteria = StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] % 5 == 0])
    required = answers(model, inputs, do_sample=False, stopping_criteria=criteria, pad_token_id=0)
    assert required.shape[1] < 35
    assert torch.equal(answers(fast, inputs, do_sample=False, stopping_criteria=criteria, pad_token_id=0), required)


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


def test_several_texts_of_one_prompt():
    model, fast = pair("llama")
    inputs, settings = batch(rows=1), {**SAMPLED, "num_return_sequences": 3}
    assert torch.equal(answers(fast, inputs, **settings), answers(model, inputs, **settings))


class Listener:
    """A streamer that records what it gets."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_every_token():
    model, fast = pair("llama")
    inputs, listeners = batch(rows=1), [Listener(), Listener()]
    for each, listener in zip((model, fast), listeners, strict=True):
        answers(each, inputs, do_sample=False, streamer=listener)
    assert listeners[1].ended
    assert listeners[1].got == listeners[0].got


def test_tokens_are_streamed_while_the_text_grows():
    _, fast = pair("llama")
    times: list[float] = []
    listener = Listener()
    listener.put = lambda value: times.append(time.perf_counter())  # type: ignore[method-assign]
    begin = time.perf_counter()
    answers(fast, batch(rows=1), do_sample=False, streamer=listener, max_new_tokens=60, eos_token_id=None)
    whole = time.perf_counter() - begin
    assert len(times) == 61
    assert times[10] - begin < 0.6 * whole


def test_a_cache_in_eight_bits_as_it_was_asked_for():
    model, fast = pair("llama", kv_cache="int8")
    inputs = batch(padding=(0, 4, 9))
    exact, text = answers(model, inputs, do_sample=False), answers(fast, inputs, do_sample=False)
    assert text.shape[0] == exact.shape[0]
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
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = fast.generate(**inputs[i], max_new_tokens=24, do_sample=False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], required[i]) for i in range(3))


def test_a_text_in_another_thread():
    """The way of transformers' documentation: generate in a thread, read the text from a streamer."""
    _, fast = pair("llama")
    streamer = TextIteratorStreamer(_Letters(), timeout=60)
    thread = threading.Thread(
        target=fast.generate, kwargs=batch(rows=1) | {"max_new_tokens": 9, "do_sample": False, "streamer": streamer}
    )
    thread.start()
    assert len("".join(streamer).split()) > 11
    thread.join()


class _Letters:
    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(f"{token} " for token in tokens)


def test_an_error_in_the_middle_leaves_the_engine_usable():
    model, fast = pair("llama")
    broken = StoppingCriteriaList([lambda ids, scores, **_: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        answers(fast, batch(), do_sample=False, stopping_criteria=broken)
    assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))
