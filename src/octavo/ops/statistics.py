"""Statistics of sampled rows of a tensor, in a form in which those of several samples and ranks can be combined.

Statistics are float64 [WIDTH]: maxima, then sums, then a histogram of exponents. Those of two samples are combined by
the maximum of the maxima and the sum of the rest. `octavo.telemetry` computes from them the numbers that people read.

A brief sample has only the numbers that rules judge (`octavo.telemetry.rules`), in half as many operations: no
histogram, no errors, no rows of zeros and no smallest scale.

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
    "nonzero",  # only in a brief sample: otherwise the histogram has it
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
    if "exponents" in found:
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


def brief_statistics(x: Tensor, *, moments: bool) -> Found:
    """Those of a brief sample. An inf or NaN is in the sums too, and tells of itself there."""
    wide = x.double().flatten()
    found = {
        "amax": torch.linalg.vector_norm(x, torch.inf),
        "elements": _constant(x.numel(), x.device),
        "x1": wide.sum(),
        "nonzero": torch.linalg.vector_norm(wide, 0),
    }
    unknown = _constant(math.nan, x.device)
    if not moments:
        return found | dict.fromkeys(("x2", "x3", "x4", "noise"), unknown)
    square = wide * wide
    return found | {"x2": square.sum(), "x3": square.dot(wide), "x4": square.dot(square), "noise": unknown}


def flushed_statistics(nonzero: Tensor, numbers: Tensor) -> Found:
    """The elements that are zero in eight bits, of those that are not zero: of a brief sample."""
    return {"flushed": nonzero - torch.linalg.vector_norm(numbers, 0)}


def quantization_statistics(x: Tensor, numbers: Tensor, scale: Tensor, fmt: Format) -> Found:
    """The errors of sampled rows x [R, K], float32 and finite.

    Args:
        numbers: [R, K], float32, those of the bytes.
        scale: float32, broadcasts against x: x ≈ numbers * scale.
    """
    error = (x - numbers * scale).double().flatten().nan_to_num_(0, 0, 0)
    return saturation_statistics(x, scale, fmt) | {
        "flushed": _count((numbers == 0) & (x != 0)),
        "noise": error.dot(error),
    }


def saturation_statistics(x: Tensor, scale: Tensor, fmt: Format) -> Found:
    """The elements beyond the largest number of the format times the scale."""
    return {"saturated": _count(x.abs() > scale * (fmt.max * _ROUNDING))}


def scale_statistics(scale: Tensor, *, brief: bool) -> Found:
    """The range of all scales of a tensor; the smallest is that of the blocks that are not all zero."""
    scale = scale.float()
    found = {
        "scale": scale.nan_to_num(-torch.inf).amax(),
        "scales": _constant(scale.numel(), scale.device),
        "nan_scales": _count(scale.isnan()),
    }
    if not brief:
        found["minus_smallest_scale"] = torch.where(scale > SMALLEST_SCALE, -scale, -torch.inf).amax()  # not of NaN
    return found


def without_columns(found: Found, column_scale: Tensor) -> Found:
    """`scale_statistics` of a tensor into which `column_scale` was multiplied before it was quantized."""
    taken = {"scale": found["scale"] / column_scale.amin()}
    if "minus_smallest_scale" in found:
        taken["minus_smallest_scale"] = found["minus_smallest_scale"] / column_scale.amax()
    return found | taken


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
    """A number on the device, float64; float32 if it is infinite, as maxima are."""
    dtype = torch.float32 if math.isinf(value) else torch.float64
    return torch.full((), value, dtype=dtype, device=device)
