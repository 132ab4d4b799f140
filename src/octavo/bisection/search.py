"""The search for the parts of a model that cause a gap: first among y, dx and dw, then among the layers.

A trial runs some GEMMs of some layers in FP8, and all else in BF16.

    GEMMs    each of y, dx and dw alone, in all layers. If none of them causes the gap, each pair.
    layers   with these GEMMs: one half of the layers, then the other, and so on into each half that causes the gap. If
             neither does, the layers are halved by kind (all q_proj, all down_proj, ...) instead of by depth.

A part *causes* the gap if its own gap is resolved and at least a fourth of the whole. So a cause in a few layers is
followed to each of them, and a cause that is spread evenly ends in groups of layers, with their shares. The second half
is not tried yet if the first has three fourths of what both have. In the end the layers that were not found run in FP8,
and the search goes on among them if they cause a gap. Source of the search: group testing by halves, as in delta
debugging (Zeller and Hildebrandt, 2002), with a measured share in place of pass and fail.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from octavo.evaluation.metrics import student_quantile

# ---- The gap of the loss between a run with parts in FP8 and the run in BF16, over several seeds.
#
#   gap(seed) = loss(seed) / loss of BF16(seed) - 1        the same seed: the same initial weights and the same batches
#
# Two runs of one seed see the same batches, so the luck of the data cancels. The noise of rounding, which sends the two
# runs different ways, remains. The mean over seeds has the interval of Student's t. A gap is *resolved* if that
# interval of 95 % does not contain 0.


def half_width(gaps: Iterable[Sequence[float]]) -> float:
    """Half of the interval around the mean of one gap, from the spread that all `gaps` share; 0 if none is finite.

    Each gap has the noise of the same few seeds. So the variance is the mean of all variances, with the sum of their
    degrees of freedom. A large gap spreads more than a small one, which makes the interval of the small one wider.
    """
    finite = [gap for gap in gaps if math.inf not in gap]
    if not finite:
        return 0.0
    seeds = len(finite[0])
    variance = statistics.fmean(statistics.variance(gap) for gap in finite)
    return student_quantile(min(len(finite) * (seeds - 1), 200)) * math.sqrt(variance / seeds)


CAUSES = 0.25  # the share of the whole gap from which a part is a cause
ENOUGH = 0.75  # the share of its group from which one half explains the group


@dataclass(frozen=True)
class Part:
    """The GEMMs `gemms` of the layers `layers`; None stands for all layers that the recipe converts."""

    gemms: tuple[str, ...]
    layers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Trial:
    """The gap of the runs in which only `part` is in FP8, of two or more seeds; inf where a run diverged."""

    part: Part
    gap: tuple[float, ...]
    half_width: float  # of its own interval, or of that with all trials until then: the narrower one

    @property
    def mean(self) -> float:
        return math.inf if math.inf in self.gap else statistics.fmean(self.gap)

    @property
    def resolved(self) -> bool:
        return abs(self.mean) > self.half_width

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds that would resolve a gap of this size and spread; None if the gap is exactly 0."""
        if self.mean == 0:
            return None
        if self.resolved:
            return len(self.gap)
        spread = statistics.stdev(self.gap) / abs(self.mean)
        for count in range(len(self.gap), 100):
            if student_quantile(count - 1) * spread < math.sqrt(count):
                return count
        return math.ceil((student_quantile(100) * spread) ** 2)

    def share_of(self, whole: "Trial") -> float:
        """This gap as a part of that of `whole`: 1 if both runs diverged."""
        if math.isinf(whole.mean):
            return 1.0 if math.isinf(self.mean) else 0.0
        return self.mean / whole.mean

    def to_dict(self) -> dict[str, Any]:
        """The gap as JSON values: null for inf."""
        mean, *by_seed = (gap if math.isfinite(gap) else None for gap in (self.mean, *self.gap))
        return {"mean": mean, "half_width": self.half_width, "resolved": self.resolved, "by_seed": by_seed}


# ---- The search for the parts of a model that cause a gap: first among y, dx and dw, then among the layers.


