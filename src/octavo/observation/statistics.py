"""Statistics of sampled rows of a tensor, in a form in which those of several samples and ranks can be combined.

Statistics are float64 [WIDTH]: maxima, then sums, then a histogram of exponents. Those of two samples are combined by
the maximum of the maxima and the sum of the rest. `octavo.telemetry` computes from them the numbers that people read.

The moments are sums of powers. In float64 the fourth power of a gradient of 1e-30 is still a normal number. The
histogram counts the exponents of float32 as they are: it is shifted when the amax of all samples is known.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from octavo.numerics.codec import widen
from octavo.numerics.formats import Format
from octavo.numerics.granularity import Granularity
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

# The fields of a brief sample (`octavo.observation.brief_samples`), which buffers hold after the WIDTH others.
BRIEF_MAXIMA = ("amax", "all_amax", "scale", "minus_gap")
# bad: 0, or NaN where an element or a scale is not finite; quantized: the number of operands that are
BRIEF_SUMS = ("elements", "bad", "x2", "x4", "nonzero", "codes", "lost", "saturated", "quantized")
BRIEF_WIDTH = len(BRIEF_MAXIMA) + len(BRIEF_SUMS)
# A scale computed from the amax maps it onto the largest code, up to a rounding of float32: that is no saturation.
ROUNDING = 1 + 2.0**-20

Found = dict[str, Tensor]  # maxima float32 and sums float64, without dimensions; exponents [EXPONENTS]


def clear_statistics(stats: Tensor) -> Tensor:
    """Make `stats` [n, WIDTH + BRIEF_WIDTH] those of no sample, in place."""
    stats.zero_()
    stats[:, : len(MAXIMA)] = -torch.inf
    stats[:, WIDTH : WIDTH + len(BRIEF_MAXIMA)] = -torch.inf
    return stats


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


def histogram_statistics(x: Tensor) -> Found:
    """Of the statistics of rows [R, K], float32, the number of elements, the histogram, and the elements not finite."""
    finite = x.nan_to_num(0, 0, 0)
    return {
        "elements": _constant(x.numel(), x.device),
        "nonfinite": _count(finite != x),
        "exponents": _histogram(finite.abs().view(torch.int32) >> 23),
    }


def quantization_statistics(x: Tensor, numbers: Tensor, scale: Tensor, fmt: Format) -> Found:
    """The errors of sampled rows x [R, K], float32 and finite.

    Args:
        numbers: [R, K], float32, those of the bytes.
        scale: float32, broadcasts against x: x ≈ numbers * scale.
    """
    error = (x - numbers * scale).double().flatten().nan_to_num_(0, 0, 0)
    return {
        "saturated": _count(x.abs() > scale * (fmt.max * ROUNDING)),
        "flushed": _count((numbers == 0) & (x != 0)),
        "noise": error.dot(error),
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


def without_columns(found: Found, column_scale: Tensor) -> Found:
    """`scale_statistics` of a tensor into which `column_scale` was multiplied before it was quantized."""
    return found | {
        "scale": found["scale"] / column_scale.amin(),
        "minus_smallest_scale": found["minus_smallest_scale"] / column_scale.amax(),
    }


def least_numbers(scale: Tensor, shift_scale: Tensor, index: Tensor, fmt: Format) -> Tensor:
    """The numbers [R, 1] of g, in the rows `index`, up to which the shift for dw makes zero of numbers.

    The shift of a row is log2(the largest c / its c), where c = 2^e * s_g has the exponents of both scales [T, 1].
    """
    exponent = (scale.view(torch.int32) >> 23) + (shift_scale.view(torch.int32) >> 23)  # of positive normal numbers
    shift = exponent.amax() - exponent[index]
    return torch.exp2(shift.clamp(max=100).float()) * (fmt.smallest_subnormal / 2)  # a tie rounds to zero


def shift_statistics(numbers: Tensor, least: Tensor) -> Found:
    """The numbers of g, sampled rows [R, N], that are not zero, and those that are after the shift: `least_numbers`."""
    given = torch.linalg.vector_norm(numbers, 0).double()
    return {"codes": given, "lost": given - _count(numbers.abs() > least)}


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


def sampled_scale(scale: Tensor, index: Tensor, granularity: Granularity, columns: int) -> Tensor:
    """The scales of the rows `index` [R], float32, such that they broadcast against the rows [R, columns]."""
    if granularity.rows is None:
        return scale.float()
    rows = scale.float()[index if granularity.rows == 1 else index // granularity.rows]
    if granularity.cols is None:
        return rows
    return rows.repeat_interleave(granularity.cols, 1)[:, :columns]


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
