"""The quantizers as Triton kernels: one pass over the tensor wherever the scale allows it, bytes equal to the twin's.

    row             a program holds whole rows in registers: 2 bytes read, 1 written an element (BF16)
    group, block    a program holds whole blocks: the same bytes
    known scale     one pass; the amax is collected beside it
    tensor          two passes, the first for the amax: 4 read, 1 written

A relative floor under row scales needs the largest scale of all before the first byte: rows are cast as if there were
none, and a second launch, each of whose programs looks over all scales, casts again those few that lie below it.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.formats import Format
from octavo.numerics.granularity import ROW, TENSOR
from octavo.ops.device_math import (
    INFINITY_BITS,
    NAN_BITS,
    amax_bits,
    ceil_power_of_two,
    inverse,
    scale_from_amax,
    store_scale,
)
from octavo.ops.inductor import launcher
from octavo.ops.triton_support import power_of_two_above, row_tile

FLAT = 8192  # elements a program of the tensor-wide kernels
TRANSPOSED_TILE, TRANSPOSED_WARPS = 4096, 2  # elements and warps of a program that transposes what it quantizes
FLOOR_PROGRAMS = 256  # that look for rows below the floor, at most


def quantize(x: Tensor, how: Cast, column_scale: Tensor | None, row_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """As the twin's `quantize`, for x [M, K] contiguous; the factors only with row granularity."""
    data, scale = torch.empty_like(x, dtype=how.fmt.dtype), _new_scale(x, tuple(x.shape), how)
    if how.granularity == ROW:
        _rows(x, 0, data, scale, how, column_scale, row_scale)
    elif how.granularity == TENSOR:
        _tensor(x, data, scale, how)
    else:
        _blocks(x, data, scale, how)
    return data, _as_scale(scale)


def quantize_stack(tensors: list[Tensor], how: Cast) -> tuple[Tensor, Tensor]:
    """Matrices of as many columns, contiguous, each quantized by row into its part of one result."""
    sizes = [x.shape[0] for x in tensors]
    data = tensors[0].new_empty((sum(sizes), tensors[0].shape[1]), dtype=how.fmt.dtype)
    scale = _new_scale(data, tuple(data.shape), how)
    for x, end in zip(tensors, accumulate(sizes), strict=True):
        _rows(x, end - x.shape[0], data, scale, how, None, None)
    return data, _as_scale(scale)


def _new_scale(x: Tensor, shape: tuple[int, ...], how: Cast) -> Tensor:
    """Room for the scales of a matrix of `shape`; Triton knows no E8M0: its bytes."""
    return x.new_empty(how.granularity.scale_shape(shape), dtype=torch.uint8 if how.scale == "e8m0" else torch.float32)


