"""Quantization as Triton kernels, with the bytes of the reference.

    granularity     passes over x                                           bytes read and written an element (BF16)
    row             one: a program holds whole rows in registers            2 and 1
    group, block    one: a program holds whole blocks in registers          2 and 1
    given scale     one: it also computes the amax                          2 and 1
    tensor          two: the first computes the amax                        4 and 1

A relative floor depends on the largest scale of all rows. So a first launch casts the rows without the floor. Each
program of a second launch then reads all scales, and casts those of its rows again whose scales are below the floor.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import TENSOR
from octavo.ops.device_math import amax_bits, ceil_power_of_two, inverse, mantissa, scale_from_amax, store_scale
from octavo.ops.inductor import launcher
from octavo.ops.launching import allocate
from octavo.ops.quantization.block_kernel import quantize_blocks, quantize_groups_transposed
from octavo.ops.quantization.device_rounding import round_to_data
from octavo.ops.quantization.tensor_kernel import quantize_tensor
from octavo.ops.triton_support import cdiv, power_of_two_above, row_tile

FLOOR_PROGRAMS = 256  # the most programs of the second launch


def quantize(
    x: Tensor,
    cast: Cast,
    column_scale: Tensor | None,
    mantissa_of: Tensor | None,
    seed: Tensor | None = None,
    matrices: int = 1,
) -> tuple[Tensor, Tensor]:
    """Same as `quantize_reference`, for a contiguous x [M, K]. Factors, and a stack of matrices, with rows only."""
    data, scale = allocate(x, x.shape, cast.fmt.dtype), _new_scale(x, tuple(x.shape), cast)
    if cast.by_row:
        _rows(x, 0, data, scale, cast, column_scale, mantissa_of, seed, matrices=matrices)
    elif cast.granularity == TENSOR:
        quantize_tensor(x, data, scale, cast, seed)
    else:
        quantize_blocks(x, data, scale, cast, seed)
    return data, _as_scale(scale)


def quantize_transposed(x: Tensor, cast: Cast, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize the transpose of x [M, K]: data [K, M]. In groups along M, x is transposed in the same pass."""
    if cast.granularity.rows != 1 or cast.granularity.cols is None:
        return quantize(x.t().contiguous(), cast, None, None, seed)
    m, k = x.shape
    data, scale = allocate(x, (k, m), cast.fmt.dtype), _new_scale(x, (k, m), cast)
    quantize_groups_transposed(x.contiguous(), data, scale, cast, seed)
    return data, _as_scale(scale)


def quantize_stack(tensors: list[Tensor], cast: Cast) -> tuple[Tensor, Tensor]:
    """Quantize contiguous matrices with the same number of columns by row, each into its part of one result."""
    sizes = [x.shape[0] for x in tensors]
    data = allocate(tensors[0], (sum(sizes), tensors[0].shape[1]), cast.fmt.dtype)
    scale = _new_scale(data, tuple(data.shape), cast)
    for x, end in zip(tensors, accumulate(sizes), strict=True):
        _rows(x, end - x.shape[0], data, scale, cast, None, None, None)
    return data, _as_scale(scale)


def row_scales(tensors: list[Tensor], cast: Cast) -> Tensor:
    """Same as `row_scales_reference`, for contiguous matrices with the same number of columns."""
    sizes = [x.shape[0] for x in tensors]
    scale = allocate(tensors[0], (sum(sizes), 1), torch.float32)
    for x, end in zip(tensors, accumulate(sizes), strict=True):
        _launch_rows(x, end - x.shape[0], None, scale, cast, None, None, None, unrounded=True)
    return scale


def _new_scale(x: Tensor, shape: tuple[int, ...], cast: Cast) -> Tensor:
    """Empty scales of a matrix of `shape`. Triton does not have E8M0: as bytes."""
    return allocate(x, cast.granularity.scale_shape(shape), torch.uint8 if cast.scale == "e8m0" else torch.float32)


def _as_scale(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def _rows(
    x: Tensor, first_row: int, data: Tensor, scale: Tensor, cast: Cast, *optional: Tensor | None, matrices: int = 1
) -> None:
    """Quantize the rows of x into `data` and `scale`, starting at their row `first_row`.

    `optional` are the column scale, the numbers whose mantissas scale the rows, and the seed.
    """
    if not cast.relative_floor:
        _launch_rows(x, first_row, data, scale, cast, *optional, unrounded=False)
        return
    unfloored = allocate(scale, scale.shape)
    _launch_rows(x, first_row, data, unfloored, cast, *optional, unrounded=True)
    m, k = x.shape[0] // matrices, x.shape[1]
    block_k, _, warps = row_tile(k)
    rows_per_program = power_of_two_above(max(64, cdiv(m, FLOOR_PROGRAMS)))
    launcher(_floor_kernel, (cdiv(m, rows_per_program), matrices))(
        x, data, unfloored, scale, *optional, first_row, m, k, RELATIVE_FLOOR=cast.relative_floor,
        POWER_OF_TWO=cast.power_of_two, BLOCK_K=block_k, BLOCK_M=rows_per_program, num_warps=warps,
    )  # fmt: skip


def _launch_rows(
    x: Tensor, first_row: int, data: Tensor | None, scale: Tensor, cast: Cast, *optional: Tensor | None, unrounded: bool
) -> None:
    m, k = x.shape
    block_k, block_m, warps = row_tile(k)
    launcher(_row_kernel, (cdiv(m, block_m),))(
        x, data, scale, *optional, first_row, m, k,
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, UNROUNDED=unrounded,
        E8M0=cast.scale == "e8m0" and not unrounded, BLOCK_K=block_k, BLOCK_M=block_m, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _row_kernel(
    x_ptr, data_ptr, scale_ptr, column_scale_ptr, mantissa_of_ptr, seed_ptr, first_row, M, K,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, UNROUNDED: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
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
    x_ptr, data_ptr, unfloored_ptr, scale_ptr, column_scale_ptr, mantissa_of_ptr, seed_ptr, first_row, M, K,
    RELATIVE_FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # The scales are read from `unfloored_ptr` and written to `scale_ptr`: within a program, warps do not wait for each
    # other, so one memory for both would be a race.
    first_row += tl.program_id(1).to(tl.int64) * M
    x_ptr += tl.program_id(1).to(tl.int64) * M * K
    largest = tl.zeros((1024,), tl.float32)
    for start in range(0, M, 1024):
        offs = start + tl.arange(0, 1024)
        scale = tl.load(unfloored_ptr + first_row + offs, offs < M, other=0.0)
        largest = tl.where(scale > largest, scale, largest)  # a NaN is skipped
    floor = tl.max(largest, 0) * RELATIVE_FLOOR
    start_m = tl.program_id(0).to(tl.int64) * BLOCK_M
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
