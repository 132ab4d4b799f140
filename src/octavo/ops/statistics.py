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
EXPONENTS = 256  # biased exponents of float32: 0 is that of zero, and of numbers below 2^-126
FIELD = {name: i for i, name in enumerate((*MAXIMA, *SUMS, "exponents"))}
WIDTH = FIELD["exponents"] + EXPONENTS
# A scale computed from the amax maps it onto the largest code, up to a rounding of float32: that is no saturation.
_ROUNDING = 1 + 2.0**-20

Found = dict[str, Tensor]  # maxima float32 and sums float64, without dimensions; exponents [EXPONENTS]


def clear_statistics(stats: Tensor) -> Tensor:
    """Make `stats` [n, WIDTH] those of no sample, in place."""
    stats.zero_()
    stats[:, : len(MAXIMA)] = -torch.inf
    return stats


def add_statistics(stats: Tensor, found: Found) -> None:
    """Add what the functions below found to `stats` [WIDTH], in place."""
    n, lowest, zero = len(MAXIMA), _constant(-torch.inf, stats.device), _constant(0, stats.device)
    maxima = torch.stack([found.get(name, lowest) for name in MAXIMA])
    sums = torch.stack([found.get(name, zero) for name in SUMS])
    torch.maximum(stats[:n], maxima, out=stats[:n])
    stats[n : WIDTH - EXPONENTS] += sums
    stats[WIDTH - EXPONENTS :] += found["exponents"]


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


def quantization_statistics(x: Tensor, numbers: Tensor, scale: Tensor, fmt: Format) -> Found:
    """The errors of sampled rows x [R, K], float32 and finite.

    Args:
        numbers: [R, K], float32, those of the bytes.
        scale: float32, broadcasts against x: x ≈ numbers * scale.
    """
    error = (x - numbers * scale).double().flatten().nan_to_num_(0, 0, 0)
    return {
        "saturated": _count(x.abs() > scale * (fmt.max * _ROUNDING)),
        "flushed": _count((numbers == 0) & (x != 0)),
        "noise": error.dot(error),
    }


def scale_statistics(scale: Tensor, column_scale: Tensor | None) -> Found:
    """The range of all scales of a tensor; the smallest is that of the blocks that are not all zero.

    `column_scale` was multiplied into the tensor before it was quantized, and is taken out of the scales.
    """
    scale = scale.float()
    minus_low = torch.where(scale > SMALLEST_SCALE, -scale, -torch.inf).amax()  # NaN compares as false
    high = scale.nan_to_num(-torch.inf).amax()
    if column_scale is not None:
        minus_low, high = minus_low / column_scale.amax(), high / column_scale.amin()
    return {
        "scale": high,
        "minus_smallest_scale": minus_low,
        "scales": _constant(scale.numel(), scale.device),
        "nan_scales": _count(scale.isnan()),
    }


def shift_statistics(numbers: Tensor, shift: Tensor, fmt: Format) -> Found:
    """The numbers of g, sampled rows [R, N], that are not zero, and those that are when divided by 2^shift[R, 1]."""
    least = torch.exp2(shift.clamp(max=100).float()) * (fmt.smallest_subnormal / 2)  # a tie rounds to zero
    given = numbers != 0
    return {"codes": _count(given), "lost": _count(given & (numbers.abs() <= least))}


def sampled_scale(scale: Tensor, index: Tensor, granularity: Granularity, columns: int) -> Tensor:
    """The scales of the rows `index` [R], float32, such that they broadcast against the rows [R, columns]."""
    if granularity.rows is None:
        return scale.float()
    rows = scale.float()[index if granularity.rows == 1 else index // granularity.rows]
    if granularity.cols is None:
        return rows
    return rows.repeat_interleave(granularity.cols, 1)[:, :columns]


def numbers_of(codes: Tensor) -> Tensor:
    """Bytes of an eight-bit format as float32. A GPU converts them in one operation."""
    return codes.float() if codes.is_cuda else widen(codes)


def _count(holds: Tensor) -> Tensor:
    return holds.sum(dtype=torch.float64)


def _histogram(exponents: Tensor) -> Tensor:
    if not exponents.is_cuda:
        return torch.bincount(exponents.flatten(), minlength=EXPONENTS)
    # bincount would wait for the device, and of floats this is not deterministic.
    return torch.histc(exponents, EXPONENTS, 0, EXPONENTS)


@lru_cache(maxsize=1024)
def _constant(value: float, device: torch.device) -> Tensor:
    """A number on the device, float64; float32 if it is not finite, as for maxima."""
    dtype = torch.float64 if math.isfinite(value) else torch.float32
    return torch.full((), value, dtype=dtype, device=device)
