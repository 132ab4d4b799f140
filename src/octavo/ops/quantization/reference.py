"""The quantizers in plain PyTorch: what every kernel must equal, byte for byte, and what a CPU runs.

    scale = amax(block) / max       inv_scale = 1 / scale       data = cast(x * inv_scale)

in float32, each step rounded once to nearest, so that another implementation can repeat it exactly. Three roundings can
lift the largest element above max by 2^-22 of it at most, which the cast rounds away: no clamp is needed here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.codec import cast as cast_to
from octavo.numerics.formats import Format
from octavo.numerics.rounding import uniform_noise
from octavo.numerics.scaling import scale_from_amax


def quantize(
    x: Tensor, how: Cast, column_scale: Tensor | None, row_scale: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Data and scale of x * column_scale [1, K] * row_scale [M, 1], multiplied in this order where they are given."""
    x = x.float()
    if column_scale is not None:
        x = x * column_scale
    if row_scale is not None:
        x = x * row_scale
    amax = how.granularity.amax(x) if x.numel() else x.new_zeros(how.granularity.scale_shape(tuple(x.shape)))
    scale = scale_from_amax(amax, how.fmt, power_of_two=how.power_of_two, relative_floor=how.relative_floor)
    inv_scale = how.granularity.expand(1 / scale, tuple(x.shape))
    x = x * inv_scale
    data = x.to(how.fmt.dtype) if seed is None else cast_to(x, how.fmt, uniform_noise(x.shape, seed))
    return data, scale.to(torch.float8_e8m0fnu) if how.scale == "e8m0" else scale


def quantize_scaled(x: Tensor, scale: Tensor, fmt: Format, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Data of `x` under a scale known beforehand, and the amax [1, 1] that was met; a non-finite `x` gives all NaN."""
    x = x.float()
    amax = x.abs().amax().view(1, 1) if x.numel() else x.new_zeros(1, 1)
    inv_scale = torch.where(amax.isfinite(), 1 / scale, torch.nan)
    noise = uniform_noise(x.shape, seed) if seed is not None else None
    return cast_to(x * inv_scale, fmt, noise), amax
