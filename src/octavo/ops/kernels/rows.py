"""Rows of many matrices as Triton kernels: quantized by row, or added up; and the words of many tensors, added up."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.qtensor import Cast
from octavo.ops.kernels.device_math import INFINITY_BITS, amax_bits, inverse, scale_from_amax, to_data
from octavo.ops.launching import RowBatch, cdiv, row_tile
from octavo.ops.registration import launcher

# ---- Quantization of many matrices by row as Triton kernels. Their addresses come from a table.


ROWS_TO_CHECK = 64  # of a program that casts again the rows whose scale has changed


def row_amaxes(batch: RowBatch, amax: Tensor, data: Tensor | None, cast: Cast) -> None:
    block_k, block_m, warps = row_tile(batch.matrices[0].shape[1])
    launcher(_amax_kernel, (cdiv(batch.longest, block_m), len(batch.matrices)))(
        batch.matrices[0], batch.table, amax, data, batch.matrices[0].shape[1],
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, ALIGNED=batch.aligned,
        BLOCK_K=block_k, BLOCK_M=block_m, num_warps=warps,
    )  # fmt: skip


def cast_rows(batch: RowBatch, scale: Tensor, written: Tensor | None, data: Tensor, cast: Cast) -> None:
    block_k, _, warps = row_tile(batch.matrices[0].shape[1])
    block_m = 4 if written is None else ROWS_TO_CHECK
    launcher(_cast_kernel, (cdiv(batch.longest, block_m), len(batch.matrices)))(
        batch.matrices[0], batch.table, scale, written, data, batch.matrices[0].shape[1],
        FORMAT_MAX=cast.fmt.max, ALIGNED=batch.aligned, BLOCK_K=block_k, BLOCK_M=block_m, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _amax_kernel(
    first_ptr, table_ptr, amax_ptr, data_ptr, K,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    x_ptr, rows, start = _matrix(first_ptr, table_ptr, tl.program_id(1), ALIGNED)
    start_m = tl.program_id(0).to(tl.int64) * BLOCK_M
    if start_m < rows:
        offs_m, offs_k = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        mask = (offs_m < rows)[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask, other=0.0).to(tl.float32)
        bits = amax_bits(x, 1)
        finite = tl.minimum(bits, tl.full(bits.shape, INFINITY_BITS, tl.int32))  # NaN becomes infinity
        tl.store(amax_ptr + start + offs_m, finite.to(tl.float32, bitcast=True), offs_m < rows)
        if data_ptr is not None:
            x *= inverse(scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO))[:, None]
            offs = (start + offs_m)[:, None] * K + offs_k[None, :]
            tl.store(data_ptr + offs, to_data(x, data_ptr.dtype.element_ty), mask)


@triton.jit
def _cast_kernel(
    first_ptr, table_ptr, scale_ptr, written_ptr, data_ptr, K,
    FORMAT_MAX: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    x_ptr, rows, start = _matrix(first_ptr, table_ptr, tl.program_id(1), ALIGNED)
    start_m = tl.program_id(0).to(tl.int64) * BLOCK_M
    if start_m < rows:
        offs_m = start_m + tl.arange(0, BLOCK_M)
        scale = tl.load(scale_ptr + start + offs_m, offs_m < rows, other=0.0)
        if written_ptr is None:
            changed = offs_m < rows
        else:
            changed = scale > tl.load(written_ptr + start + offs_m, offs_m < rows, other=0.0)  # not where both are NaN
        if tl.max(changed.to(tl.int32), 0) > 0:
            offs_k = tl.arange(0, BLOCK_K)
            for m in range(start_m, tl.minimum(start_m + BLOCK_M, rows)):
                row_scale = tl.load(scale_ptr + start + m)
                row_changed = True
                if written_ptr is not None:
                    row_changed = row_scale > tl.load(written_ptr + start + m)
                if row_changed:
                    x = tl.load(x_ptr + m * K + offs_k, offs_k < K, other=0.0).to(tl.float32)
                    x *= tl.div_rn(1.0, row_scale)
                    saturated = tl.minimum(tl.maximum(x, -FORMAT_MAX), FORMAT_MAX)
                    x = tl.where(x == x, saturated, x)
                    tl.store(data_ptr + (start + m) * K + offs_k, to_data(x, data_ptr.dtype.element_ty), offs_k < K)


@triton.jit
def _matrix(first_ptr, table_ptr, index, ALIGNED: tl.constexpr):
    """Address, rows and first row in the batch of matrix `index`; the pointer has the type of `first_ptr`."""
    x_ptr = tl.load(table_ptr + 3 * index).to(first_ptr.dtype)
    if ALIGNED:  # lets Triton load several numbers at once
        x_ptr = tl.multiple_of(x_ptr, 16)
    return x_ptr, tl.load(table_ptr + 3 * index + 1), tl.load(table_ptr + 3 * index + 2)


# ---- The sum of a few long rows as a Triton kernel. A program adds a part of all rows.


BLOCK = 1024  # with 4 warps a thread loads 16 bytes of a row at once


def add_rows(rows: Tensor, total: Tensor, mean: bool) -> None:
    """Same as `octavo.ops.rows.add_rows`."""
    count, n = rows.shape
    launcher(_add_kernel, (cdiv(n, BLOCK),))(rows, total, n, ROWS=count, MEAN=mean, BLOCK=BLOCK)


@triton.jit
def _add_kernel(rows_ptr, total_ptr, N, ROWS: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    acc = tl.load(rows_ptr + offs, mask, other=0.0).to(tl.float32)
    for _ in range(1, ROWS):
        rows_ptr += N
        acc += tl.load(rows_ptr + offs, mask, other=0.0).to(tl.float32)
    if MEAN:
        acc *= 1.0 / ROWS
    tl.store(total_ptr + offs, acc, mask)


# ---- The sums of the words of many tensors as a Triton kernel. Integers modulo 2^64 may be added in any order.


PROGRAMS = 256  # of a tensor; those of a small one find nothing to do
BLOCK_WORDS = 4096
FACTOR = tl.constexpr(0x1E3779B97F4A7C15)  # 2^61 times the golden ratio: multiples of it look like random bits


def word_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Same as `octavo.ops.rows.word_sums`, for tensors of one device."""
    placed = [t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.flatten().clone() for t in tensors]
    table = torch.tensor([(t.data_ptr(), t.nbytes) for t in placed], dtype=torch.int64, device=placed[0].device)
    sums = torch.zeros(len(placed), dtype=torch.int64, device=table.device)
    launcher(_word_kernel, (PROGRAMS, len(placed)))(table, sums, BLOCK=BLOCK_WORDS, num_warps=8)
    return sums


