"""The grouped GEMM with scales that vary along K, as a Triton kernel.

A group of rows of y has tiles of its own, the last of them in part empty. A program finds its group and its rows from
the offsets, so nothing is read on the host. Groups of any size, empty ones too, take one launch, whose number of
programs is the largest that M rows in E groups can need. The sums are those of `octavo.ops.gemm.block_scaled_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.granularity import Granularity
from octavo.ops.gemm.block_scaled_kernel import NEIGHBOURS, Tiling, choose, find_tile, readable_scale, sum_groups
from octavo.ops.gemm.kernel import store_sums
from octavo.ops.inductor import launcher
from octavo.ops.launching import allocate
from octavo.ops.triton_support import cdiv, power_of_two_above
from octavo.ops.weight_only.kernel import dequantize, widened_mm


def grouped_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    granularity_b: Granularity,
    offsets: Tensor,
    out_dtype: torch.dtype,
    tiling: Tiling | None = None,
) -> Tensor:
    """Same as `grouped_mm` of the operation, for a in groups along K and b in the same groups, or in square blocks.

    Rows behind the groups are not written. tiling: None chooses one; its split_k has no effect.
    """
    (m, k), (e, n, _) = a.shape, b.shape
    group, rows_b = granularity_b.cols or 1, granularity_b.rows or 1
    a, b = a.contiguous(), b.contiguous()
    block_n, block_m, groups, stages, warps, _ = tiling or choose(likely_rows(m, e), n, k, group, a.device)
    scale_a, scale_b = readable_scale(scale_a, block_m), readable_scale(scale_b, block_m)
    y = allocate(a, (m, n), out_dtype)
    tiles_m = most_tiles(m, e, block_m)
    launcher(_tile_kernel, (cdiv(n, block_n) * tiles_m,))(
        a, b, scale_a, scale_b, offsets.contiguous(), y, tiles_m, e, n, k,
        GROUP=group, ROWS_B=rows_b, GROUPS=groups, EVEN_K=k % (groups * group) == 0, BLOCK_E=power_of_two_above(e),
        BLOCK_M=block_m, BLOCK_N=block_n, NEIGHBOURS=NEIGHBOURS, NUM_STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return y


def dequantized_mm(
    a: Tensor,
    scale_a: Tensor,
    granularity_a: Granularity,
    b: Tensor,
    scale_b: Tensor,
    granularity_b: Granularity,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Same as `grouped_mm`, by PyTorch's BF16 product of the operands times their scales, rounded to BF16."""
    wide_a = dequantize(a, scale_a, granularity_a, torch.bfloat16)
    return widened_mm(wide_a, b, scale_b, granularity_b, offsets).to(out_dtype)


def likely_rows(m: int, groups: int) -> int:
    """The rows for which a tile is chosen: half more than a group has on average, so that most fit into one tile."""
    return cdiv(3 * m, 2 * groups)


def most_tiles(m: int, groups: int, block_m: int) -> int:
    """The largest number of tiles of M that `m` rows in so many groups can have."""
    return (m + (block_m - 1) * min(groups, m)) // block_m


@triton.jit
def _tile_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, offsets_ptr, y_ptr, tiles_m, E, N, K,
    GROUP: tl.constexpr, ROWS_B: tl.constexpr, GROUPS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NEIGHBOURS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = find_tile(tiles_m, tl.cdiv(N, BLOCK_N), NEIGHBOURS)
    e, start_m, end_m = find_rows(offsets_ptr, pid_m, E, BLOCK_E, BLOCK_M)
    if start_m < end_m:
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        b_ptr += e.to(tl.int64) * N * K
        scale_b_ptr += e.to(tl.int64) * tl.cdiv(N, ROWS_B) * _scale_stride(scale_b_ptr, K, GROUP)
        acc = sum_groups(
            a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, offs_m, offs_n, pid_n, end_m, N, K, 0, K,
            GROUP, ROWS_B, GROUPS, EVEN_K, BLOCK_M, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
        mask = (offs_n < N)[:, None] & (offs_m < end_m)[None, :]
        store_sums(acc, offs_m.to(tl.int64)[None, :], offs_n[:, None], y_ptr, None, None, None, N, 0, mask)


@triton.jit
def find_rows(offsets_ptr, pid_m, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The group of the tile `pid_m`, the tile's first row, and the end of the group; behind the last tile (_, 0, 0)."""
    offs_e = tl.arange(0, BLOCK_E)
    mask = offs_e < E
    ends = tl.load(offsets_ptr + offs_e, mask, other=0)
    starts = tl.load(offsets_ptr + offs_e - 1, mask & (offs_e > 0), other=0)
    tiles = tl.cdiv(ends - starts, BLOCK_M)
    e = tl.sum((tl.cumsum(tiles, 0) <= pid_m).to(tl.int32), 0)
    tile = pid_m - tl.sum(tl.where(offs_e < e, tiles, 0), 0)  # of the group
    here = offs_e == e
    end = tl.sum(tl.where(here, ends, 0), 0)
    start = tl.sum(tl.where(here, starts + tile * BLOCK_M, 0), 0)
    return e, start, end


@triton.jit
def _scale_stride(scale_ptr, K, GROUP: tl.constexpr):
    """The elements behind `scale_ptr` of a row of groups: of E8M0, a word holds four."""
    groups = tl.cdiv(K, GROUP)
    if scale_ptr.dtype.element_ty == tl.int32:
        groups = groups // 4
    return groups