def _as_scale(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def _rows(
    x: Tensor,
    first: int,
    data: Tensor,
    scale: Tensor,
    how: Cast,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
) -> None:
    """Quantize the rows of x into data and scale, from their row `first` on."""
    m, k = x.shape
    block, rows, warps = row_tile(k)
    constants = {"POWER_OF_TWO": how.power_of_two, "BLOCK": block, "num_warps": warps}
    if not how.relative_floor:
        launcher(_row_kernel, (triton.cdiv(m, rows),))(
            x, data, scale, column_scale, row_scale, first, m, k,
            FORMAT_MAX=how.fmt.max, UNROUNDED=False, E8M0=how.scale == "e8m0", ROWS=rows, **constants,
        )  # fmt: skip
        return
    own = torch.empty_like(scale)
    launcher(_row_kernel, (triton.cdiv(m, rows),))(
        x, data, own, column_scale, row_scale, first, m, k,
        FORMAT_MAX=how.fmt.max, UNROUNDED=True, E8M0=False, ROWS=rows, **constants,
    )  # fmt: skip
    share = power_of_two_above(max(64, triton.cdiv(m, FLOOR_PROGRAMS)))
    launcher(_floor_kernel, (triton.cdiv(m, share),))(
        x, data, own, scale, column_scale, row_scale, first, m, k,
        FLOOR=how.relative_floor, ROWS=share, **constants,
    )  # fmt: skip


@triton.jit
def _row_kernel(
    x, data, scale, column_scale, row_scale, first, m, k,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, UNROUNDED: tl.constexpr, E8M0: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    here = (row < m)[:, None] & (col < k)[None, :]
    v = _load(x, column_scale, row_scale, row[:, None], col[None, :], row[:, None] < m, k)
    bits = amax_bits(v, 1)
    s = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
    at = (first + row)[:, None] * k + col[None, :]
    tl.store(data + at, (v * inverse(s)[:, None]).to(data.dtype.element_ty), here)
    if UNROUNDED:  # for the floor, which is of the largest scale before that is rounded
        s = scale_from_amax(bits, FORMAT_MAX, False)
    store_scale(scale + first + row, s, row < m, E8M0)


@triton.jit
def _floor_kernel(
    x, data, own, scale, column_scale, row_scale, first, m, k,
    FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # Reads the rows' own scales from other memory than it writes to: the warps of a program do not wait for each other.
    largest = tl.zeros((1024,), tl.float32)
    for start in range(0, m, 1024):
        at = start + tl.arange(0, 1024)
        s = tl.load(own + first + at, at < m, other=0.0)
        largest = tl.where(s > largest, s, largest)  # NaN is not
    least = tl.max(largest, 0) * FLOOR
    begin = tl.program_id(0).to(tl.int64) * ROWS
    rows = begin + tl.arange(0, ROWS)
    least = _rounded(least, POWER_OF_TWO)
    s = _rounded(tl.load(own + first + rows, rows < m, other=float("inf")), POWER_OF_TWO)
    tl.store(scale + first + rows, tl.where(s < least, least, s), rows < m)
    if tl.min(s, 0) < least:
        col = tl.arange(0, BLOCK)
        for row in range(begin, tl.minimum(begin + ROWS, m)):
            if _rounded(tl.load(own + first + row), POWER_OF_TWO) < least:
                v = _load(x, column_scale, row_scale, row, col, True, k)
                tl.store(data + (first + row) * k + col, (v * tl.div_rn(1.0, least)).to(data.dtype.element_ty), col < k)


@triton.jit
def _rounded(scale, POWER_OF_TWO: tl.constexpr):
    return tl.where(scale == scale, ceil_power_of_two(scale), scale) if POWER_OF_TWO else scale


@triton.jit
def _load(x, column_scale, row_scale, row, col, row_here, k):
    """x times its factors at [row, col], float32; zero outside."""
    v = tl.load(x + row * k + col, row_here & (col < k), other=0.0).to(tl.float32)
    if column_scale is not None:
        v *= tl.load(column_scale + col, col < k, other=0.0, eviction_policy="evict_last")
    if row_scale is not None:
        v *= tl.load(row_scale + row, row_here, other=0.0)
    return v


def _tensor(x: Tensor, data: Tensor, scale: Tensor, how: Cast) -> None:
    bits = x.new_zeros(1, dtype=torch.int32)
    grid = (triton.cdiv(x.numel(), FLAT),)
    launcher(_amax_kernel, grid)(x, bits, x.numel(), BLOCK=FLAT, num_warps=8)
    launcher(_tensor_kernel, grid)(
        x, data, scale, bits, x.numel(),
        FORMAT_MAX=how.fmt.max, POWER_OF_TWO=how.power_of_two, E8M0=how.scale == "e8m0", BLOCK=FLAT, num_warps=8,
    )  # fmt: skip


@triton.jit
def _amax_kernel(x, bits, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < count, other=0.0).to(tl.float32)
    tl.atomic_max(bits, amax_bits(v, 0))


@triton.jit
def _tensor_kernel(
    x, data, scale, bits, count,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = scale_from_amax(tl.load(bits + tl.arange(0, 1)), FORMAT_MAX, POWER_OF_TWO)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < count, other=0.0).to(tl.float32)
    tl.store(data + at, (v * inverse(s)).to(data.dtype.element_ty), at < count)
    store_scale(scale + tl.arange(0, 1), s, tl.program_id(0) + tl.arange(0, 1) == 0, E8M0)


def quantize_scaled(x: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """As the twin's `quantize_scaled`, for x [M, K] contiguous: one pass, and NaN over it if x was not finite."""
    data = torch.empty_like(x, dtype=fmt.dtype)
    bits = x.new_zeros((1, 1), dtype=torch.int32)
    grid = (triton.cdiv(x.numel(), FLAT),)
    launcher(_scaled_kernel, grid)(x, data, scale, bits, x.numel(), FORMAT_MAX=fmt.max, BLOCK=FLAT, num_warps=8)
    launcher(_poison_kernel, (min(grid[0], 132),))(data, bits, x.numel(), BLOCK=FLAT, num_warps=8)
    return data, bits.view(torch.float32)


@triton.jit
def _scaled_kernel(x, data, scale, bits, count, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < count, other=0.0).to(tl.float32)
    tl.atomic_max(bits, amax_bits(v, 0))
    v *= tl.div_rn(1.0, tl.load(scale))
    v = tl.minimum(tl.maximum(v, -FORMAT_MAX), FORMAT_MAX)
    tl.store(data + at, v.to(data.dtype.element_ty), at < count)


@triton.jit
def _poison_kernel(data, bits, count, BLOCK: tl.constexpr):
    if tl.load(bits) >= INFINITY_BITS:
        nan = tl.full((BLOCK,), NAN_BITS, tl.int32).to(tl.float32, bitcast=True).to(data.dtype.element_ty)
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(data + at, nan, at < count)


def _blocks(x: Tensor, data: Tensor, scale: Tensor, how: Cast) -> None:
    m, k = x.shape
    rows, cols = how.granularity.rows or 1, how.granularity.cols or 1
    tile_rows, tile_cols = power_of_two_above(rows), power_of_two_above(cols)
    blocks = max(1, 8192 // (tile_rows * tile_cols))  # of one program, next to each other
    grid = (triton.cdiv(scale.numel(), blocks),)
    launcher(_block_kernel, grid)(
        x, data, scale, m, k, scale.shape[1], scale.numel(), rows, cols,
        FORMAT_MAX=how.fmt.max, POWER_OF_TWO=how.power_of_two, E8M0=how.scale == "e8m0",
        BLOCKS=blocks, TILE_ROWS=tile_rows, TILE_COLS=tile_cols, num_warps=8,
    )  # fmt: skip


@triton.jit
def _block_kernel(
    x, data, scale, m, k, blocks_across, count, block_rows, block_cols,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    r, c = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLS)
    row = ((block // blocks_across) * block_rows)[:, None, None] + r[None, :, None]
    col = ((block % blocks_across) * block_cols)[:, None, None] + c[None, None, :]
    here = (row < m) & (col < k) & (r < block_rows)[None, :, None] & (c < block_cols)[None, None, :]
    at = row * k + col
    v = tl.load(x + at, here, other=0.0).to(tl.float32)
    s = scale_from_amax(amax_bits(tl.reshape(v, (BLOCKS, TILE_ROWS * TILE_COLS)), 1), FORMAT_MAX, POWER_OF_TWO)
    tl.store(data + at, (v * inverse(s)[:, None, None]).to(data.dtype.element_ty), here)
    store_scale(scale + block, s, block < count, E8M0)


def quantize_transposed(x: Tensor, how: Cast) -> tuple[Tensor, Tensor]:
    """The transpose of x [M, K] contiguous, quantized in groups along M: data [K, M], scale [K, M / group]."""
    m, k = x.shape
    size = how.granularity.cols
    assert size is not None
    tile = power_of_two_above(size)
    cols = max(1, TRANSPOSED_TILE // tile)
    data = x.new_empty((k, m), dtype=how.fmt.dtype)
    scale = _new_scale(x, (k, m), how)
    launcher(_group_transposed_kernel, (triton.cdiv(k, cols), scale.shape[1]))(
        x, data, scale, m, k, size,
        FORMAT_MAX=how.fmt.max, POWER_OF_TWO=how.power_of_two, E8M0=how.scale == "e8m0",
        TILE=tile, COLS=cols, num_warps=TRANSPOSED_WARPS,
    )  # fmt: skip
    return data, _as_scale(scale)


@triton.jit
def _group_transposed_kernel(
    x, data, scale, m, k, size,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64) * size + r
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    here = ((row < m) & (r < size))[:, None] & (col < k)[None, :]
    v = tl.load(x + row[:, None] * k + col[None, :], here, other=0.0).to(tl.float32)
    s = scale_from_amax(amax_bits(v, 0), FORMAT_MAX, POWER_OF_TWO)
    q = (v * inverse(s)[None, :]).to(data.dtype.element_ty)
    tl.store(data + col[:, None] * m + row[None, :], tl.trans(q), tl.trans(here))
    store_scale(scale + col * tl.num_programs(1) + tl.program_id(1), s, col < k, E8M0)
