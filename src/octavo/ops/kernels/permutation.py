"""The permutation of rows as Triton kernels. A program reads whole rows by their index, so each read is contiguous."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.qtensor import Cast
from octavo.ops.kernels.device_math import add, amax_bits, inverse, mantissa, scale_from_amax, to_data
from octavo.ops.kernels.grouped_gemm import DEPTH
from octavo.ops.launching import LEAST_WEIGHT, Factors, allocate, cdiv, row_tile
from octavo.ops.registration import launcher

LEAST = tl.constexpr(LEAST_WEIGHT)
BLOCK_K = 1024  # columns of a program of `combine`
BLOCK = 512  # rows of a program of `index_slots` and `index_groups`
ROWS = 8  # adjacent ones of a program of `gather_quantize`, which keeps the scales of columns in registers


def gather_quantize(x: Tensor, cast: Cast, top_k: int, factors: Factors) -> tuple[Tensor, Tensor]:
    """Same as `gather_quantize_reference`, for contiguous tensors."""
    *factored, slot, _ = factors
    m, k = x.shape[0] if slot is None else slot.shape[0], x.shape[1]
    data, scale = allocate(x, (m, k), cast.fmt.dtype), allocate(x, (m, 1), torch.float32)
    block_k = row_tile(k)[0]
    launcher(_gather_kernel, (cdiv(m, ROWS),))(
        x, data, scale, slot, *factored, m, k, TOP_K=top_k, FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two,
        BLOCK_K=block_k, ROWS=ROWS, num_warps=max(2, block_k // 1024),
    )  # fmt: skip
    return data, scale


@triton.jit
def _gather_kernel(
    x_ptr, data_ptr, scale_ptr, slot_ptr, column_scale_ptr, group_ptr, mantissa_of_ptr, weight_ptr, M, K,
    TOP_K: tl.constexpr, FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first, offs_k = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, BLOCK_K)
    mask, group, column_scale = offs_k < K, -1, tl.zeros((BLOCK_K,), tl.float32)
    for m in range(first, tl.minimum(first + ROWS, M)):
        slot, token = m, m
        if slot_ptr is not None:
            slot = tl.load(slot_ptr + m).to(tl.int64)
            token = slot // TOP_K
        x = tl.load(x_ptr + token * K + offs_k, mask, other=0.0).to(tl.float32)
        if column_scale_ptr is not None:
            e = tl.load(group_ptr + m)
            if e != group:
                group = e
                column_scale = tl.load(column_scale_ptr + tl.cast(e, tl.int64) * K + offs_k, mask, other=0.0)
            x *= column_scale
        if mantissa_of_ptr is not None:
            factor = mantissa(tl.load(mantissa_of_ptr + m))
            if weight_ptr is not None:
                factor *= nonzero(tl.load(weight_ptr + slot))
            x *= factor
        scale = scale_from_amax(amax_bits(x, 0), FORMAT_MAX, POWER_OF_TWO)
        tl.store(data_ptr + m * K + offs_k, to_data(x * inverse(scale), data_ptr.dtype.element_ty), mask)
        tl.store(scale_ptr + m, scale)


@triton.jit
def nonzero(weight):
    """The weights of slots, not nearer to zero than the least."""
    return tl.where(tl.abs(weight) < LEAST, LEAST, weight)


def combine(y: Tensor, row: Tensor, weight: Tensor | None) -> Tensor:
    """Same as `combine_reference`, for contiguous tensors."""
    (t, top_k), k = row.shape, y.shape[1]
    out = allocate(y, (t, k))
    launcher(_combine_kernel, (t, cdiv(k, BLOCK_K)))(y, out, row, weight, k, TOP_K=top_k, BLOCK_K=BLOCK_K, num_warps=8)
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


def index_slots(experts: Tensor, order: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `index_slots_reference`, for contiguous tensors."""
    m = experts.shape[0]
    slot, row, offsets = allocate(experts, (m,)), allocate(experts, (m,)), allocate(experts, (num_experts,))
    launcher(_slots_kernel, (cdiv(m + 1, BLOCK),))(experts, order, slot, row, offsets, m, num_experts, BLOCK=BLOCK)
    return slot, row, offsets


@triton.jit
def _slots_kernel(experts_ptr, order_ptr, slot_ptr, row_ptr, offsets_ptr, M, E, BLOCK: tl.constexpr):
    """The groups from the expert of the row before to that of a row end at this row, and those behind at row M."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, expert = tl.load(order_ptr + row, row < M, other=0), tl.load(experts_ptr + row, row < M, other=E)
    tl.store(slot_ptr + row, slot.to(tl.int32), row < M)
    tl.store(row_ptr + slot, tl.where(expert < E, row, -1), row < M)
    begin = tl.maximum(tl.load(experts_ptr + row - 1, (row > 0) & (row <= M), other=0), 0)
    end = tl.where(row <= M, tl.minimum(expert, E), 0)
    for i in range(tl.max(end - begin, 0)):
        tl.store(offsets_ptr + begin + i, row, begin + i < end)


def index_groups(offsets: Tensor, rows: int, places: int, slot: Tensor | None, top_k: int) -> tuple[Tensor | None, ...]:
    """Same as `index_groups_reference`, for contiguous tensors."""
    e = offsets.shape[0]
    expert, ends, place = (allocate(offsets, (size,)) for size in (rows, e, places))
    token = None if slot is None else allocate(offsets, (places,))
    given = offsets, slot, expert, ends, place, token, rows, e, places
    launcher(_groups_kernel, (e, cdiv(places, e * BLOCK)))(*given, TOP_K=top_k, DEPTH=DEPTH, BLOCK=BLOCK)
    return expert, ends, place, token


@triton.jit
def _groups_kernel(
    offsets_ptr, slot_ptr, expert_ptr, ends_ptr, place_ptr, token_ptr, M, E, PLACES,
    TOP_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes a part of a group. The rows and places behind the last group belong to it."""
    e, part, each = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)  # the places of the groups before
    for at in range(0, e, BLOCK):
        start = tl.load(offsets_ptr + at + each - 1, (at + each > 0) & (at + each < e), other=0)
        size = tl.load(offsets_ptr + at + each, at + each < e, other=0) - start
        before += tl.where(at + each < e, _align(size, DEPTH), 0)
    first = tl.sum(before, 0)
    start, end = tl.load(offsets_ptr + e - 1, e > 0, other=0), tl.load(offsets_ptr + e)
    end_place = first + _align(end - start, DEPTH)
    tl.store(ends_ptr + e, end_place)
    last_row, last_place = tl.where(e == E - 1, M, end), tl.where(e == E - 1, PLACES, end_place)
    for at in range(part * BLOCK, last_place - first, tl.num_programs(1) * BLOCK):
        row, place = start + at + each, first + at + each
        tl.store(expert_ptr + row, tl.zeros_like(row) + e, row < last_row)
        tl.store(place_ptr + place, tl.where(row < end, row, -1), place < last_place)
        if slot_ptr is not None:
            slot = tl.load(slot_ptr + row, row < end, other=0)
            tl.store(token_ptr + place, tl.where(row < end, slot // TOP_K, -1), place < last_place)


@triton.jit
def _align(size, DEPTH: tl.constexpr):
    return tl.maximum(tl.cdiv(size, DEPTH), 1) * DEPTH
