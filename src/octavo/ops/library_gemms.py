"""The GEMMs of libraries: cuBLASLt, CUTLASS and hipBLASLt, as PyTorch calls them."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from octavo.numerics.qtensor import Granularity
from octavo.ops import cublaslt
from octavo.ops.dispatch import MX, SQUARE, STRIP
from octavo.ops.launching import Operands

# ---- The scaled GEMM on a GPU's tensor cores: cuBLASLt and CUTLASS on NVIDIA, hipBLASLt on AMD.
#
# Block scales go through `torch.nn.functional.scaled_mm`. Tensor and row scales go through the older
# `torch._scaled_mm`, which runs the same kernels: Inductor plans the memory of its result, but treats the newer
# function as an opaque call.
#
# Both need N and K in multiples of 16, and block scales need M so too; MX on AMD needs M and N in multiples of 32, and
# K in multiples of 128. Here smaller operands are padded with zero bytes, and the result is cut back.


ALIGNMENT = 16
TILE = 128  # rows of scales in a tile of MX, whose four columns are of as many elements
AMD = torch.version.hip is not None

_RECIPES = {STRIP: ScalingType.BlockWise1x128, SQUARE: ScalingType.BlockWise128x128, MX: ScalingType.BlockWise1x32}


def scaled_mm_cublaslt(
    operands: Operands, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """Same as `scaled_mm` of the operation. Block-scaled GEMMs return BF16 and always add blocks to a float32 sum.

    A GEMM with a result in BF16 takes the bias in BF16, as that of `nn.Linear` under autocast does.
    """
    a, b, scale_a, scale_b, by_a, by_b = operands
    m, n = a.shape[0], b.shape[0]
    rows, cols = (32, 128) if AMD and by_a == MX else (ALIGNMENT, ALIGNMENT)
    a, scale_a = _pad(a, scale_a, by_a, 1 if by_a.outer else rows, cols)
    b, scale_b = _pad(b, scale_b, by_b, rows, cols)
    if by_a.outer:
        takes_bias = out_dtype == torch.bfloat16 and b.shape[0] == n and not AMD
        added, bias = (bias.to(out_dtype), None) if bias is not None and takes_bias else (None, bias)
        y = cublaslt.scaled_mm(a, b, scale_a, scale_b, added, out_dtype, fast_accumulation)
        if y is None:
            y = torch._scaled_mm(
                a, b.t(), _scale(scale_a, by_a), _scale(scale_b, by_b, right=True),
                bias=added, out_dtype=out_dtype, use_fast_accum=fast_accumulation,
            )  # fmt: skip
    else:
        scale_a, scale_b = _scale(scale_a, by_a), _scale(scale_b, by_b, right=True)
        swizzle = SwizzleType.SWIZZLE_32_4_4 if by_a == MX and not AMD else SwizzleType.NO_SWIZZLE
        y = F.scaled_mm(
            a, b.t(), scale_a, _RECIPES[by_a], scale_b, _RECIPES[by_b], swizzle_a=swizzle, swizzle_b=swizzle,
            output_dtype=torch.bfloat16, use_fast_accum=False,
        )  # fmt: skip
    if y.shape != (m, n):
        y = y[:m, :n].contiguous()
    if bias is not None:
        y = y + bias
    return y if y.dtype == out_dtype else y.to(out_dtype)


def _pad(data: Tensor, scale: Tensor, granularity: Granularity, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Pad to multiples of `rows` and `cols` with zero bytes; the scales of added blocks are 1."""
    m, k = data.shape
    below, right = -m % rows, -k % cols
    if not (below or right):
        return data.contiguous(), scale
    data = F.pad(data.view(torch.uint8), (0, right, 0, below)).view(data.dtype)
    shape = granularity.scale_shape(tuple(data.shape))
    if shape != tuple(scale.shape):
        given, scale = scale, scale.new_ones(shape)
        scale[: given.shape[0], : given.shape[1]] = given
    return data.contiguous(), scale


def _scale(scale: Tensor, granularity: Granularity, *, right: bool = False) -> Tensor:
    """The scale in the order in which cuBLASLt reads it (its documentation, "Data types" and "Block scaling")."""
    if granularity.rows is None:  # one for the tensor
        return scale.reshape(())
    if granularity.outer:  # one a row
        return scale.t().contiguous() if right else scale.contiguous()
    if granularity == STRIP:  # the scales of one block of k are adjacent
        return scale.t().contiguous().t()
    if granularity == SQUARE:  # [K/128 rounded up to 4, M/128], k fastest
        return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()
    return scale.contiguous() if AMD else _swizzle(scale)


