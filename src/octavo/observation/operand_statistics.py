"""Statistics of sampled rows of a tensor, in a form in which those of several samples and ranks can be combined.

The statistics of a tensor are a row of a table, float64: maxima, then sums (`FIELD`), and in a full sample a histogram
of exponents. Two rows are combined by the maximum of the maxima and the sum of the rest. `octavo.watching` computes
from them the numbers that people read.

A full sample has every field. Its moments are sums of powers in float64, where the fourth power of a gradient of 1e-30
is still a normal number. A brief one leaves out what the rules do not judge (x1, x3, rows, zero_rows, noise, the
exponents), and its sums are float32. The histogram counts the exponents of float32 as they are: it is shifted when the
amax of all samples is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from octavo.numerics.qtensor import Cast
from octavo.numerics.scaling import SMALLEST_SCALE

# amax: of the sampled rows; all_amax: of all rows, where the quantization found it
MAXIMA = ("amax", "all_amax", "scale", "minus_smallest_scale", "minus_gap", "recomputed")
SUMS = (
    *("elements", "rows", "zero_rows", "nonfinite", "nonzero", "x1", "x2", "x3", "x4"),  # x3: the sum of the cubes
    *("scales", "bad_scales", "saturated", "noise"),  # of its quantization; noise: the sum of squared errors
    *("codes", "lost"),  # bytes that are not zero, and those of them that are zero in h
)
FIELD = {name: i for i, name in enumerate((*MAXIMA, *SUMS))}
HEAD = len(FIELD)
EXPONENTS = 256  # biased exponents of float32: 0 is that of zero, and of numbers below 2^-126
WIDTH = HEAD + EXPONENTS
# A scale computed from the amax maps it onto the largest code, up to a rounding of float32: that is no saturation.
ROUNDING = 1 + 2.0**-20
_GOLDEN = (math.sqrt(5) - 1) / 2

Found = dict[str, Tensor]  # fields [n] of n tensors, or of all of them alike without dimensions


def clear(stats: Tensor) -> Tensor:
    """Make a table [n, HEAD or WIDTH] that of no sample, in place."""
    stats.zero_()
    stats[:, : len(MAXIMA)] = -torch.inf
    return stats


def combine_all(stats: Tensor) -> Tensor:
    """The statistics [n, fields] of [n, parts, fields]."""
    k = len(MAXIMA)
    return torch.cat([stats[:, :, :k].amax(1), stats[:, :, k:].sum(1)], 1)


def add_statistics(stats: Tensor, found: Tensor) -> None:
    """Add the table `found` [n, HEAD or WIDTH] to `stats` [n, WIDTH], in place."""
    mine = stats[:, : found.shape[1]]
    mine.copy_(combine_all(torch.stack([mine, found], 1)))


def table_of(found: Mapping[str, Tensor], n: int, device: torch.device) -> Tensor:
    """The fields that were found of n tensors as a table [n, HEAD]. A missing one is of no sample: of noise NaN."""
    missing = dict.fromkeys(MAXIMA, -math.inf) | dict.fromkeys(SUMS, 0.0) | {"noise": math.nan}
    columns = [found[name] if name in found else constant(value, device, n) for name, value in missing.items()]
    columns = [column if column.ndim else column.expand(n) for column in columns]
    return stack_double(columns).t()


def stack_double(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as float64 [n, ...]. Those of a dtype are cast at once, which makes it fast."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        of_dtype = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        found |= zip(of_dtype, torch.stack([tensors[i] for i in of_dtype]).double(), strict=True)
    return torch.stack([found[i] for i in range(len(tensors))])


@lru_cache(maxsize=256)
def sampled_rows(count: int, rows: int, device: torch.device) -> Tensor:
    """The indices of `rows` rows of `count`, int64: one out of each of `rows` equal parts, or all if there are fewer.
    The place within each part is that of the golden ratio's multiples. With a fixed stride every sampled token could
    have the same position in its sequence, such as the first, whose activations differ from all others."""
    rows = min(rows, count)
    ends = torch.arange(rows + 1, device=device) * count // rows
    place = (torch.arange(rows, dtype=torch.float64, device=device) * _GOLDEN).frac()
    return ends[:-1] + (place * ends.diff()).long()


@lru_cache(maxsize=1024)
def constant(value: float, device: torch.device, *shape: int) -> Tensor:
    """A number on the device, float64; float32 if it is not finite or 0, as maxima are."""
    dtype = torch.float64 if value and math.isfinite(value) else torch.float32
    return torch.full(shape, value, dtype=dtype, device=device)


@dataclass(frozen=True)
class Rows:
    """R sampled rows of each of n tensors, alike in shape and in cast: x [n, R, K], and what broadcasts against that.
    Where they are quantized, x is about numbers * scales, and the numbers are those of their bytes."""

    x: Tensor
    full: bool  # the sample
    cast: Cast | None = None
    numbers: Any = None  # None where the bytes are all there is of x: their errors are unknown
    scales: Any = None  # where errors are to be found
    shift: Tensor | None = None  # int32: the powers of two by which the shift for dw makes the numbers smaller
    scale: Any = None  # [n], the largest of all rows
    known: Tensor | None = None  # [n], of a scale that was known before, the amax that came
    smallest_amax: float | None = None  # of what is not zero in all rows; None where the scale gives the amax
    more: Mapping[str, Tensor] = field(default_factory=dict)  # other fields of the scales [n]

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of tensors that have the same `kind`."""
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name, value in vars(parts[0]).items()
            if isinstance(value, Tensor)
        }
        more = {name: torch.cat([part.more[name] for part in parts]) for name in parts[0].more}
        return replace(parts[0], **joined, more=more)

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the values."""
        shapes = [t.shape[1:] if isinstance(t, Tensor) else t for t in vars(self).values() if t is not self.more]
        return self.x.dtype, *shapes, *self.more

    def statistics(self) -> Tensor:
        """The table [n, WIDTH] of the finite elements in a full sample, [n, HEAD] in a brief one."""
        x = self.x.float()
        n, device, finite = len(x), x.device, x.nan_to_num(0, 0, 0)
        nonzero, largest = finite != 0, torch.linalg.vector_norm(finite, torch.inf, 2)  # of each row
        wide = (finite.double() if self.full else finite).flatten(1)
        square = wide * wide
        found: Found = {
            "x2": square.sum(1),
            "x4": (square * square).sum(1),
            "amax": largest.amax(1),
            "elements": constant(x[0].numel(), device, n),
            "nonfinite": _count(finite != x),
            "nonzero": _count(nonzero),
        }
        if self.full:
            found |= {"rows": constant(x.shape[1], device, n), "zero_rows": _count(largest == 0)}
            found |= {"x1": wide.sum(1), "x3": (square * wide).sum(1)}
        if self.cast is not None:
            found |= self._of_scales(self.cast) | self._errors(self.cast, finite, nonzero)
        if self.cast is not None and not self.more:  # of a scale that is NaN, one element at least is not finite
            found["nonfinite"] += self.scale.isnan()
        table = table_of(found, n, device)
        return torch.cat([table, histograms(finite.abs())], 1) if self.full else table

    def _of_scales(self, cast: Cast) -> Found:
        """The range of the scales, the amax of all rows where it is known, and the gap to a scale known before."""
        scale = self.scale.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        found = {"scale": scale, "scales": constant(1, scale.device, len(scale)), **self.more}
        if self.known is not None:
            return found | {"all_amax": self.known, "minus_gap": torch.log2(self.known / (scale * cast.fmt.max))}
        amax = scale * cast.fmt.max if self.smallest_amax is None else self.smallest_amax
        return found | {"all_amax": torch.where(scale > SMALLEST_SCALE, amax, 0)}

    def _errors(self, cast: Cast, finite: Tensor, nonzero: Tensor) -> Found:
        if self.numbers is None:
            return dict.fromkeys(("saturated", "codes"), constant(math.nan, finite.device, len(finite)))
        numbers = self.numbers
        codes = _count((numbers != 0) & nonzero)  # where a scale is NaN, the bytes of zeros are too
        found = {"codes": codes}
        if self.shift is not None:  # a tie rounds to zero
            least = torch.exp2(self.shift) * (cast.fmt.smallest_subnormal / 2)
            found["lost"] = codes - _count(numbers.abs() > least)
        if self.scales is not None:
            found["saturated"] = _count(finite.abs() > self.scales * (cast.fmt.max * ROUNDING))
        if self.full:
            error = (finite - numbers * self.scales).double().nan_to_num_(0, 0, 0).flatten(1)
            found["noise"] = torch.where(self.scale.isneginf(), torch.nan, (error * error).sum(1))  # no scale is known
        return found


def histograms(magnitude: Tensor) -> Tensor:
    """The number of elements of n tensors [n, ...], float32 and not negative, by exponent: [n, EXPONENTS]."""
    n = len(magnitude)
    exponents = (magnitude.view(torch.int32) >> 23).flatten(1)
    bins = (exponents + EXPONENTS * torch.arange(n, dtype=torch.int32, device=magnitude.device)[:, None]).flatten()
    if magnitude.is_cuda:  # bincount would wait for the device, and of floats this is not deterministic.
        return torch.histc(bins, n * EXPONENTS, 0, n * EXPONENTS).view(n, -1)
    return torch.bincount(bins, minlength=n * EXPONENTS).view(n, -1)


def _count(holds: Tensor) -> Tensor:
    return holds.flatten(1).sum(1, dtype=torch.float64)


# ---- The operands of a step.
#
# A GPU takes longer to launch an operation on some rows than to run it. So an operand only has its rows copied when it
# is observed. At the end of the step, operations on those of equal shape find the numbers of all of them.


# Elements that are computed with at once, in a full and in a brief sample: some 40 MB on the way. Four times as many
# wait for the end of the step.
_MOST = {True: 1 << 20, False: 1 << 21}


class Store:
    """The operands of a step that belong to the rows of some tables of statistics [n_i, WIDTH]."""

    _of_table: ClassVar[dict[int, "Store"]] = {}

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._first, self._rows = {}, 0
        for table in tables:
            self._first[table.data_ptr()] = self._rows
            self._of_table[table.data_ptr()] = self
            self._rows += len(table)
        self.clear()

    @classmethod
    def of(cls, table: Tensor) -> "Store | None":
        """The store of a table; None for a copy of one, which a compiler may pass in its place."""
        return cls._of_table.get(table.data_ptr())

    def clear(self) -> None:
        """Forget the step."""
        self._places: list[int] = []  # of what was found
        self._found: list[Tensor] = []
        self._waiting: dict[tuple[Any, ...], list[tuple[int, Rows]]] = {}
        self._elements = 0

    def close(self) -> None:
        """Forget the tables."""
        for address in self._first:
            self._of_table.pop(address, None)
        self.clear()

    def add(self, table: Tensor, slot: int, rows: Rows) -> None:
        self._waiting.setdefault(rows.kind, []).append((self._first[table.data_ptr()] + slot, rows))
        self._elements += rows.x.numel()
        if self._elements > 4 * _MOST[rows.full]:
            self._settle()

    def add_to(self, stats: Tensor) -> Tensor:
        """`stats` [rows of the tables, WIDTH or HEAD] with the numbers of the step added."""
        self._settle()
        if not self._found:
            return stats
        empty = clear(torch.empty_like(stats[:1]))  # those of a full sample are wider, which another watch may take
        found = torch.cat([each[:, : stats.shape[1]] for each in (*self._found, empty)])
        indices = _indices(tuple(self._places), self._rows, stats.device)
        return combine_all(torch.cat([stats.unsqueeze(1), found[indices]], 1))

    def _settle(self) -> None:
        for alike in self._waiting.values():
            first = alike[0][1]
            count = max(1, _MOST[first.full] // first.x.numel())
            for start in range(0, len(alike), count):
                places, rows = zip(*alike[start : start + count], strict=True)
                self._places += places
                self._found.append(Rows.cat(rows).statistics())
        self._waiting, self._elements = {}, 0


@lru_cache(maxsize=16)
def _indices(places: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """For each row the positions in `places` that name it, int64 [rows, most of a row]; filled up with their number."""
    found: list[list[int]] = [[] for _ in range(rows)]
    for i, place in enumerate(places):
        found[place].append(i)
    most = max(map(len, found))
    return torch.tensor([each + [len(places)] * (most - len(each)) for each in found], device=device)
