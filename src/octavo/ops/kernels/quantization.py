"""Quantization as Triton kernels, with the bytes of the reference.

    granularity     passes over x                                           bytes read and written an element (BF16)
    row             one: a program holds whole rows in registers            2 and 1
    group, block    one: a program holds whole blocks in registers          2 and 1
    given scale     one: it also computes the amax                          2 and 1
    tensor          two: the first computes the amax                        4 and 1

A relative floor depends on the largest scale of all rows. So a first launch casts the rows without the floor. Each
program of a second launch then reads all scales, and casts those of its rows again whose scales are below the floor.

One launch serves up to three matrices of a stack. The tiles of the second follow those of the first, and a program
finds the matrix of its tile.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.formats import Format
from octavo.numerics.qtensor import ROW, TENSOR, Cast, Granularity
from octavo.ops.kernels.device_math import (
    INFINITY_BITS,
    NAN_BITS,
    add,
    amax_bits,
    ceil_power_of_two,
    grid_shift,
    inverse,
    mantissa,
    scale_from_amax,
    store_scale,
    to_data,
    wait_for_inputs,
    with_sign,
)
from octavo.ops.launching import allocate, cdiv, power_of_two_above, row_tile
from octavo.ops.registration import launcher

FLOOR_PROGRAMS = 256  # the most programs of the second launch


def quantize(
    x: Tensor, cast: Cast, column_scale: Tensor | None, mantissa_of: Tensor | None, seed: Tensor | None, matrices: int
) -> tuple[Tensor, Tensor]:
    """Same as `quantize_reference`, for a contiguous x [M, K]. Factors, and a stack of matrices, with rows only."""
    data, scale = allocate(x, x.shape, cast.fmt.dtype), _new_scale(x, tuple(x.shape), cast)
    if cast.by_row:
        _rows([x], [x.shape[0]], 0, data, scale, cast, column_scale, mantissa_of, seed, matrices=matrices)
    elif cast.granularity == TENSOR:
        quantize_tensor(x, data, scale, cast, seed)
    else:
        quantize_blocks(x, data, scale, cast, seed)
    return data, _as_scale(scale)


def quantize_transposed(x: Tensor, cast: Cast, seed: Tensor | None, place: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize the transpose of x [M, K]: data [K, M]. By row and in groups along M, the pass that quantizes x also
    transposes it: long columns take two launches, of which the first computes the amax of each. `place` gives columns
    their rows."""
    m, k = len(x if place is None else place), x.shape[1]
    whole = cast.by_row and not cast.relative_floor
    if not whole and (cast.granularity.rows != 1 or cast.granularity.cols is None):
        rows = x if place is None else F.pad(x, (0, 0, 0, 1))[place]
        return quantize(rows.t().contiguous(), cast, None, None, seed, 1)
    x, data, scale = x.contiguous(), allocate(x, (k, m), cast.fmt.dtype), _new_scale(x, (k, m), cast)
    bits, group_size = None, cast.granularity.cols or m
    block_m, warps = power_of_two_above(group_size), TRANSPOSED_WARPS
    block_k = max(1, TRANSPOSED_BLOCK // block_m)
    if cast.by_row and m > LONGEST_COLUMN:
        bits = allocate(x, (k,), torch.int32, zero=True)
        launcher(_column_amax_kernel, (cdiv(k, 512), cdiv(m, STRIP)))(
            x, bits, place, m, k, STRIP=STRIP, BLOCK_M=16, BLOCK_K=512, num_warps=4
        )
        group_size, block_m, block_k, warps = 128, 128, 64, 4
    launcher(_group_transposed_kernel, (cdiv(k, block_k), cdiv(m, group_size)))(
        x, data, scale, bits, seed, place, m, k, group_size,
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, E8M0=cast.scale == "e8m0",
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    return data, _as_scale(scale)


def quantize_stack(tensors: list[Tensor], cast: Cast, stored: bool) -> tuple[Tensor | None, Tensor]:
    """Quantize contiguous matrices with the same number of columns by row, each into its part of one result. Without
    `stored` only their scales, float32, before a relative floor and a power of two."""
    first, rows = tensors[0], [x.shape[0] for x in tensors]
    shape = sum(rows), first.shape[1]
    data = allocate(first, shape, cast.fmt.dtype) if stored else None
    scale = _new_scale(first, shape, cast) if stored else allocate(first, (shape[0], 1), torch.float32)
    for part in _parts(tensors, rows):
        _rows(*part, data, scale, cast, None, None, None)
    return data, _as_scale(scale)


MISSING = {1: (None, None), 2: (None,), 3: ()}  # in place of the other matrices, by the number of those that are there


def _parts(tensors: list[Tensor], rows: list[int]) -> list[tuple[list[Tensor], list[int], int]]:
    """The matrices that one launch serves, up to three of one dtype, their rows, and the rows before them."""
    n = 3 if len({x.dtype for x in tensors}) == 1 else 1
    return [(tensors[i : i + n], rows[i : i + n], sum(rows[:i])) for i in range(0, len(rows), n)]


@triton.jit
def _find(tile, M, second_M, third_M, first_row, BLOCK_M: tl.constexpr):
    """The matrix that has a tile of rows: its number, rows and first row in the stack. And the tile's number in it."""
    matrix = tile * 0
    if second_M is not None:
        matrix, M, first_row, tile = _after(tile, matrix, M, second_M, first_row, BLOCK_M)
    if third_M is not None:
        matrix, M, first_row, tile = _after(tile, matrix, M, third_M, first_row, BLOCK_M)
    return matrix, M, first_row, tile


@triton.jit
def _after(tile, matrix, M, next_M, first_row, BLOCK_M: tl.constexpr):
    tiles = tl.cdiv(M, BLOCK_M)
    behind = tile >= tiles
    first_row, M = tl.where(behind, first_row + M, first_row), tl.where(behind, next_M, M)
    return tl.where(behind, matrix + 1, matrix), M, first_row, tl.where(behind, tile - tiles, tile)


@triton.jit
def _choose(matrix, x_ptr, second_ptr, third_ptr):
    """A function of its own: PyTorch finds what a kernel writes to, and takes all results of a function for one."""
    if second_ptr is not None:
        x_ptr = tl.where(matrix == 1, second_ptr, x_ptr)
    if third_ptr is not None:
        x_ptr = tl.where(matrix == 2, third_ptr, x_ptr)
    return x_ptr


def _new_scale(x: Tensor, shape: tuple[int, ...], cast: Cast) -> Tensor:
    """Empty scales of a matrix of `shape`. Triton does not have E8M0: as bytes."""
    return allocate(x, cast.granularity.scale_shape(shape), torch.uint8 if cast.scale == "e8m0" else torch.float32)


def _as_scale(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def _rows(
    tensors: list[Tensor], rows: list[int], first_row: int, data: Tensor | None, scale: Tensor, cast: Cast,
    *optional: Tensor | None, matrices: int = 1,
) -> None:  # fmt: skip
    """Quantize a part of the stack into `data` and `scale`; without `data` its scales are those of `row_scales`.

    `optional` are the column scale, the numbers whose mantissas scale the rows, and the seed.
    """
    floored, missing, k = data is not None and cast.relative_floor > 0, MISSING[len(rows)], tensors[0].shape[1]
    unrounded = floored or data is None
    unfloored = allocate(scale, scale.shape) if floored else scale
    block_k, block_m, warps = row_tile(k)
    few = 2 if block_k <= 1024 else 4 if block_k <= 8192 else warps  # the fastest on an H200
    launcher(_row_kernel, (sum([cdiv(m, block_m) for m in rows]),))(
        *tensors, *missing, data, unfloored, *optional, *rows, *missing, first_row, k,
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, UNROUNDED=unrounded,
        E8M0=cast.scale == "e8m0" and not unrounded, BLOCK_K=block_k, BLOCK_M=block_m, num_warps=few,
    )  # fmt: skip
    if floored:
        rows_per_program = power_of_two_above(max(64, cdiv(max(rows), FLOOR_PROGRAMS)))
        rows = [m // matrices for m in rows]
        launcher(_floor_kernel, (sum([cdiv(m, rows_per_program) for m in rows]), matrices))(
            *tensors, *missing, data, unfloored, scale, *optional, *rows, *missing, first_row, k,
            RELATIVE_FLOOR=cast.relative_floor, POWER_OF_TWO=cast.power_of_two,
            BLOCK_K=block_k, BLOCK_M=rows_per_program, num_warps=warps,
        )  # fmt: skip


@triton.jit
def _row_kernel(
    x_ptr, second_ptr, third_ptr, data_ptr, scale_ptr, column_scale_ptr, mantissa_of_ptr, seed_ptr,
    M, second_M, third_M, first_row, K,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, UNROUNDED: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    matrix, M, first_row, tile = _find(tl.program_id(0), M, second_M, third_M, first_row, BLOCK_M)
    x_ptr = _choose(matrix, x_ptr, second_ptr, third_ptr)
    offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x = _load(x_ptr, column_scale_ptr, mantissa_of_ptr, offs_m[:, None], offs_k[None, :], offs_m[:, None] < M, K)
    bits = amax_bits(x, 1)
    scale = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
    if data_ptr is not None:
        offs = (first_row + offs_m)[:, None] * K + offs_k[None, :]
        q = round_to_data(x * inverse(scale)[:, None], data_ptr.dtype.element_ty, offs, seed_ptr)
        tl.store(data_ptr + offs, q, mask)
    if UNROUNDED:  # the floor is relative to the largest scale before rounding to a power of two
        scale = scale_from_amax(bits, FORMAT_MAX, False)
    store_scale(scale_ptr + first_row + offs_m, scale, offs_m < M, E8M0)


@triton.jit
def _floor_kernel(
    x_ptr, second_ptr, third_ptr, data_ptr, unfloored_ptr, scale_ptr, column_scale_ptr, mantissa_of_ptr, seed_ptr,
    M, second_M, third_M, first_row, K,
    RELATIVE_FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # The scales are read from `unfloored_ptr` and written to `scale_ptr`: within a program, warps do not wait for each
    # other, so one memory for both would be a race.
    matrix, M, first_row, tile = _find(tl.program_id(0), M, second_M, third_M, first_row, BLOCK_M)
    x_ptr = _choose(matrix, x_ptr, second_ptr, third_ptr)
    first_row += tl.program_id(1).to(tl.int64) * M
    x_ptr += tl.program_id(1).to(tl.int64) * M * K
    largest = tl.zeros((4096,), tl.float32)
    for start in range(0, M, 4096):
        offs = start + tl.arange(0, 4096)
        scale = tl.load(unfloored_ptr + first_row + offs, offs < M, other=0.0)
        largest = tl.where(scale > largest, scale, largest)  # a NaN is skipped
    floor = tl.max(largest, 0) * RELATIVE_FLOOR
    start_m = tile.to(tl.int64) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    floor = _rounded(floor, POWER_OF_TWO)
    scale = _rounded(tl.load(unfloored_ptr + first_row + offs_m, offs_m < M, other=float("inf")), POWER_OF_TWO)
    tl.store(scale_ptr + first_row + offs_m, tl.where(scale < floor, floor, scale), offs_m < M)
    if tl.min(scale, 0) < floor:
        offs_k = tl.arange(0, BLOCK_K)
        for m in range(start_m, tl.minimum(start_m + BLOCK_M, M)):
            if _rounded(tl.load(unfloored_ptr + first_row + m), POWER_OF_TWO) < floor:
                x = _load(x_ptr, column_scale_ptr, mantissa_of_ptr, m, offs_k, True, K)
                offs = (first_row + m) * K + offs_k
                q = round_to_data(x * tl.div_rn(1.0, floor), data_ptr.dtype.element_ty, offs, seed_ptr)
                tl.store(data_ptr + offs, q, offs_k < K)


@triton.jit
def _rounded(scale, POWER_OF_TWO: tl.constexpr):
    return tl.where(scale == scale, ceil_power_of_two(scale), scale) if POWER_OF_TWO else scale


@triton.jit
def _load(x_ptr, column_scale_ptr, mantissa_of_ptr, offs_m, offs_k, mask_m, K):
    """x times its factors at [offs_m, offs_k], float32; zero outside of the matrix."""
    x = tl.load(x_ptr + offs_m * K + offs_k, mask_m & (offs_k < K), other=0.0).to(tl.float32)
    if column_scale_ptr is not None:
        x *= tl.load(column_scale_ptr + offs_k, offs_k < K, other=0.0, eviction_policy="evict_last")
    if mantissa_of_ptr is not None:
        x *= mantissa(tl.load(mantissa_of_ptr + offs_m, mask_m, other=0.0))
    return x


# ---- Quantization in groups along a row and in blocks. A program holds whole blocks in registers.


TRANSPOSED_BLOCK, TRANSPOSED_WARPS = 4096, 2  # elements and warps of a program that also transposes
LONGEST_COLUMN = 512  # that such a program holds beside enough other columns to read whole lines of memory
STRIP = 256  # rows of a program that finds the amax of columns


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


@triton.jit
def _group_transposed_kernel(
    x_ptr, data_ptr, scale_ptr, bits_ptr, seed_ptr, place_ptr, M, K, group_size,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    inner_m = tl.arange(0, BLOCK_M)
    offs_m = tl.program_id(1).to(tl.int64) * group_size + inner_m
    offs_k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_m = (offs_m < M) & (inner_m < group_size)
    x = _load_placed(x_ptr, place_ptr, offs_m, mask_m, offs_k, K)
    mask_scale, place_scale = offs_k < K, offs_k * tl.num_programs(1) + tl.program_id(1)
    if bits_ptr is None:
        bits = amax_bits(x, 0)
    else:  # those of whole columns
        bits = tl.load(bits_ptr + offs_k, offs_k < K, other=0)
        mask_scale, place_scale = mask_scale & (tl.program_id(1) == 0), offs_k
    scale = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
    index = offs_k[None, :] * M + offs_m[:, None]
    q = round_to_data(x * inverse(scale)[None, :], data_ptr.dtype.element_ty, index, seed_ptr)
    mask = mask_m[:, None] & (offs_k < K)[None, :]
    tl.store(data_ptr + offs_k[:, None] * M + offs_m[None, :], tl.trans(q), tl.trans(mask))
    store_scale(scale_ptr + place_scale, scale, mask_scale, E8M0)


@triton.jit
def _load_placed(x_ptr, place_ptr, offs_m, mask_m, offs_k, K):
    """A tile of x as float32, or of its rows at their places; zeros where the place is -1."""
    row, there = offs_m, mask_m
    if place_ptr is not None:
        row = tl.load(place_ptr + offs_m, mask_m, other=-1).to(tl.int64)
        there = row >= 0
    mask = there[:, None] & (offs_k < K)[None, :]
    return tl.load(x_ptr + row[:, None] * K + offs_k[None, :], mask, other=0.0).to(tl.float32)


@triton.jit
def _column_amax_kernel(
    x_ptr, bits_ptr, place_ptr, M, K, STRIP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    offs_k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    largest = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for start in range(0, STRIP, BLOCK_M):
        offs_m = tl.program_id(1).to(tl.int64) * STRIP + start + tl.arange(0, BLOCK_M)
        x = _load_placed(x_ptr, place_ptr, offs_m, offs_m < M, offs_k, K)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(bits_ptr + offs_k, tl.max(largest, 0), offs_k < K)


# ---- Quantization by a scale of the whole tensor: its own, or one known beforehand.


BLOCK = 8192  # elements of a program


def quantize_tensor(x: Tensor, data: Tensor, scale: Tensor, cast: Cast, seed: Tensor | None) -> None:
    bits = allocate(x, (1,), torch.int32, zero=True)
    grid = (cdiv(x.numel(), BLOCK),)
    launcher(_amax_kernel, grid)(x, bits, x.numel(), BLOCK=BLOCK, num_warps=8)
    launcher(_tensor_kernel, grid)(
        x, data, scale, bits, seed, x.numel(),
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, E8M0=cast.scale == "e8m0",
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _amax_kernel(x_ptr, bits_ptr, numel, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < numel, other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr, amax_bits(x, 0))


@triton.jit
def _tensor_kernel(
    x_ptr, data_ptr, scale_ptr, bits_ptr, seed_ptr, numel,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scale = scale_from_amax(tl.load(bits_ptr + tl.arange(0, 1)), FORMAT_MAX, POWER_OF_TWO)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < numel, other=0.0).to(tl.float32)
    tl.store(
        data_ptr + offs, round_to_data(x * inverse(scale), data_ptr.dtype.element_ty, offs, seed_ptr), offs < numel
    )
    store_scale(scale_ptr + tl.arange(0, 1), scale, tl.program_id(0) + tl.arange(0, 1) == 0, E8M0)


def quantize_scaled(x: Tensor, scale: Tensor, fmt: Format, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same as `quantize_scaled_reference`, for a contiguous x [M, K]. A second launch stores NaN if x is not finite."""
    data = allocate(x, x.shape, fmt.dtype)
    bits = allocate(x, (1, 1), torch.int32, zero=True)
    grid = (cdiv(x.numel(), BLOCK),)
    launcher(_scaled_kernel, grid)(
        x, data, scale, bits, seed, x.numel(), FORMAT_MAX=fmt.max, BLOCK=BLOCK, num_warps=8
    )  # fmt: skip
    launcher(_poison_kernel, (min(grid[0], 132),))(data, bits, x.numel(), BLOCK=BLOCK, num_warps=8)
    return data, bits.view(torch.float32)


@triton.jit
def _scaled_kernel(
    x_ptr, data_ptr, scale_ptr, bits_ptr, seed_ptr, numel, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < numel, other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr, amax_bits(x, 0))
    x = tl.minimum(tl.maximum(x * tl.div_rn(1.0, tl.load(scale_ptr)), -FORMAT_MAX), FORMAT_MAX)
    tl.store(data_ptr + offs, round_to_data(x, data_ptr.dtype.element_ty, offs, seed_ptr), offs < numel)


@triton.jit
def _poison_kernel(data_ptr, bits_ptr, numel, BLOCK: tl.constexpr):
    if tl.load(bits_ptr) >= INFINITY_BITS:
        nan = tl.full((BLOCK,), NAN_BITS, tl.int32).to(tl.float32, bitcast=True).to(data_ptr.dtype.element_ty)
        for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
            offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(data_ptr + offs, nan, offs < numel)


# ---- Device functions that round to an eight-bit dtype: to nearest, or stochastically with the bytes of the reference.
#
# The noise n / 2^24 of an element is the hash of `octavo.numerics.scaling`. The result for a magnitude a is
# a + n / 2^24 * spacing, rounded down to a number of the format.
#
# To round down is to add a power of two whose last bit is worth one spacing (`grid_shift`), toward zero, and to
# subtract it again. The noise is added toward zero too. A sum that is rounded toward zero never passes a number of the
# format, so both sums lead to the number that exact sums would lead to.


@triton.jit
def round_to_data(x, dtype: tl.constexpr, index, seed_ptr):
    """float32 `x`, divided by its scale, as numbers of `dtype`, an eight-bit one.

    Rounded to nearest without a seed (None). With one rounded stochastically, for E4M3 and E5M2: `index` (int64) is
    that of each element in the data. The conversion saturates.
    """
    if seed_ptr is not None:
        x = _stochastic(x, _noise(index, seed_ptr), dtype)
    return to_data(x, dtype)


@triton.jit
def _stochastic(x, noise, dtype: tl.constexpr):
    """float32 `x`, rounded to numbers of `dtype` by 2^8 * n (float32)."""
    magnitude = tl.abs(x)
    shift = grid_shift(magnitude, dtype)
    sum_of_both = _fma_toward_zero(noise, shift * 2.0**-55, magnitude)  # the spacing is shift * 2^-23
    return with_sign(_fma_toward_zero(sum_of_both, 1.0, shift) - shift, x)


@triton.jit
def _noise(index, seed_ptr):
    """2^8 * n as float32: the upper 24 bits of the hash of the seed (int64) and each index (int64)."""
    seed = tl.load(seed_ptr)
    seed = _mix(seed.to(tl.uint32) ^ _mix((seed >> 32).to(tl.uint32)))
    return (_mix(index.to(tl.uint32) ^ seed) & 0xFFFFFF00).to(tl.float32)


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _fma_toward_zero(x, y, z):
    """x * y + z, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=tl.float32, is_pure=True, pack=1
    )


# ---- Requantization: one tile a program, for the same reason as in the byte transpose. The size of the tile and the
# number of warps are the fastest of those measured on an H100.


TILE = 64  # rows and columns
_WHOLE = 1 << 30  # a scale of the whole tensor is one of a square block larger than any tensor


def requantize(tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, transposed: bool) -> Tensor:
    """Same as `requantize_reference`, for contiguous matrices: by row or tensor, or one by square blocks of tiles."""
    rows, columns = [x.shape[0] for x in tensors], tensors[0].shape[1]
    total = sum(rows)
    result = allocate(scale, (columns, total) if transposed else (total, columns), fmt.dtype)
    side = 0 if granularity == ROW else granularity.rows or _WHOLE
    for part in _parts(tensors, rows):
        _launch_tiles(*part, None, None, None, None, scale, result, side=side, transposed=transposed)
    return result


def requantize_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: Format
) -> Tensor:
    """Same as `requantize_norm_reference`, for a contiguous x."""
    result = allocate(scale, (x.shape[1], x.shape[0]), fmt.dtype)
    _launch_tiles([x], [x.shape[0]], 0, mean, rstd, weight, bias, scale, result, side=0, transposed=True)
    return result


def _launch_tiles(
    tensors: list[Tensor], rows: list[int], first_row: int, *given: Any, side: int, transposed: bool
) -> None:
    """`given` are the mean, rstd, weight and bias of a norm, the scale and the result."""
    missing, k, (scale, result) = MISSING[len(rows)], tensors[0].shape[1], given[4:]
    launcher(_requantize_kernel, (cdiv(k, TILE), sum([cdiv(m, TILE) for m in rows])))(
        *tensors, *missing, *given, *rows, *missing, first_row, k, result.shape[1], scale.shape[1],
        SIDE=side, TRANSPOSED=transposed, BLOCK_M=TILE, BLOCK_K=TILE, num_warps=2,
    )  # fmt: skip


@triton.jit
def _requantize_kernel(
    x_ptr, second_ptr, third_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, result_ptr,
    M, second_M, third_M, first_row, K, total_rows, stride_scale,
    SIDE: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    matrix, M, first_row, tile = _find(tl.program_id(1), M, second_M, third_M, first_row, BLOCK_M)
    x_ptr = _choose(matrix, x_ptr, second_ptr, third_ptr)
    offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + offs_m, offs_m < M, other=0.0)[:, None]
        x *= tl.load(rstd_ptr + offs_m, offs_m < M, other=0.0)[:, None]
        x *= tl.load(weight_ptr + offs_k, offs_k < K, other=0.0).to(tl.float32)[None, :]
        if bias_ptr is not None:
            x = add(x, tl.load(bias_ptr + offs_k, offs_k < K, other=0.0).to(tl.float32)[None, :])
    if SIDE == 0:  # one scale for each row
        scale = tl.load(scale_ptr + first_row + offs_m, offs_m < M, other=1.0)
    else:  # a tile lies within one square block
        tl.static_assert(SIDE % BLOCK_M == 0 and SIDE % BLOCK_K == 0)
        block = (tile * BLOCK_M // SIDE) * stride_scale + tl.program_id(0) * BLOCK_K // SIDE
        scale = tl.load(scale_ptr + block + tl.zeros_like(offs_m))
    q = to_data(x * inverse(scale)[:, None], result_ptr.dtype.element_ty)
    if TRANSPOSED:
        tl.store(result_ptr + offs_k[:, None] * total_rows + (first_row + offs_m)[None, :], tl.trans(q), tl.trans(mask))
    else:
        tl.store(result_ptr + (first_row + offs_m)[:, None] * K + offs_k[None, :], q, mask)
