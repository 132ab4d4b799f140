"""Statistics of sampled rows of a tensor, in a form in which those of several samples and ranks can be combined.

The statistics of a tensor are a row of a table, float64: maxima, then sums (`FIELD`), and in a full sample a histogram
of exponents. Two rows are combined by the maximum of the maxima and the sum of the rest. `octavo.watching` computes
from them the numbers that people read.

A full sample has every field. Its moments are sums of powers in float64, where the fourth power of a gradient of 1e-30
is still a normal number. A brief one leaves out what the rules do not judge (x1, x3, rows, zero_rows, noise, the
exponents), and its sums are float32. The histogram counts the exponents of float32 as they are: it is shifted when the
amax of all samples is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.numerics.formats import widen
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
    return torch.stack(by_dtype(lambda some: torch.stack(some).double().unbind(), columns), 1)


def by_dtype(function: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The result of an operation on lists for each tensor. It is called once for each dtype, which makes it fast."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        of_dtype = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        found |= zip(of_dtype, function([tensors[i] for i in of_dtype]), strict=True)
    return [found[i] for i in range(len(tensors))]


@lru_cache(maxsize=256)
def sampled_rows(count: int, rows: int, device: torch.device) -> Tensor:
    """The indices of `rows` rows of `count`, int64: one out of each of `rows` equal parts, or all if there are fewer.

    The place within each part is that of the golden ratio's multiples. With a fixed stride every sampled token could
    have the same position in its sequence, such as the first, whose activations differ from all others.
    """
    rows = min(rows, count)
    ends = torch.arange(rows + 1, device=device) * count // rows
    place = (torch.arange(rows, dtype=torch.float64, device=device) * _GOLDEN).frac()
    return ends[:-1] + (place * ends.diff()).long()


def numbers_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of an eight-bit format as float32 or bfloat16, both exact. A GPU converts them in one operation."""
    return (codes if codes.is_cuda else widen(codes)).to(dtype)


@lru_cache(maxsize=1024)
def constant(value: float, device: torch.device, *shape: int) -> Tensor:
    """A number on the device, float64; float32 if it is not finite or 0, as maxima are."""
    dtype = torch.float64 if value and math.isfinite(value) else torch.float32
    return torch.full(shape, value, dtype=dtype, device=device)


# ---- The statistics of one operand, or of each expert's part of it, now.


@dataclass(frozen=True)
class Rows:
    """n blocks of R sampled rows; [n, R, K] in float32, and what broadcasts against that.

    Where the operand is quantized, x is about numbers * scales, and the numbers are those of its bytes. Numbers up to
    `least` become zero where the bytes are shifted for dw; None without a shift.
    """

    x: Tensor | None  # None where only bytes exist: their errors are unknown
    numbers: Any = None
    scales: Any = None
    least: Tensor | None = None
    largest: float = 0.0  # number of the format


def rows_statistics(rows: Rows, of_scales: Found, *, full: bool) -> tuple[Tensor, Tensor]:
    """The table [n, HEAD] of the finite elements, and the magnitudes [n, R, K], zero in place of inf and NaN."""
    x = rows.x
    if x is None:
        x = rows.numbers * rows.scales
    n, device, finite = len(x), x.device, x.nan_to_num(0, 0, 0)
    magnitude = finite.abs()
    largest = magnitude.amax(2)  # of each row
    wide = (finite.double() if full else finite).flatten(1)
    square = wide * wide
    found = of_scales | {
        "amax": largest.amax(1),
        "elements": constant(x[0].numel(), device, n),
        "nonfinite": _count(finite != x),
        "nonzero": _count(finite != 0),
        "x2": square.sum(1),
        "x4": (square * square).sum(1),
    }
    if full:
        count = constant(x.shape[1], device, n)
        found |= {"x1": wide.sum(1), "x3": (square * wide).sum(1), "rows": count, "zero_rows": _count(largest == 0)}
    if rows.numbers is not None and rows.x is None:
        found |= dict.fromkeys(("saturated", "codes"), constant(math.nan, device, n))
    elif rows.numbers is not None:
        codes = found["codes"] = _count(rows.numbers != 0)
        if rows.least is not None:
            found["lost"] = codes - _count(rows.numbers.abs() > rows.least)
        if full:
            error = (finite - rows.numbers * rows.scales).double().nan_to_num_(0, 0, 0).flatten(1)
            found["saturated"] = _count(magnitude > rows.scales * (rows.largest * ROUNDING))
            found["noise"] = (error * error).sum(1)
    return table_of(found, n, device), magnitude


def histogram(magnitude: Tensor) -> Tensor:
    """The number of elements, float32 and not negative, by exponent: [EXPONENTS]."""
    exponents = magnitude.view(torch.int32) >> 23
    if not exponents.is_cuda:
        return torch.bincount(exponents.flatten(), minlength=EXPONENTS)
    # bincount would wait for the device, and of floats this is not deterministic.
    return torch.histc(exponents, EXPONENTS, 0, EXPONENTS)


def _count(holds: Tensor) -> Tensor:
    return holds.flatten(1).sum(1, dtype=torch.float64)


# ---- The statistics of all operands of a step at once, in a brief sample.
#
# A GPU takes longer to launch an operation on some rows than to run it. So an operand only has its rows copied when it
# is observed. At the end of the step, operations on lists of tensors find the numbers of all of them.


_MOST_BYTES = 1 << 25  # of rows that wait for the end of the step


