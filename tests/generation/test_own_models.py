"""The engine with our own models, against the same model without a cache."""

import model_examples
import pytest
import torch

from octavo.generation import Engine, Sampling
from octavo.generation.prompts import pad_prompts
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig

LLAMA = LlamaConfig(vocabulary=53, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=16)
GPT = GPT2Config(vocabulary=53, layers=2, width=24, heads=3, context=16)
MODELS = pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt2"])
GREEDY = Sampling(temperature=0)


def lively(config: LlamaConfig | GPT2Config) -> Llama | GPT2:
    """Greedy text that does not repeat one token, and gaps that rounding cannot close."""
    return model_examples.lively(config, 0.3).eval()


def prompt(length: int, seed: int = 5) -> list[int]:
    return torch.randint(53, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def uncached(model: Llama | GPT2, text: list[int], count: int, context: int = 16) -> list[int]:
    """Greedy tokens, each from one forward pass over the text, or over its last half once it exceeds the context."""
    new = []
    for _ in range(count):
        text = text[-(context // 2) :] if len(text) > context else text
        with torch.no_grad():
            new.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        text = [*text, new[-1]]
    return new


@MODELS
def test_greedy_tokens_of_each_prompt_are_those_without_a_cache(config: LlamaConfig | GPT2Config) -> None:
    model, prompts = lively(config), [prompt(6), prompt(2, 6), prompt(3, 7)]
    found = list(Engine(model, context=16).generate(prompts, 10, GREEDY))
    for row, text in zip(zip(*found, strict=True), prompts, strict=True):
        assert list(row) == uncached(model, text, 10)
    assert len({token for row in found for token in row}) > 5


@MODELS
def test_a_text_goes_on_past_the_context_from_its_last_half(config: LlamaConfig | GPT2Config) -> None:
    model = lively(config)
    found = [token for [token] in Engine(model, context=10).generate([prompt(6)], 40, GREEDY)]
    assert found == uncached(model, prompt(6), 40, 10)


def test_only_new_tokens_are_computed() -> None:
    model = lively(LLAMA)
    fed: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].shape[1]))
    list(Engine(model, context=8).generate([prompt(6)], 5, GREEDY))
    assert fed == [6, 1, 1, 4, 1]  # at 9 tokens the last 4 start anew


def test_a_stop_token_ends_the_text_of_its_prompt() -> None:
    model, prompts = lively(LLAMA), [prompt(6), prompt(4, 7)]
    texts = [uncached(model, text, 8) for text in prompts]
    stop = next(token for token in texts[0][2:] if token not in texts[1] and token not in texts[0][:2])
    at = texts[0].index(stop)
    found = list(Engine(model, context=16).generate(prompts, 8, GREEDY, stop={stop}))
    assert [row[0] for row in found] == texts[0][:at] + [None] * (8 - at)
    assert [row[1] for row in found] == texts[1]
    alone = list(Engine(model, context=16).generate(prompts[:1], 8, GREEDY, stop={stop}))
    assert [token for [token] in alone] == texts[0][:at]


def test_a_seed_repeats_the_text() -> None:
    engine, before = Engine(lively(LLAMA), context=16), torch.get_rng_state()

    def drawn(seed: int | None) -> list[list[int | None]]:
        return list(engine.generate([prompt(3), prompt(2)], 8, Sampling(temperature=3.0, seed=seed)))

    assert drawn(7) == drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cache_serves_in_inference_mode_and_outside_of_it() -> None:
    engine = Engine(lively(LLAMA), context=16)
    batch = pad_prompts([prompt(6)], torch.device("cpu"))
    for _ in range(2):
        found = [token for [token] in engine.generate([prompt(6)], 5, GREEDY)]
        for text, _tokens in engine.run(batch, 5, lambda ids, logits: logits.argmax(-1), None, watched=False):
            ids = text
        assert ids[0, 6:].tolist() == found
        assert not ids.is_inference()
    assert len(engine.sessions) == 1
