"""How tokens are chosen, against the processors of transformers and torch.multinomial."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.generation.sampling import Sampling, draw

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.8, "top_k": 5},
    {"top_k": 999},
    {"top_p": 0.6},
    {"temperature": 0.5, "top_p": 1e-6},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.2},
]


def processors(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, repetition_penalty: float = 1.0
) -> LogitsProcessorList:
    """In the order of transformers' generate, and only those that it makes."""
    each = LogitsProcessorList()
    if repetition_penalty != 1:
        each.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature != 1:
        each.append(TemperatureLogitsWarper(temperature))
    if top_k:
        each.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        each.append(TopPLogitsWarper(top_p))
    return each


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [3, 9] that repeat each other, and logits [3, 97] with ties."""
    torch.manual_seed(2)
    return torch.randint(97, (3, 9)), (torch.randn(3, 97) * 6).round() / 2


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_transformers(settings: dict[str, float], dtype: torch.dtype) -> None:
    ids, logits = inputs()
    logits = logits.to(dtype)
    before = logits.clone()
    found = Sampling(**settings).process(ids, logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, processors(**settings)(ids, logits.float()))
    assert torch.equal(logits, before)


def test_padding_has_no_penalty() -> None:
    ids, logits = inputs()
    padding = [0, 4, 8]
    ids[1, :4], ids[2, :8] = 0, 0
    logits[:, 0] = 5.0
    sampling = Sampling(repetition_penalty=2.0)
    assert 0 not in ids[0]
    found = sampling.process(ids, logits, torch.tensor(padding)[:, None])
    for row, begin in enumerate(padding):
        alone = ids[row : row + 1, begin:], logits[row : row + 1]
        assert torch.equal(found[row : row + 1], processors(repetition_penalty=2.0)(*alone))


def test_a_chooser_knows_the_padding() -> None:
    ids = torch.tensor([[5, 5, 5], [0, 0, 5]])
    logits = torch.zeros(2, 9)
    logits[:, 0], logits[:, 5] = 2.0, 3.0
    sampling = Sampling(temperature=0, repetition_penalty=2.0)
    random = sampling.generator(torch.device("cpu"))
    assert sampling.chooser(random, (0, 2))(ids, logits).tolist() == [0, 0]
    assert sampling.chooser(random)(ids, logits).tolist() == [0, 5]  # token 0 counts as one of the second row


def test_temperature_0_is_the_most_likely_token_after_the_penalty() -> None:
    ids, logits = inputs()
    sampling = Sampling(temperature=0, repetition_penalty=50.0)
    found = sampling.chooser(sampling.generator(torch.device("cpu")))(ids, logits)
    assert torch.equal(found, processors(repetition_penalty=50.0)(ids, logits).argmax(-1))


@pytest.mark.parametrize("vocabulary", [7, 5000])
def test_draws_are_those_of_multinomial(vocabulary: int) -> None:
    scores = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    scores[:, ::3] = -torch.inf
    for seed in range(20):
        random, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
        required = torch.multinomial(scores.softmax(-1), 1, generator=theirs)[:, 0]
        assert torch.equal(draw(scores, random), required)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(40000, 4)
    sampling = Sampling(temperature=2.0, top_k=3, seed=0)
    choose = sampling.chooser(sampling.generator(torch.device("cpu")))
    counts = choose(torch.zeros(40000, 1, dtype=torch.int64), logits).bincount(minlength=4) / 40000
    required = torch.tensor([0.0, 1.5, 0.5, 1.0]).exp() * torch.tensor([0, 1, 1, 1])
    torch.testing.assert_close(counts, required / required.sum(), rtol=0, atol=0.01)
    assert counts[0] == 0


def test_a_seed_repeats_the_draws_and_leaves_the_global_generator_alone() -> None:
    logits, before, device = torch.zeros(4, 1000), torch.get_rng_state(), torch.device("cpu")

    def drawn(seed: int | None) -> list[int]:
        sampling = Sampling(seed=seed)
        return sampling.chooser(sampling.generator(device))(torch.zeros(4, 1, dtype=torch.int64), logits).tolist()

    assert drawn(7) == drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"top_k": -1}, "top_k must be 0 or more, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
        ({"seed": -1}, "seed must be from 0 to 2"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
