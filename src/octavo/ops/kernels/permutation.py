"""The permutation of rows as Triton kernels. A program reads whole rows by their index, so each read is contiguous."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.qtensor import Cast
from octavo.ops.kernels.device_math import add, amax_bits, inverse, scale_from_amax, to_data
from octavo.ops.launching import allocate, cdiv, row_tile
from octavo.ops.registration import launcher

BLOCK_K = 2048  # columns of a program of `combine`
TILES = 4  # of adjacent rows that a program of `gather_quantize` takes in turn: the scales of columns stay in its cache


def gather_quantize(
    x: Tensor,
    cast: Cast,
    slot: Tensor | None,
    top_k: int,
    column_scale: Tensor | None,
    group: Tensor | None,
    row_scale: Tensor | None,
    y: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Same as `gather_quantize_reference`, for contiguous tensors. It adds the products in another order."""
    m, k = x.shape[0] if slot is None else slot.shape[0], x.shape[1]
    data, scale = allocate(x, (m, k), cast.fmt.dtype), allocate(x, (m, 1), torch.float32)
    products = None if y is None else allocate(x, (m,), torch.float32)
    block_k, block_m, warps = row_tile(k)
    launcher(_gather_kernel, (cdiv(m, TILES * block_m),))(
        x, data, scale, slot, column_scale, group, row_scale, y, products, m, k,
        TOP_K=top_k, FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two,
        BLOCK_K=block_k, BLOCK_M=block_m, TILES=TILES, num_warps=warps,
    )  # fmt: skip
    return data, scale, products


@triton.jit
def _gather_kernel(
    x_ptr, data_ptr, scale_ptr, slot_ptr, column_scale_ptr, group_ptr, row_scale_ptr, y_ptr, products_ptr, M, K,
    TOP_K: tl.constexpr, FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    offs_k = tl.arange(0, BLOCK_K)
    for tile in range(TILES):
        offs_m = (tl.program_id(0).to(tl.int64) * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        offs = offs_m[:, None] * K + offs_k[None, :]
        token = offs_m
        if y_ptr is not None:  # loaded first, since its rows come from the farthest memory
            y = tl.load(y_ptr + offs, mask, other=0.0)
        if slot_ptr is not None:
            token = tl.load(slot_ptr + offs_m, mask_m, other=0).to(tl.int64) // TOP_K
        x = tl.load(x_ptr + token[:, None] * K + offs_k[None, :], mask, other=0.0).to(tl.float32)
        scaled = x
        if column_scale_ptr is not None:
            line_ptr = column_scale_ptr + tl.load(group_ptr + offs_m, mask_m, other=0).to(tl.int64) * K
            scaled *= tl.load(line_ptr[:, None] + offs_k[None, :], mask, other=0.0, eviction_policy="evict_last")
        if row_scale_ptr is not None:
            scaled *= tl.load(row_scale_ptr + offs_m, mask_m, other=0.0)[:, None]
        if y_ptr is not None:
            tl.store(products_ptr + offs_m, tl.sum(x * y.to(tl.float32), 1), mask_m)
        scale = scale_from_amax(amax_bits(scaled, 1), FORMAT_MAX, POWER_OF_TWO)
        tl.store(data_ptr + offs, to_data(scaled * inverse(scale)[:, None], data_ptr.dtype.element_ty), mask)
        tl.store(scale_ptr + offs_m, scale, mask_m)


def combine(y: Tensor, row: Tensor, weight: Tensor | None) -> Tensor:
    """Same as `combine_reference`, for contiguous tensors."""
    (t, top_k), k = row.shape, y.shape[1]
    out = allocate(y, (t, k))
    launcher(_combine_kernel, (t, cdiv(k, BLOCK_K)))(y, out, row, weight, k, TOP_K=top_k, BLOCK_K=BLOCK_K, num_warps=4)
    return out


@triton.jit
def _combine_kernel(y_ptr, out_ptr, row_ptr, weight_ptr, K, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)  # the other axes of a grid end at 65,535
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for s in tl.static_range(TOP_K):
        row = tl.load(row_ptr + t * TOP_K + s).to(tl.int64)
        part = tl.load(y_ptr + row * K + offs_k, (offs_k < K) & (row >= 0), other=0.0).to(tl.float32)
        if weight_ptr is not None:
            part *= tl.load(weight_ptr + t * TOP_K + s)
        total = add(total, part)
    tl.store(out_ptr + t * K + offs_k, total.to(out_ptr.dtype.element_ty), offs_k < K)
