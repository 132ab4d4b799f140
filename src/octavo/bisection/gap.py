"""The gap of the loss between a run with parts in FP8 and the run in BF16, over several seeds.

    gap(seed) = loss(seed) / loss of BF16(seed) - 1        the same seed: the same initial weights and the same batches

Two runs of one seed see the same batches, so the luck of the data cancels. The noise of rounding, which sends the two
runs different ways, remains. The mean over seeds has the interval of Student's t. A gap is *resolved* if that interval
of 95 % does not contain 0.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.evaluation.metrics import student_quantile


@dataclass(frozen=True)
class Gap:
    """The gaps of two or more seeds. A run that diverged has the gap inf."""

    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.inf if math.inf in self.by_seed else statistics.fmean(self.by_seed)

    @property
    def half_width(self) -> float:
        """Half of the interval around the mean; 0 if a run diverged."""
        if math.isinf(self.mean):
            return 0.0
        count = len(self.by_seed)
        return student_quantile(count - 1) * statistics.stdev(self.by_seed) / math.sqrt(count)

    @property
    def resolved(self) -> bool:
        return abs(self.mean) > self.half_width

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds that would resolve a gap of this size and spread; None if the gap is exactly 0."""
        if self.mean == 0:
            return None
        if self.resolved:
            return len(self.by_seed)
        spread = statistics.stdev(self.by_seed) / abs(self.mean)
        for count in range(len(self.by_seed), 100):
            if student_quantile(count - 1) * spread < math.sqrt(count):
                return count
        return math.ceil((student_quantile(100) * spread) ** 2)

    def share_of(self, whole: "Gap") -> float:
        """This gap as a part of the gap `whole`: 1 if both runs diverged."""
        if math.isinf(whole.mean):
            return 1.0 if math.isinf(self.mean) else 0.0
        return self.mean / whole.mean

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: null for inf."""
        finite = [gap if math.isfinite(gap) else None for gap in self.by_seed]
        mean = self.mean if math.isfinite(self.mean) else None
        return {"mean": mean, "half_width": self.half_width, "resolved": self.resolved, "by_seed": finite}


def pooled_half_width(gaps: Iterable[Gap]) -> float:
    """Half of the interval around the mean of one gap, from the spread that all `gaps` share.

    Each gap has the noise of the same few seeds. Several gaps together tell more about it: the variance is the mean of
    theirs, with the sum of their degrees of freedom. A large gap spreads more than a small one, which makes the
    interval of the small one too wide and not too narrow.
    """
    finite = [gap.by_seed for gap in gaps if not math.isinf(gap.mean)]
    if not finite:
        return 0.0
    seeds = len(finite[0])
    variance = statistics.fmean(statistics.variance(gap) for gap in finite)
    return student_quantile(min(len(finite) * (seeds - 1), 200)) * math.sqrt(variance / seeds)
