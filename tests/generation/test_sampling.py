"""Sampling: cached generation against the same model without a cache."""

import model_examples
import pytest
import torch

from octavo.generation.sampling import generate, sample
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig

LLAMA = LlamaConfig(vocabulary=53, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=16)
GPT = GPT2Config(vocabulary=53, layers=2, width=24, heads=3, context=16)
MODELS = pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt2"])


def lively(config: LlamaConfig | GPT2Config) -> Llama | GPT2:
    """Greedy text that does not repeat one token, and gaps that rounding cannot close."""
    return model_examples.lively(config, 0.3)


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(53, (batch, length), generator=torch.Generator().manual_seed(5))


@MODELS
def test_cached_greedy_equals_uncached_also_past_the_context(config: LlamaConfig | GPT2Config) -> None:
    model, text = lively(config), prompt(2, 6)
    for token in generate(model, text, 40, temperature=0, context=16):
        text = text[:, -8:] if text.shape[1] > 16 else text
        with torch.inference_mode():
            assert torch.equal(token, model(text)[:, -1].argmax(-1))
        text = torch.cat((text, token[:, None]), dim=1)
    assert len(text.unique()) > 5


def test_with_the_cache_only_new_tokens_are_computed() -> None:
    model = lively(LLAMA)
    fed: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].shape[1]))
    list(generate(model, prompt(1, 6), 5, context=8))
    assert fed == [6, 1, 1, 4, 1]  # at 9 tokens the last 4 start anew


def test_at_the_limit_it_goes_on_from_the_last_half_of_the_context() -> None:
    model, text = lively(GPT), prompt(1, 11)
    first, second = generate(model, text, 2, temperature=0, context=10)
    with torch.inference_mode():
        assert torch.equal(first, model(text[:, -5:])[:, -1].argmax(-1))
        longer = torch.cat((text[:, -5:], first[:, None]), dim=1)
        assert torch.equal(second, model(longer)[:, -1].argmax(-1))


def test_a_seed_repeats_the_text_and_leaves_the_global_generator_alone() -> None:
    model, text = lively(LLAMA), prompt(4, 3)
    before = torch.get_rng_state()
    runs = [torch.stack(list(generate(model, text, 8, seed=seed, context=16))) for seed in (7, 7, 8)]
    unseeded = [torch.stack(list(generate(model, text, 8, temperature=5.0, context=16))) for _ in range(2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.equal(unseeded[0], unseeded[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_follow_the_tempered_distribution_of_the_top_k() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(40000, 4)
    random = torch.Generator().manual_seed(0)
    counts = sample(logits, 2.0, 3, random).bincount(minlength=4) / 40000
    want = torch.tensor([0.0, 1.5, 0.5, 1.0]).exp() * torch.tensor([0, 1, 1, 1])
    torch.testing.assert_close(counts, want / want.sum(), rtol=0, atol=0.01)
    assert counts[0] == 0
    assert sample(logits, 1.0, 99, random).bincount(minlength=4).min() > 0
    assert sample(logits, 0.0, 0, random).unique().tolist() == [1]


def test_training_mode_comes_back_also_when_the_reader_stops_early() -> None:
    model = lively(LLAMA)
    stream = generate(model, prompt(1, 2), 5, context=16)
    next(stream)
    assert not model.training
    stream.close()
    assert model.training
    list(generate(model.eval(), prompt(1, 2), 2, context=16))
    assert not model.training


@pytest.mark.parametrize(
    "change",
    [{"temperature": -1.0}, {"top_k": -1}, {"count": -1}, {"context": 17}, {"context": 1}, {"tokens": prompt(1, 0)}],
)
def test_arguments_out_of_range_are_refused_at_the_call(change: dict[str, object]) -> None:
    arguments = {"tokens": prompt(1, 2), "count": 1, "context": 16} | change
    with pytest.raises(ValueError, match=r"must be"):
        generate(lively(LLAMA), **arguments)  # type: ignore[arg-type]
