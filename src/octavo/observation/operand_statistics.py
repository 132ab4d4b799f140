"""Statistics of sampled rows of a tensor, in a form in which those of several samples and ranks can be combined.

Statistics are float64 [WIDTH]: maxima, then sums, then a histogram of exponents. Those of two samples are combined by
the maximum of the maxima and the sum of the rest. `octavo.watching` computes from them the numbers that people read.

The moments are sums of powers. In float64 the fourth power of a gradient of 1e-30 is still a normal number. The
histogram counts the exponents of float32 as they are: it is shifted when the amax of all samples is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from octavo.numerics.formats import Format, widen
from octavo.numerics.scaling import SMALLEST_SCALE

# amax: of the sampled rows; all_amax: of all rows, where the quantization found it
MAXIMA = ("amax", "all_amax", "scale", "minus_smallest_scale", "minus_gap", "recomputed")
SUMS = (
    *("elements", "x1", "x2", "x3", "x4", "nonfinite", "rows", "zero_rows"),  # of the tensor; x3: the sum of its cubes
    *("scales", "nan_scales", "saturated", "flushed", "noise"),  # of its quantization; noise: the sum of squared errors
    *("codes", "lost"),  # bytes of g that are not zero, and those of them that are zero in h
)
_GOLDEN = (math.sqrt(5) - 1) / 2
EXPONENTS = 256  # biased exponents of float32: 0 is that of zero, and of numbers below 2^-126
FIELD = {name: i for i, name in enumerate((*MAXIMA, *SUMS, "exponents"))}
WIDTH = FIELD["exponents"] + EXPONENTS

# The fields of a brief sample, which buffers hold after the WIDTH others.
BRIEF_MAXIMA = ("amax", "all_amax", "scale", "minus_gap")
# nonfinite: 0, or NaN where an element or a scale is not finite; scales: the number of operands that are quantized
BRIEF_SUMS = ("elements", "nonfinite", "x2", "x4", "nonzero", "codes", "lost", "saturated", "scales")
BRIEF_FIELD = {name: i for i, name in enumerate((*BRIEF_MAXIMA, *BRIEF_SUMS))}
BRIEF_WIDTH = len(BRIEF_FIELD)
# A scale computed from the amax maps it onto the largest code, up to a rounding of float32: that is no saturation.
ROUNDING = 1 + 2.0**-20

Found = dict[str, Tensor]  # maxima float32 and sums float64, without dimensions; exponents [EXPONENTS]


def clear_statistics(stats: Tensor) -> Tensor:
    """Make `stats` [n, WIDTH + BRIEF_WIDTH] those of no sample, in place."""
    stats.zero_()
    stats[:, : len(MAXIMA)] = -torch.inf
    stats[:, WIDTH : WIDTH + len(BRIEF_MAXIMA)] = -torch.inf
    return stats


class Rows(NamedTuple):
    """R sampled rows of a quantized operand [M, K].

    x [R, K] in high precision, None where only bytes exist; numbers [R, K], float32, are those of the bytes: x is about
    numbers * scales. Numbers up to least [R, 1] become zero where the bytes are shifted for dw; None without a shift.
    """

    x: Tensor | None
    numbers: Tensor
    scales: Tensor
    least: Tensor | None = None


def add_statistics(stats: Tensor, found: Found) -> None:
    """Add what the functions below found to `stats` [WIDTH + BRIEF_WIDTH], in place."""
    n, lowest, zero = len(MAXIMA), _constant(-torch.inf, stats.device), _constant(0, stats.device)
    maxima = torch.stack([found.get(name, lowest) for name in MAXIMA])
    sums = torch.stack([found.get(name, zero) for name in SUMS])
    torch.maximum(stats[:n], maxima, out=stats[:n])
    stats[n : WIDTH - EXPONENTS] += sums
    stats[WIDTH - EXPONENTS : WIDTH] += found["exponents"]


def tensor_statistics(x: Tensor) -> tuple[Tensor, Found]:
    """Sampled rows [R, K], float32, with zeros in place of inf and NaN; and the statistics of the finite elements."""
    finite = x.nan_to_num(0, 0, 0)
    magnitude = finite.abs()
    largest = magnitude.amax(1)  # of each row
    wide = finite.double().flatten()
    square = wide * wide
    return finite, {
        "amax": largest.amax(),
        "elements": _constant(x.numel(), x.device),
        "x1": wide.sum(),
        "x2": square.sum(),
        "x3": square.dot(wide),
        "x4": square.dot(square),
        "nonfinite": _count(finite != x),
        "rows": _constant(x.shape[0], x.device),
        "zero_rows": _count(largest == 0),
        "exponents": _histogram(magnitude.view(torch.int32) >> 23),
    }


def row_statistics(rows: Rows, of_scales: Found, fmt: Format) -> tuple[Tensor, Found]:
    """The rows [R, K], finite, and all their statistics; the errors of bytes alone are unknown."""
    x, found = tensor_statistics(rows.numbers * rows.scales if rows.x is None else rows.x.float())
    found |= of_scales
    if rows.x is None:
        found |= dict.fromkeys(("saturated", "flushed", "noise"), _constant(math.nan, x.device))
    else:
        error = (x - rows.numbers * rows.scales).double().flatten().nan_to_num_(0, 0, 0)
        found["saturated"] = _count(x.abs() > rows.scales * (fmt.max * ROUNDING))
        found["flushed"] = _count((rows.numbers == 0) & (x != 0))
        found["noise"] = error.dot(error)
    if rows.least is not None:
        codes = torch.linalg.vector_norm(rows.numbers, 0).double()  # that are not zero
        found |= {"codes": codes, "lost": codes - _count(rows.numbers.abs() > rows.least)}
    return x, found


def histogram_statistics(x: Tensor) -> Found:
    """Count, histogram and non-finite count of rows [R, K], float32."""
    finite = x.nan_to_num(0, 0, 0)
    return {
        "elements": _constant(x.numel(), x.device),
        "nonfinite": _count(finite != x),
        "exponents": _histogram(finite.abs().view(torch.int32) >> 23),
    }


def scale_statistics(scale: Tensor) -> Found:
    """The range of all scales of a tensor; the smallest is that of the blocks that are not all zero."""
    scale = scale.float()
    return {
        "scale": scale.nan_to_num(-torch.inf).amax(),
        "minus_smallest_scale": torch.where(scale > SMALLEST_SCALE, -scale, -torch.inf).amax(),  # NaN compares as false
        "scales": _constant(scale.numel(), scale.device),
        "nan_scales": _count(scale.isnan()),
    }


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


def _count(holds: Tensor) -> Tensor:
    return holds.sum(dtype=torch.float64)


def _histogram(exponents: Tensor) -> Tensor:
    if not exponents.is_cuda:
        return torch.bincount(exponents.flatten(), minlength=EXPONENTS)
    # bincount would wait for the device, and of floats this is not deterministic.
    return torch.histc(exponents, EXPONENTS, 0, EXPONENTS)


@lru_cache(maxsize=1024)
def _constant(value: float, device: torch.device) -> Tensor:
    """A number on the device, float64; float32 if it is infinite, as maxima are."""
    dtype = torch.float32 if math.isinf(value) else torch.float64
    return torch.full((), value, dtype=dtype, device=device)


# ---- Brief samples: the numbers that rules judge, for all operands of a step at once.
#
# A GPU takes longer to launch an operation on some rows than to run it. So an operand only has its rows copied when it
# is observed. At the end of the step, operations on lists of tensors find the numbers of all of them.
#
# The moments are those about zero.


ROWS = 16
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
    """The operands of a step that belong to the rows of some buffers of statistics, float64 [n_i, fields]."""

    _of_buffer: ClassVar[dict[int, BriefStore]] = {}

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._first, self._rows = {}, 0
        for buffer in buffers:
            self._first[buffer.data_ptr()] = self._rows
            self._of_buffer[buffer.data_ptr()] = self
            self._rows += len(buffer)
        self.clear()

    @classmethod
    def of(cls, buffer: Tensor) -> BriefStore | None:
        """The store of a buffer; None for a copy of one, which a compiler may pass in its place."""
        return cls._of_buffer.get(buffer.data_ptr())

    def clear(self) -> None:
        """Forget the step."""
        self._places: list[int] = []
        self._waiting: list[Operand] = []
        self._tables: list[Tensor] = []
        self._bytes = 0

    def close(self) -> None:
        """Forget the buffers."""
        for address in self._first:
            self._of_buffer.pop(address, None)
        self.clear()

    def add(self, buffer: Tensor, slot: int, operand: Operand) -> None:
        self._places.append(self._first[buffer.data_ptr()] + slot)
        self._waiting.append(operand)
        self._bytes += sum(t.nbytes for t in (operand.x, operand.numbers, operand.shifted) if t is not None)
        if self._bytes > _MOST_BYTES:
            self._settle()

    def add_to(self, table: Tensor) -> Tensor:
        """`table` [rows of the buffers, fields] with the numbers of the step added."""
        self._settle()
        if not self._tables:
            return table
        nothing = clear(torch.empty_like(table[:1]))
        found = torch.cat([*self._tables, nothing])[_indices(tuple(self._places), self._rows, table.device)]
        return combine(table, combine_all(found))

    def _settle(self) -> None:
        if self._waiting:
            self._tables.append(statistics(self._waiting))
        self._waiting, self._bytes = [], 0


def combine_all(found: Tensor) -> Tensor:
    """The statistics [n, fields] of [n, parts, fields]."""
    k = len(BRIEF_MAXIMA)
    return torch.cat([found[:, :, :k].amax(1), found[:, :, k:].sum(1)], 1)


def combine(a: Tensor, b: Tensor) -> Tensor:
    """The statistics of both, [n, fields]."""
    return combine_all(torch.stack([a, b], 1))


def clear(table: Tensor) -> Tensor:
    """Make `table` [n, fields] that of no sample, in place."""
    table.zero_()
    table[:, : len(BRIEF_MAXIMA)] = -torch.inf
    return table


def statistics(operands: Sequence[Operand]) -> Tensor:
    """The `BRIEF_MAXIMA` and `BRIEF_SUMS` of operands, float64 [n, fields]."""
    device = operands[0].x.device
    nan, zero, low = _numbers((math.nan, 0.0, -math.inf), device)
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
    columns = {
        "amax": _norms(xs, math.inf),
        "all_amax": torch.where(is_amax, torch.where(scale > SMALLEST_SCALE, expected, zero), known),
        "scale": scale,
        "minus_gap": torch.where(known == low, low, torch.log2(known / expected)),
        "elements": _numbers(tuple(float(x.numel()) for x in xs), device),
        "nonfinite": norm - norm + torch.where(scale == low, zero, scale - scale),
        "x2": norm.double().square(),
        "x4": _norms(by_dtype(lambda some: torch._foreach_mul(some, some), xs), 2).double().square(),
        "nonzero": _counts(xs),
        "codes": codes,
        "lost": torch.where(is_shifted, codes - left, zero),
        "saturated": _of_some(_counts_above_one, over, zero),
        "scales": torch.where(scale == low, zero, zero + 1),
    }
    return torch.stack([columns[name].double() for name in BRIEF_FIELD], 1)


def _norms(tensors: Sequence[Tensor], order: float) -> Tensor:
    return torch.stack(by_dtype(lambda some: torch._foreach_norm(some, order, dtype=torch.float32), tensors))


def _counts(tensors: Sequence[Tensor]) -> Tensor:
    """The number of elements of each tensor that are not zero."""
    return _norms(by_dtype(torch._foreach_sign, tensors), 1)


def _counts_above_one(tensors: Sequence[Tensor]) -> Tensor:
    """The number of elements of each tensor whose magnitude is above one."""
    above = by_dtype(lambda some: torch._foreach_clamp_min(torch._foreach_sub(torch._foreach_abs(some), 1), 0), tensors)
    return _counts(above)


def by_dtype(function: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The result of an operation on lists for each tensor. It is called once for each dtype, which makes it fast."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        of_dtype = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        found |= zip(of_dtype, function([tensors[i] for i in of_dtype]), strict=True)
    return [found[i] for i in range(len(tensors))]


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


@lru_cache(maxsize=16)
def _indices(places: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """For each row the positions in `places` that name it, int64 [rows, most of a row]; filled up with their number."""
    found: list[list[int]] = [[] for _ in range(rows)]
    for i, place in enumerate(places):
        found[place].append(i)
    most = max(map(len, found))
    return torch.tensor([each + [len(places)] * (most - len(each)) for each in found], device=device)