@triton.jit
def _word_kernel(table_ptr, sums_ptr, BLOCK: tl.constexpr):
    index, part = tl.program_id(1), tl.program_id(0).to(tl.int64)
    address, size = tl.load(table_ptr + 2 * index), tl.load(table_ptr + 2 * index + 1)
    words_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    words = size // 16 * 2  # pairs, which a thread loads at once
    if part * BLOCK < words or part == 0:
        total = tl.zeros((BLOCK,), tl.int64)
        for first in range(part * BLOCK, words, tl.num_programs(0) * BLOCK):
            offs = tl.arange(0, BLOCK).to(tl.int64) + first
            total += tl.load(words_ptr + offs, offs < words, other=0) * _factor(offs)
        found = tl.sum(total, 0)
        if part == 0:  # the bytes after the last pair
            byte = tl.arange(0, 16)
            rest = tl.load(words_ptr.to(tl.pointer_type(tl.uint8)) + 8 * words + byte, 8 * words + byte < size, other=0)
            found += tl.sum((rest.to(tl.int64) << (byte % 8 * 8)) * _factor(words + byte // 8), 0)
        tl.atomic_add(sums_ptr + index, found, sem="relaxed")


@triton.jit
def _factor(offs):
    """The odd number of each place."""
    factor = offs * FACTOR
    return (factor ^ (factor >> 31)) | 1