@dataclass(frozen=True)
class Operand:
    """The sampled rows of an operand, copied. All but x is left out where it is not quantized."""

    x: Tensor  # [R, K]
    numbers: Tensor | None = None  # [R, K], of its bytes; None where only bytes are known
    scale: Tensor | None = None  # the largest, 0-dim float32
    largest: float = 0.0  # number of the format
    scaled_by_amax: bool = False  # the scale, all rows included, gives the amax
    known: Tensor | None = None  # of a scale that was known before, the amax that came, 0-dim
    shifted: Tensor | None = None  # numbers / the largest that the shift for dw makes zero


class BriefStore:
    """The operands of a step that belong to the rows of some tables of statistics [n_i, WIDTH]."""

    _of_table: ClassVar[dict[int, BriefStore]] = {}

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._first, self._rows = {}, 0
        for table in tables:
            self._first[table.data_ptr()] = self._rows
            self._of_table[table.data_ptr()] = self
            self._rows += len(table)
        self.clear()

    @classmethod
    def of(cls, table: Tensor) -> BriefStore | None:
        """The store of a table; None for a copy of one, which a compiler may pass in its place."""
        return cls._of_table.get(table.data_ptr())

    def clear(self) -> None:
        """Forget the step."""
        self._places: list[int] = []
        self._waiting: list[Operand] = []
        self._found: list[Tensor] = []
        self._bytes = 0

    def close(self) -> None:
        """Forget the tables."""
        for address in self._first:
            self._of_table.pop(address, None)
        self.clear()

    def add(self, table: Tensor, slot: int, operand: Operand) -> None:
        self._places.append(self._first[table.data_ptr()] + slot)
        self._waiting.append(operand)
        self._bytes += sum(t.nbytes for t in (operand.x, operand.numbers, operand.shifted) if t is not None)
        if self._bytes > _MOST_BYTES:
            self._settle()

    def add_to(self, stats: Tensor) -> Tensor:
        """`stats` [rows of the tables, HEAD] with the numbers of the step added."""
        self._settle()
        if not self._found:
            return stats
        found = torch.cat([*self._found, clear(torch.empty_like(stats[:1]))])
        return combine_all(torch.cat([stats.unsqueeze(1), found[self._indices(stats.device)]], 1))

    def _settle(self) -> None:
        if self._waiting:
            self._found.append(statistics(self._waiting))
        self._waiting, self._bytes = [], 0

    def _indices(self, device: torch.device) -> Tensor:
        return _indices(tuple(self._places), self._rows, device)


@lru_cache(maxsize=16)
def _indices(places: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """For each row the positions in `places` that name it, int64 [rows, most of a row]; filled up with their number."""
    found: list[list[int]] = [[] for _ in range(rows)]
    for i, place in enumerate(places):
        found[place].append(i)
    most = max(map(len, found))
    return torch.tensor([each + [len(places)] * (most - len(each)) for each in found], device=device)


def statistics(operands: Sequence[Operand]) -> Tensor:
    """The table [n, HEAD] of a brief sample of n operands."""
    device = operands[0].x.device
    nan, zero, low = (constant(value, device) for value in (math.nan, 0.0, -math.inf))
    xs = [each.x for each in operands]
    scale = torch.stack([low if each.scale is None else each.scale for each in operands])
    known = torch.stack([low if each.known is None else each.known for each in operands])
    expected = scale * _numbers(tuple(each.largest for each in operands), device)
    is_amax = _numbers(tuple(float(each.scaled_by_amax) for each in operands), device) > 0
    is_shifted = _numbers(tuple(float(each.shifted is not None) for each in operands), device) > 0
    over = [
        None if each.known is None else each.x.float() / (limit * ROUNDING)
        for each, limit in zip(operands, expected, strict=True)
    ]
    norm, codes = _norms(xs, 2), _of_some(_counts, [each.numbers for each in operands], nan)
    left = _of_some(_counts_above_one, [each.shifted for each in operands], zero)
    found = {
        "amax": _norms(xs, math.inf),
        "all_amax": torch.where(is_amax, torch.where(scale > SMALLEST_SCALE, expected, zero), known),
        "scale": scale,
        "minus_gap": torch.where(known == low, low, torch.log2(known / expected)),
        "elements": _numbers(tuple(float(x.numel()) for x in xs), device),
        # One element at least, where any is inf or NaN.
        "nonfinite": (norm - norm + torch.where(scale == low, zero, scale - scale)).isnan(),
        "x2": norm.double().square(),
        "x4": _norms(by_dtype(lambda some: torch._foreach_mul(some, some), xs), 2).double().square(),
        "nonzero": _counts(xs),
        "codes": codes,
        "lost": torch.where(is_shifted, codes - left, zero),
        "saturated": _of_some(_counts_above_one, over, zero),
        "scales": torch.where(scale == low, zero, zero + 1),
    }
    return table_of(found, len(operands), device)


def _norms(tensors: Sequence[Tensor], order: float) -> Tensor:
    return torch.stack(by_dtype(lambda some: torch._foreach_norm(some, order, dtype=torch.float32), tensors))


def _counts(tensors: Sequence[Tensor]) -> Tensor:
    """The number of elements of each tensor that are not zero."""
    return _norms(by_dtype(torch._foreach_sign, tensors), 1)


def _counts_above_one(tensors: Sequence[Tensor]) -> Tensor:
    """The number of elements of each tensor whose magnitude is above one."""
    above = by_dtype(lambda some: torch._foreach_clamp_min(torch._foreach_sub(torch._foreach_abs(some), 1), 0), tensors)
    return _counts(above)


def _of_some(
    function: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor | None], default: Tensor
) -> Tensor:
    """`function` of the tensors that there are, and `default` in the other places."""
    given = [t for t in tensors if t is not None]
    values = iter(function(given)) if given else iter(())
    return torch.stack([default if t is None else next(values) for t in tensors])


@lru_cache(maxsize=256)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Float32 [n]. Equal ones are copied to the device once."""
    return torch.tensor(values, device=device)
