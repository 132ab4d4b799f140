"""Quality over prompts, against scipy and formulas written out."""

import math

import numpy as np
import pytest
import torch
from quality import compare
from scipy import special, stats

from octavo.evaluation import metrics
from octavo.evaluation.metrics import Budget


def table(seed, scale=1.0):
    """A model of bigrams, with a little of the position."""
    logits = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) * scale
    return lambda ids: logits[ids] + 0.01 * torch.arange(ids.shape[1])[None, :, None] * logits[0]


REFERENCE = table(0, 2)


def candidate(ids):
    return REFERENCE(ids) + 0.3 * table(1)(ids)


@pytest.fixture
def batches():
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(16, (b, t), generator=draw) for b, t in ((3, 30), (2, 300), (4, 257), (1, 2))]


def test_logits_against_scipy(batches):
    found = compare(REFERENCE, candidate, batches)
    kl, agree, nll, before = [], [], [], []
    for ids in (row for batch in batches for row in batch):
        p, q = (special.log_softmax(m(ids[None])[0].double().numpy(), axis=-1) for m in (REFERENCE, candidate))
        kl.append(special.rel_entr(np.exp(p), np.exp(q)).sum(-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
        nll.append(-q[np.arange(len(ids) - 1), ids[1:].numpy()])
        before.append(-p[np.arange(len(ids) - 1), ids[1:].numpy()])
    assert found.kl.value == pytest.approx(np.concatenate(kl).mean(), rel=1e-9)
    assert found.kl.value > 0.01
    assert found.top1.value == np.concatenate(agree).mean()
    assert 0.5 < found.top1.value < 1
    assert found.perplexity.value == pytest.approx(math.exp(np.concatenate(nll).mean()), rel=1e-9)
    assert found.reference_perplexity.value == pytest.approx(math.exp(np.concatenate(before).mean()), rel=1e-9)
    change = found.perplexity.value / found.reference_perplexity.value - 1
    assert found.perplexity_ratio.value == pytest.approx(change, rel=1e-9)
    assert (found.prompts, found.tokens) == (10, sum(batch.numel() for batch in batches))


def test_a_model_against_itself(batches):
    found = metrics.compare_many(REFERENCE, {"same": REFERENCE, "other": candidate}, batches, metrics.LogitSums)
    same = found["same"]
    assert same.kl == metrics.Estimate(0, 0, 0)
    assert same.top1 == metrics.Estimate(1, 1, 1)
    assert same.perplexity_ratio == metrics.Estimate(0, 0, 0)
    assert found["other"] == compare(REFERENCE, candidate, batches)


def test_certain_models_have_a_kl():
    sure = torch.tensor([[[0.0, -math.inf], [0.0, -math.inf]]])
    found = compare(lambda ids: sure, lambda ids: torch.zeros(1, 2, 2), [torch.zeros(1, 2).long()])
    assert found.kl.value == pytest.approx(math.log(2))
    assert found.kl.low is None  # one prompt
    wrong = compare(lambda ids: torch.zeros(1, 2, 2), lambda ids: sure, [torch.ones(1, 2).long()])
    assert wrong.kl.value == wrong.perplexity.value == math.inf


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 31, 100, 1000, 5000])
def test_students_quantile(freedom):
    assert metrics.student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_intervals_hold_the_truth_as_often_as_they_say():
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        n = draw.integers(10, 50, 12).astype(float)
        a = n * (0.7 + 0.2 * draw.standard_normal(12))
        found = metrics.ratio(a.tolist(), n.tolist())
        hits += found.low < 0.7 < found.high
    assert 0.92 < hits / 2000 < 0.97


def test_a_ratio_of_equal_sizes_is_the_t_interval_of_a_mean():
    values = [0.3, 0.5, 0.1, 0.9]
    found = metrics.ratio([7 * v for v in values], [7.0] * 4)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_the_paired_interval_is_narrower():
    draw = torch.Generator().manual_seed(2)
    found = compare(REFERENCE, lambda ids: REFERENCE(ids) * 0.99, [torch.randint(16, (8, 40), generator=draw)])
    alone, paired = found.perplexity, found.perplexity_ratio
    assert paired.high - paired.low < 0.1 * (alone.high - alone.low) / alone.value


def test_an_interval_ends_where_the_quantity_does():
    sums = metrics.LogitSums()
    for tokens in (2, 40):  # a short prompt that differs, and a long one that agrees
        ids = torch.arange(tokens) % 16
        p = REFERENCE(ids[None])[0]
        sums.add(ids[None], p[None], p.flip(-1)[None] if tokens == 2 else p[None])
    found = sums.quality()
    assert found.top1.value < found.top1.high == 1
    assert 0 == found.kl.low < found.kl.value


def test_embeddings():
    hidden = torch.randn(4, 7, 32)
    noise = torch.randn(4, 7, 32) * 0.3
    ids = torch.arange(4)[:, None].expand(4, 7)
    models = (lambda ids, each=each: each[ids[:, 0]] for each in (hidden, hidden + noise))
    found = compare(*models, [ids], metrics.EmbeddingSums)
    a, b = hidden.double().mean(1), (hidden + noise).double().mean(1)
    cosines = (a * b).sum(1) / a.norm(dim=1) / b.norm(dim=1)
    assert found.cosine.value == pytest.approx(float(cosines.mean()))
    assert found.least == pytest.approx(float(cosines.min()))
    assert found.least < found.cosine.value < 1
    assert (found.prompts, found.tokens) == (4, 28)


def test_sqnr():
    x = torch.randn(100)
    assert metrics.sqnr(*metrics.energies(x, x * 1.01)) == pytest.approx(40, abs=1e-3)
    assert metrics.sqnr(*metrics.energies(x, x)) == math.inf
    assert metrics.sqnr(0, 1) == -math.inf
    assert math.isnan(metrics.sqnr(*metrics.energies(x, x * math.nan)))


# --- Budgets as they are typed, and as they are shown


@pytest.mark.parametrize(
    "text",
    [
        "kl=", "kl=x", "kl=-1", "kl=0", "kl=nan", "kl=inf", "kl=1%", "ppl=%", "ppl=5", "ppl=0%", "ppl=101%", "cosine=0",
        "cosine=1", "cosine=99%",
    ],
)  # fmt: skip
def test_a_limit_that_means_nothing(text):
    measure, _, limit = text.partition("=")
    with pytest.raises(ValueError, match=f"the budget {measure} must be .*; got '{limit}'"):
        Budget.parse(text)


def test_what_is_a_budget():
    for text in ("much", "loss=1"):
        with pytest.raises(ValueError, match=r"a budget reads kl=0.01 \(nats a token\) or ppl=0.5%"):
            Budget.parse(text)
    assert Budget.parse("cosine=0.999") == Budget("cosine", 0.999)
    assert Budget.parse("kl=0.01") == Budget("kl", 0.01)
    assert Budget.parse("ppl=100%") == Budget("ppl", 1)
    assert Budget.parse("ppl=0.5%") == Budget.parse("ppl=0.005") == Budget("ppl", 0.005)
