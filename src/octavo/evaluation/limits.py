"""What packing may cost: a budget, as a person types it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.evaluation.metrics import Estimate, LogitQuality, Quality

_ASKED = {
    "kl": "nats a token above 0, such as 0.01",
    "ppl": "a percentage above 0% and up to 100%, such as 0.5%, or a fraction below 1, such as 0.005",
    "cosine": "above 0 and below 1, such as 0.999",
}


def read_limit(measure: str, text: str, name: str) -> float:
    """The limit that `text` states for the measure kl, ppl or cosine. For ppl, "0.005" and "0.5%" are the same.

    Raises:
        ValueError: `text` is not a number, or outside of the range that makes sense. The message calls it `name`.
    """
    percent = measure == "ppl" and text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / 100 if percent else float(text)
    except ValueError:
        value = math.nan
    below = math.inf if measure == "kl" else 1
    if not (0 < value < below or (percent and value == 1)):
        raise ValueError(f"{name} must be {_ASKED[measure]}; got {text!r}")
    return value


@dataclass(frozen=True)
class Budget:
    """What packing may cost: `measure` is kl (nats a token, at most `limit`), ppl (perplexity, at most so much worse,
    relative), or of an encoder cosine (of mean-pooled last hidden states, in the mean at least `limit`)."""

    measure: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """kl=0.01, ppl=0.005 or ppl=0.5%, cosine=0.999; a ValueError for anything else."""
        measure, _, limit = text.partition("=")
        if measure not in _ASKED:
            raise ValueError(
                "a budget reads kl=0.01 (nats a token) or ppl=0.5% (perplexity, relative), and for an encoder "
                f"cosine=0.999, got {text!r}"
            )
        return cls(measure, read_limit(measure, limit, f"the budget {measure}"))

    @property
    def of_logits(self) -> bool:
        """Whether it is for language models; else it is for encoders."""
        return self.measure != "cosine"

    def estimate(self, quality: Quality) -> Estimate:
        """The measured value."""
        if not isinstance(quality, LogitQuality):
            return quality.cosine
        return quality.kl if self.measure == "kl" else quality.perplexity_ratio

    def holds(self, quality: Quality) -> bool:
        """Whether it is within the limit."""
        value = self.estimate(quality).value
        return value <= self.limit if self.of_logits else value >= self.limit

    def show(self, value: float) -> str:
        """A value for a message, as kl=0.01."""
        return f"{self.measure}={self._number(value)}"

    def show_estimate(self, estimate: Estimate) -> str:
        """A value and its interval, all rounded alike, so that the interval holds the value."""
        if estimate.low is None or estimate.high is None:
            return self.show(estimate.value)
        return f"{self.show(estimate.value)} ({self._number(estimate.low)} to {self._number(estimate.high)})"

    def _number(self, value: float) -> str:
        return f"{value:.3%}" if self.measure == "ppl" else f"{value:.{4 if self.of_logits else 6}g}"
