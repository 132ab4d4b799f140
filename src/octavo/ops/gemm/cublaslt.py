"""The scaled GEMM on a GPU's tensor cores (cuBLASLt; hipBLASLt on ROCm).

Block scales go through `torch.nn.functional.scaled_mm`. Tensor and row scales go through the older `torch._scaled_mm`,
the same kernels: Inductor writes its result into memory that it plans, where it calls the newer one like a stranger.

Its operands want both sizes of b, and the reduction, in multiples of 16, where there are block scales the rows of a as
well: smaller ones are padded with zero bytes here and the result cut back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from octavo.numerics.granularity import ROW, TENSOR, Granularity
from octavo.ops.gemm.backend import MX, SQUARE, STRIP

ALIGNMENT = 16

_RECIPES = {
    STRIP: ScalingType.BlockWise1x128,
    SQUARE: ScalingType.BlockWise128x128,
    MX: ScalingType.BlockWise1x32,
}


def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    layout_a: Granularity,
    b: Tensor,
    scale_b: Tensor,
    layout_b: Granularity,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """As the door's. Block-scaled GEMMs give BF16, and have no fast accumulation: they promote each block as it is."""
    m, n = a.shape[0], b.shape[0]
    a, scale_a = _pad(a, scale_a, layout_a, rows=not layout_a.outer)
    b, scale_b = _pad(b, scale_b, layout_b, rows=True)
    scale_a, scale_b = _scale(scale_a, layout_a), _scale(scale_b, layout_b, right=True)
    if layout_a.outer:
        y = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast_accumulation)
    else:
        y = _block_scaled_mm(a, scale_a, layout_a, b, scale_b, layout_b)
    y = y[:m, :n].contiguous()
    if bias is not None:
        y = y + bias
    return y.to(out_dtype)


def _block_scaled_mm(
    a: Tensor, scale_a: Tensor, layout_a: Granularity, b: Tensor, scale_b: Tensor, layout_b: Granularity
) -> Tensor:
    swizzle = SwizzleType.SWIZZLE_32_4_4 if layout_a == MX else SwizzleType.NO_SWIZZLE
    return F.scaled_mm(
        a,
        b.t(),
        scale_a,
        _RECIPES[layout_a],
        scale_b,
        _RECIPES[layout_b],
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def _pad(data: Tensor, scale: Tensor, layout: Granularity, *, rows: bool) -> tuple[Tensor, Tensor]:
    """Columns, and `rows`, rounded up to 16 with zero bytes, and a scale of one for each row added."""
    below, right = (-n % ALIGNMENT for n in data.shape)
    below = below if rows else 0
    if below or right:
        data = F.pad(data.view(torch.uint8), (0, right, 0, below)).view(data.dtype)
    missing = layout.scale_shape(tuple(data.shape))[0] - scale.shape[0]
    if missing:
        scale = torch.cat([scale, scale.new_ones(missing, scale.shape[1])])
    return data.contiguous(), scale


def _scale(scale: Tensor, layout: Granularity, *, right: bool = False) -> Tensor:
    """The scale in the order that cuBLASLt reads it (its documentation, "Data types" and "Block scaling")."""
    if layout == TENSOR:
        return scale.reshape(())
    if layout == ROW:
        return scale.t().contiguous() if right else scale.contiguous()
    if layout == STRIP:  # blocks of one k next to each other
        return scale.t().contiguous().t()
    if layout == SQUARE:  # [K/128 rounded up to 4, M/128], k fastest
        return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()
    return _swizzle(scale)


def _swizzle(scale: Tensor) -> Tensor:
    """E8M0 scales [M, K/32] in 128 x 4 tiles, the rows of a tile four deep: [tile row, tile column, 32, 4, 4]."""
    rows, cols = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -cols % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
