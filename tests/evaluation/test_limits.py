"""Budgets as they are typed, and as they are shown."""

import pytest

from octavo.evaluation import Budget
from octavo.evaluation.metrics import Estimate


@pytest.mark.parametrize(
    "text",
    [
        "kl=", "kl=x", "kl=-1", "kl=0", "kl=nan", "kl=inf", "kl=1%", "ppl=%", "ppl=5", "ppl=0%", "ppl=101%", "cosine=0",
        "cosine=1", "cosine=99%",
    ],
)  # fmt: skip
def test_a_limit_that_means_nothing(text: str) -> None:
    measure, _, limit = text.partition("=")
    with pytest.raises(ValueError, match=f"the budget {measure} must be .*; got '{limit}'"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["much", "loss=1"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ValueError, match=r"a budget reads kl=0.01 \(nats a token\) or ppl=0.5%"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("measure", "estimate", "shown"),
    [
        ("cosine", Estimate(0.9999731, 0.9999712, 0.9999749), "cosine=0.999973 (0.999971 to 0.999975)"),
        ("kl", Estimate(0.00429, 0.00351, 0.00502), "kl=0.00429 (0.00351 to 0.00502)"),
        ("ppl", Estimate(0.0123456, -0.001, 0.03), "ppl=1.235% (-0.100% to 3.000%)"),
        ("kl", Estimate(0.5, None, None), "kl=0.5"),
    ],
)
def test_an_interval_is_rounded_as_its_mean(measure: str, estimate: Estimate, shown: str) -> None:
    assert Budget(measure, 0.5).show_estimate(estimate) == shown


def test_what_is_a_budget() -> None:
    assert Budget.parse("cosine=0.999") == Budget("cosine", 0.999)
    assert Budget.parse("kl=0.01") == Budget("kl", 0.01)
    assert Budget.parse("ppl=100%") == Budget("ppl", 1)
    assert Budget.parse("ppl=0.5%") == Budget.parse("ppl=0.005") == Budget("ppl", 0.005)
