"""Quantization in groups along a row and in blocks. A program holds whole blocks in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.ops.device_math import amax_bits, inverse, scale_from_amax, store_scale
from octavo.ops.inductor import launcher
from octavo.ops.quantization.device_rounding import round_to_data
from octavo.ops.triton_support import cdiv, power_of_two_above

TRANSPOSED_BLOCK, TRANSPOSED_WARPS = 4096, 2  # elements and warps of a program that also transposes


def quantize_blocks(x: Tensor, data: Tensor, scale: Tensor, cast: Cast, seed: Tensor | None) -> None:
    m, k = x.shape
    rows, cols = cast.granularity.rows or 1, cast.granularity.cols or 1
    block_m, block_k = power_of_two_above(rows), power_of_two_above(cols)
    blocks = max(1, 8192 // (block_m * block_k))  # adjacent blocks of one program
    launcher(_block_kernel, (cdiv(scale.numel(), blocks),))(
        x, data, scale, seed, m, k, scale.shape[1], scale.numel(), rows, cols,
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, E8M0=cast.scale == "e8m0",
        BLOCKS=blocks, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=8,
    )  # fmt: skip


@triton.jit
def _block_kernel(
    x_ptr, data_ptr, scale_ptr, seed_ptr, M, K, blocks_across, num_blocks, block_rows, block_cols,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inner_m, inner_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    offs_m = ((offs_block // blocks_across) * block_rows)[:, None, None] + inner_m[None, :, None]
    offs_k = ((offs_block % blocks_across) * block_cols)[:, None, None] + inner_k[None, None, :]
    mask = (offs_m < M) & (offs_k < K) & (inner_m < block_rows)[None, :, None] & (inner_k < block_cols)[None, None, :]
    offs = offs_m * K + offs_k
    x = tl.load(x_ptr + offs, mask, other=0.0).to(tl.float32)
    scale = scale_from_amax(amax_bits(tl.reshape(x, (BLOCKS, BLOCK_M * BLOCK_K)), 1), FORMAT_MAX, POWER_OF_TWO)
    q = round_to_data(x * inverse(scale)[:, None, None], data_ptr.dtype.element_ty, offs, seed_ptr)
    tl.store(data_ptr + offs, q, mask)
    store_scale(scale_ptr + offs_block, scale, offs_block < num_blocks, E8M0)


def quantize_groups_transposed(x: Tensor, data: Tensor, scale: Tensor, cast: Cast, seed: Tensor | None) -> None:
    """Quantize the transpose of a contiguous x [M, K] in groups along M: data [K, M], scale [K, M / group]."""
    m, k = x.shape
    group_size = cast.granularity.cols
    assert group_size is not None
    block_m = power_of_two_above(group_size)
    block_k = max(1, TRANSPOSED_BLOCK // block_m)
    launcher(_group_transposed_kernel, (cdiv(k, block_k), scale.shape[1]))(
        x, data, scale, seed, m, k, group_size,
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, E8M0=cast.scale == "e8m0",
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=TRANSPOSED_WARPS,
    )  # fmt: skip


@triton.jit
def _group_transposed_kernel(
    x_ptr, data_ptr, scale_ptr, seed_ptr, M, K, group_size,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    inner_m = tl.arange(0, BLOCK_M)
    offs_m = tl.program_id(1).to(tl.int64) * group_size + inner_m
    offs_k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = ((offs_m < M) & (inner_m < group_size))[:, None] & (offs_k < K)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask, other=0.0).to(tl.float32)
    scale = scale_from_amax(amax_bits(x, 0), FORMAT_MAX, POWER_OF_TWO)
    index = offs_k[None, :] * M + offs_m[:, None]
    q = round_to_data(x * inverse(scale)[None, :], data_ptr.dtype.element_ty, index, seed_ptr)
    tl.store(data_ptr + offs_k[:, None] * M + offs_m[None, :], tl.trans(q), tl.trans(mask))
    store_scale(scale_ptr + offs_k * tl.num_programs(1) + tl.program_id(1), scale, offs_k < K, E8M0)
