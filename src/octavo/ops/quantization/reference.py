"""Quantization in plain PyTorch. Every kernel must equal it, byte for byte, and a CPU runs it.

    scale = amax(block) / max       inv_scale = 1 / scale       data = cast(x * inv_scale)

in float32. Each step is rounded once, to nearest, so that another implementation can repeat it exactly. The three
roundings can lift the largest element above max by at most 2^-22 of it. The cast rounds that away: no clamp is needed.
"""

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.codec import cast as cast_to
from octavo.numerics.formats import INT8, Format
from octavo.numerics.rounding import uniform_noise
from octavo.numerics.scaling import scale_from_amax


def quantize_reference(
    x: Tensor, cast: Cast, column_scale: Tensor | None, row_scale: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Data and scale of x [M, K] * column_scale [1, K] * row_scale [M, 1], multiplied in this order if given."""
    x = x.float()
    if column_scale is not None:
        x = x * column_scale
    if row_scale is not None:
        x = x * row_scale
    amax = cast.granularity.amax(x) if x.numel() else x.new_zeros(cast.granularity.scale_shape(tuple(x.shape)))
    scale = scale_from_amax(amax, cast.fmt, power_of_two=cast.power_of_two, relative_floor=cast.relative_floor)
    inv_scale = cast.granularity.expand(1 / scale, tuple(x.shape))
    x = x * inv_scale
    data = to_data(x, cast.fmt) if seed is None else cast_to(x, cast.fmt, uniform_noise(x.shape, seed))
    return data, scale.to(torch.float8_e8m0fnu) if cast.scale == "e8m0" else scale


def to_data(x: Tensor, fmt: Format) -> Tensor:
    """float32 `x`, divided by its scale, as numbers of an eight-bit format."""
    return cast_to(x, fmt) if fmt is INT8 else x.to(fmt.dtype)


def row_scales_reference(tensors: list[Tensor], cast: Cast) -> Tensor:
    """The scales [sum of N_i, 1] of the stacked matrices, before a relative floor and a power of two."""
    return torch.cat([scale_from_amax(cast.granularity.amax(x.float()), cast.fmt) for x in tensors])


def quantize_scaled_reference(x: Tensor, scale: Tensor, fmt: Format, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Data of `x` under a given scale, and the amax [1, 1] of x. If x holds inf or NaN, all data is NaN."""
    x = x.float()
    amax = x.abs().amax().view(1, 1) if x.numel() else x.new_zeros(1, 1)
    inv_scale = torch.where(amax.isfinite(), 1 / scale, torch.nan)
    noise = uniform_noise(x.shape, seed) if seed is not None else None
    return cast_to(x * inv_scale, fmt, noise), amax