@dataclass(frozen=True)
class Finding:
    """The result of the search."""

    whole: Trial  # the run with every part in FP8
    gemms: tuple[str, ...]  # that cause the gap; all of the recipe if no smaller set does, and none without a gap
    layers: tuple[Trial, ...]  # the groups that cause it, a group of one where the search went down to a layer
    trials: tuple[Trial, ...]  # in the order of the search

    @property
    def verdict(self) -> str:
        """Either unresolved (the gap is within the noise), lower (FP8 has the lower loss), small or found."""
        if not self.whole.resolved:
            return "unresolved"
        if self.whole.mean < 0:
            return "lower"
        return "found" if self.layers else "small"


class Search:
    """Runs the search. `measure` gives the gap of a part in FP8; a gap below `least` is not searched."""

    def __init__(
        self, measure: Callable[[Part], tuple[float, ...]], gemms: Sequence[str], layers: Sequence[str], least: float
    ) -> None:
        self._measure, self._gemms, self._layers, self._least = measure, tuple(gemms), tuple(layers), least
        self._trials: dict[Part, Trial] = {}

    def run(self) -> Finding:
        whole = self._try(Part(self._gemms))
        if not whole.resolved or whole.mean < self._least:
            return Finding(whole, (), (), tuple(self._trials.values()))
        gemms = self._find_gemms(whole)
        found = tuple(self._find_all_layers(gemms))
        self._try_remedies(gemms, {name for trial in found for name in trial.part.layers or ()})
        return Finding(whole, gemms, found, tuple(self._trials.values()))

    def _find_gemms(self, whole: Trial) -> tuple[str, ...]:
        for count in range(1, len(self._gemms)):
            sets = list(combinations(self._gemms, count))
            causes = [gemms for gemms in sets if self._causes(self._try(Part(gemms)), whole)]
            if causes and count == 1:
                return tuple(gemm for (gemm,) in causes)
            if causes:
                return max(causes, key=lambda gemms: self._try(Part(gemms)).share_of(whole))
        return self._gemms

    def _find_all_layers(self, gemms: tuple[str, ...]) -> Iterator[Trial]:
        """The groups of layers that cause the gap, until the layers that are left cause none."""
        whole = self._try(Part(gemms))
        group, left = replace(whole, part=Part(gemms, self._layers)), self._layers
        while True:
            found = list(self._find_layers(group, whole))
            yield from found
            named = {name for trial in found for name in trial.part.layers or ()}
            left = tuple(name for name in left if name not in named)
            if not left:
                return
            group = self._try(Part(gemms, left))
            if not self._causes(group, whole):
                return

    def _find_layers(self, group: Trial, whole: Trial) -> Iterator[Trial]:
        """The smallest groups within `group` that cause the gap."""
        layers = group.part.layers or ()
        for halves in _halves(layers):
            causes = []
            for half in halves:
                trial = self._try(Part(group.part.gemms, half))
                if self._causes(trial, whole):
                    causes.append(trial)
                    if trial.share_of(group) >= ENOUGH:
                        break
            if causes:
                for trial in causes:
                    yield from self._find_layers(trial, whole)
                return
        yield group

    def _try_remedies(self, gemms: tuple[str, ...], layers: set[str]) -> None:
        """The whole without the GEMMs that cause the gap, and the whole without the layers."""
        if others := tuple(gemm for gemm in self._gemms if gemm not in gemms):
            self._try(Part(others))
        if rest := tuple(name for name in self._layers if name not in layers):
            self._try(Part(self._gemms, rest))

    def _causes(self, trial: Trial, whole: Trial) -> bool:
        return trial.resolved and trial.share_of(whole) >= CAUSES

    def _try(self, part: Part) -> Trial:
        if part not in self._trials:
            gap = self._measure(part)
            every = [*(trial.gap for trial in self._trials.values()), gap]
            self._trials[part] = Trial(part, gap, min(half_width([gap]), half_width(every)))
        return self._trials[part]


def _halves(layers: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Ways to halve the layers: by depth, and by kind, the last word of the name, if there are several kinds."""
    if len(layers) < 2:
        return
    middle = len(layers) // 2
    by_depth = layers[:middle], layers[middle:]
    yield by_depth
    kinds = list(dict.fromkeys(_kind(name) for name in layers))
    if len(kinds) > 1:
        first = kinds[: len(kinds) // 2]
        by_kind = (
            tuple(name for name in layers if _kind(name) in first),
            tuple(name for name in layers if _kind(name) not in first),
        )
        if by_kind != by_depth:
            yield by_kind


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
