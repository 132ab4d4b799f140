"""Statistics of sampled rows of a tensor, in a form in which those of several samples and ranks can be combined.

Statistics are float64 [WIDTH]: maxima, then sums, then a histogram of exponents. Those of two samples are combined by
the maximum of the maxima and the sum of the rest. `octavo.telemetry` computes from them the numbers that people read.

The moments are sums of powers. In float64 the fourth power of a gradient of 1e-30 is still a normal number. The
histogram counts the exponents of float32 as they are: it is shifted when the amax of all samples is known.
"""

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

Found = dict[str, Tensor]


def clear_statistics(stats: Tensor) -> Tensor:
    """Make `stats` [n, WIDTH] those of no sample, in place."""
    stats.zero_()
    stats[:, : len(MAXIMA)] = -torch.inf
    return stats


def add_statistics(stats: Tensor, found: Found) -> None:
    """Add what the functions below found to `stats` [WIDTH], in place."""
    nothing = torch.zeros((), dtype=torch.float64, device=stats.device)
    maxima = torch.stack([found[name].double() if name in found else nothing - torch.inf for name in MAXIMA])
    sums = torch.stack([found[name].double() if name in found else nothing for name in SUMS])
    n = len(MAXIMA)
    stats[:n] = torch.maximum(stats[:n], maxima)
    stats[n : WIDTH - EXPONENTS] += sums
    if "exponents" in found:
        stats[WIDTH - EXPONENTS :] += found["exponents"]


def tensor_statistics(x: Tensor) -> Found:
    """The statistics of the finite elements of sampled rows [R, K], float32, and the count of the others."""
    finite = x.isfinite()
    x = torch.where(finite, x, 0)
    largest = torch.maximum(x.amax(1), -x.amin(1))  # of each row
    wide = x.double().flatten()
    square = wide * wide
    return {
        "amax": largest.amax(),
        "elements": largest.new_full((), x.numel()),
        "x1": wide.sum(),
        "x2": square.sum(),
        "x3": square.dot(wide),
        "x4": square.dot(square),
        "nonfinite": x.numel() - finite.sum(),
        "rows": largest.new_full((), x.shape[0]),
        "zero_rows": (largest == 0).sum(),
        "exponents": _histogram((x.view(torch.int32).flatten() >> 23) & 0xFF),
    }


def quantization_statistics(x: Tensor, codes: Tensor, scale: Tensor, fmt: Format) -> Found:
    """The errors of sampled rows x [R, K], float32.

    Args:
        codes: the bytes [R, K] that x became.
        scale: float32, broadcasts against x: x ≈ codes * scale.
    """
    numbers = widen(codes)
    magnitude = x.abs()
    error = (x - numbers * scale).double().flatten().nan_to_num(0, 0, 0)
    return {
        "saturated": ((magnitude > scale * (fmt.max * _ROUNDING)) & magnitude.isfinite()).sum(),
        "flushed": ((numbers == 0) & (magnitude > 0)).sum(),
        "noise": error.dot(error),
    }


def scale_statistics(scale: Tensor, column_scale: Tensor | None) -> Found:
    """The range of all scales of a tensor; the smallest is that of the blocks that are not all zero.

    `column_scale` was multiplied into the tensor before it was quantized, and is taken out of the scales.
    """
    scale = scale.float()
    low = torch.where(scale > SMALLEST_SCALE, scale, torch.inf).amin()  # NaN compares as false
    high = torch.where(scale.isnan(), -torch.inf, scale).amax()
    if column_scale is not None:
        low, high = low / column_scale.amax(), high / column_scale.amin()
    return {
        "scale": high,
        "minus_smallest_scale": -low,
        "scales": high.new_full((), scale.numel()),
        "nan_scales": scale.isnan().sum(),
    }


def shift_statistics(codes: Tensor, shift: Tensor, fmt: Format) -> Found:
    """The bytes of g, sampled rows [R, N], that are not zero, and those that are when divided by 2^shift[R, 1]."""
    numbers = widen(codes).abs()
    lost = numbers * torch.exp2(-shift.clamp(max=100).float()) <= fmt.smallest_subnormal / 2  # a tie rounds to zero
    return {"codes": (numbers > 0).sum(), "lost": ((numbers > 0) & lost).sum()}


def sampled_scale(scale: Tensor, index: Tensor, granularity: Granularity, columns: int) -> Tensor:
    """The scales of the rows `index` [R], float32, such that they broadcast against the rows [R, columns]."""
    if granularity.rows is None:
        return scale.float()
    rows = scale.float()[index // granularity.rows]
    if granularity.cols is None:
        return rows
    return rows.repeat_interleave(granularity.cols, 1)[:, :columns]


def _histogram(exponents: Tensor) -> Tensor:
    if not exponents.is_cuda:
        return torch.bincount(exponents, minlength=EXPONENTS)
    counts = torch.zeros(EXPONENTS, dtype=torch.float64, device=exponents.device)  # bincount would wait for the device
    return counts.scatter_add_(0, exponents.long(), torch.ones_like(exponents, dtype=torch.float64))
