"""Budgets: how much of a model's quality packing may cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from octavo.evaluation.metrics import Estimate, LogitQuality, Quality

_RANGES = {
    "kl": "nats a token above 0, such as 0.01",
    "ppl": "a percentage above 0% and up to 100%, such as 0.5%, or a fraction below 1, such as 0.005",
    "cosine": "above 0 and below 1, such as 0.999",
}


@dataclass(frozen=True)
class Budget:
    """A limit on one measure of quality.

    Attributes:
        measure: "kl" (KL divergence from the model in BF16, nats a token), "ppl" (relative rise of perplexity), or for
            encoders "cosine" (mean cosine of the mean-pooled last hidden states).
        limit: the most KL, the largest rise of perplexity (0.005 is half a percent), or the least cosine.
    """

    measure: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read kl=0.01, ppl=0.005 (or ppl=0.5%, which is the same) or cosine=0.999.

        Raises:
            ValueError: another measure, or a limit that is not a number in the measure's range.
        """
        measure, _, limit = text.partition("=")
        if measure not in _RANGES:
            raise ValueError(
                "a budget reads kl=0.01 (nats a token) or ppl=0.5% (perplexity, relative), and for an encoder "
                f"cosine=0.999, got {text!r}"
            )
        percent = measure == "ppl" and limit.endswith("%")
        try:
            value = float(limit.removesuffix("%")) / 100 if percent else float(limit)
        except ValueError:
            value = math.nan
        upper = math.inf if measure == "kl" else 1
        if not (0 < value < upper or (percent and value == 1)):
            raise ValueError(f"the budget {measure} must be {_RANGES[measure]}; got {limit!r}")
        return cls(measure, value)

    @property
    def of_logits(self) -> bool:
        """Whether the measure is for language models. Otherwise it is for encoders."""
        return self.measure != "cosine"

    def estimate(self, quality: Quality) -> Estimate:
        if not isinstance(quality, LogitQuality):
            return quality.cosine
        return quality.kl if self.measure == "kl" else quality.perplexity_ratio

    def holds(self, quality: Quality) -> bool:
        value = self.estimate(quality).value
        return value <= self.limit if self.of_logits else value >= self.limit

    def show(self, value: float) -> str:
        """A value of the measure for a message, such as kl=0.01."""
        return f"{self.measure}={self._number(value)}"

    def show_estimate(self, estimate: Estimate) -> str:
        if estimate.low is None or estimate.high is None:
            return self.show(estimate.value)
        return f"{self.show(estimate.value)} ({self._number(estimate.low)} to {self._number(estimate.high)})"

    def _number(self, value: float) -> str:
        return f"{value:.3%}" if self.measure == "ppl" else f"{value:.{4 if self.of_logits else 6}g}"


def check_budgets(budgets: Sequence[Budget], *, language_model: bool) -> None:
    """Raise a ValueError unless every budget is for a model of this kind."""
    if any(budget.of_logits != language_model for budget in budgets):
        raise ValueError(
            "budgets of kl and ppl are for language models, those of cosine for encoders: the model is "
            f"{'a language model' if language_model else 'an encoder'}"
        )