def _swizzle(scale: Tensor) -> Tensor:
    """E8M0 scales [..., M, K/32] as the tiles [...] of 128 x 4, each stored as [32, 4, 4]: rows r, r + 32, r + 64 and
    r + 96 together."""
    padded = F.pad(scale.view(torch.uint8), (0, -scale.shape[-1] % 4, 0, -scale.shape[-2] % TILE))
    *stack, rows, cols = padded.shape
    tiles = padded.view(*stack, rows // TILE, 4, 32, cols // 4, 4).transpose(-4, -2)
    return tiles.reshape(*stack, -1).view(torch.float8_e8m0fnu)


# ---- The grouped GEMM on Hopper's tensor cores: the CUTLASS kernels of `torch.nn.functional.scaled_grouped_mm`.
#
# They take the second operand with the bytes of the reduction adjacent. The reduction over ragged groups takes no empty
# group, and sizes in multiples of 16 bytes.


def grouped_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offsets: Tensor, *, fast: bool) -> Tensor:
    """Same as `grouped_mm_reference`, in BF16, for a contiguous a; rows behind the groups are not written."""
    return _scaled_grouped_mm(a, b.transpose(1, 2), scale_a.reshape(-1), scale_b.squeeze(-1), offsets, fast)


def grouped_mm_dw(a: Tensor, scale: Tensor, b: Tensor, offsets: Tensor, *, fast: bool) -> Tensor:
    """Same as `grouped_mm_dw_reference`, in BF16, for contiguous operands."""
    ones = torch.ones(offsets.shape[0] * b.shape[0], dtype=torch.float32, device=b.device)
    return _scaled_grouped_mm(a, b.t(), scale.reshape(-1), ones, offsets, fast)


def _scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, fast: bool) -> Tensor:
    row, functional = ScalingType.RowWise, cast(Any, F)  # PyTorch's stub lacks the function
    return functional.scaled_grouped_mm(
        a, b, scale_a, row, scale_b, row, offs=offsets, output_dtype=torch.bfloat16, use_fast_accum=fast
    )


# ---- The grouped GEMM of MX on Blackwell's tensor cores: the CUTLASS kernel of MSLK behind the same function.
#
# Each group has tiles of scales of its own, one group behind the other (aten/src/ATen/native/cuda/GroupedBlas.cpp,
# `_check_scales_blocked`). In y and dx the rows of a group fill its last tile in part, and an empty group has none. In
# dw a group has a multiple of 128 columns, and all tiles of its columns stand before those of the next group. Here
# both orders are tested; no Blackwell was at hand to run the kernel.


def mx_grouped_mm(operands: Operands, offsets: Tensor) -> Tensor:
    """Same as `grouped_mm_reference`, or as `grouped_mm_dw_reference` for b [K, M], in BF16, for E4M3 in groups of 32
    with E8M0 scales."""
    a, b, scale_a, scale_b, _, _ = operands
    if b.ndim == 3:
        scale_a, scale_b = _tiles_of_rows(scale_a, offsets), _swizzle(scale_b)
    else:
        scale_a, scale_b = _tiles_of_columns(scale_a, offsets), _tiles_of_columns(scale_b, offsets)
    by, swizzle, functional = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4, cast(Any, F)
    return functional.scaled_grouped_mm(
        a.contiguous(), b.contiguous().transpose(-2, -1), scale_a, by, scale_b, by,
        swizzle_a=swizzle, swizzle_b=swizzle, offs=offsets, output_dtype=torch.bfloat16,
    )  # fmt: skip


def _tiles_of_rows(scale: Tensor, offsets: Tensor) -> Tensor:
    """The swizzled scales of a [M, K]: the groups of rows, each in tiles of its own; [rows of tiles, K/32 and more]."""
    m = len(scale)
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    tiles = (offsets - starts + TILE - 1) // TILE
    first = TILE * (tiles.cumsum(0) - tiles) - starts  # that is added to the number of a row
    row = torch.arange(m, device=scale.device)
    group = torch.searchsorted(offsets, row.int(), right=True).clamp(max=len(offsets) - 1)
    rows = TILE * (-(-m // TILE) + len(offsets))
    placed = scale.view(torch.uint8).new_zeros(rows, scale.shape[1])
    placed[row + first[group]] = scale.view(torch.uint8)
    return _swizzle(placed).view(rows, -1)


def _tiles_of_columns(scale: Tensor, offsets: Tensor) -> Tensor:
    """The swizzled scales [N, M/32] of dw: the tiles of each group together; [rows of tiles, M/32 and more]."""
    rows = -(-len(scale) // TILE)
    tiles = _swizzle(scale).view(torch.uint8).view(rows, -1, 4 * TILE)
    column = torch.arange(tiles.shape[1], device=scale.device, dtype=torch.int32)
    ends = torch.cat([offsets // TILE, offsets.new_full((1,), len(column))])
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    group = torch.searchsorted(ends, column, right=True)
    first, size = starts[group], (ends - starts)[group]
    place = rows * first + size * torch.arange(rows, device=scale.device)[:, None] + column - first
    ordered = torch.empty_like(tiles).view(-1, 4 * TILE)
    ordered[place.view(-1)] = tiles.view(-1, 4 * TILE)
    return ordered.view(rows * TILE, -1).view(torch.float8_e8m0fnu)
