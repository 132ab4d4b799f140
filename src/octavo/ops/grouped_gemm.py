"""The grouped GEMM of a mixture of experts: each group of rows has a matrix of its own.

Groups are given by `offsets`, int32 [E] on the device of the operands: group e ends before row offsets[e], and the
first one begins at row 0. Only the reference reads them on the host, so a step does not wait for the device.
"""

from collections.abc import Iterator
from itertools import pairwise, starmap
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.formats import format_of
from octavo.numerics.qtensor import ROW, SCALE_DTYPES, Granularity, QTensor
from octavo.ops import library_gemms as cutlass
from octavo.ops.dispatch import MAX_MEAN_ROWS, STRIP, find_grouped_backend, takes_blocks, takes_cutlass
from octavo.ops.gemm import operands_of, scaled_mm_reference, wide_operand
from octavo.ops.launching import Operands
from octavo.ops.registration import check_tensor, operation

ALIGNMENT = 16  # the GPU's kernel takes N and K in multiples of this


def grouped_mm(
    a: QTensor,
    b: QTensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = False,
    emulate: bool = False,
) -> Tensor:
    """y [M, N]: each row of group e of `a` times matrix e of `b`, transposed. A group may be empty.

    Args:
        a: [M, K], scaled by row, or in groups of 32, 64 or 128 elements along K.
        b: [E, N, K], scaled as a, or in blocks of 128 x 128 if a has groups of 128. The bytes of K are adjacent;
            matrices may lie in any order of strides.
        offsets: int32 [E], where each group of rows ends. Rows from offsets[-1] on have any numbers in y.
        out_dtype: of y. Sums are float32. A Hopper rounds promoted sums of many rows to BF16 first (`takes_cutlass`).
            With groups of 32 or 64 and more than `MAX_MEAN_ROWS` rows for each matrix, a GPU rounds the scaled operands
            and the sums to BF16. N and K must be multiples of 16 there.
        fast_accumulation, emulate: as in `scaled_mm`.
    """
    return _grouped_mm(*operands_of(a, b), offsets, out_dtype, fast_accumulation, emulate)


def grouped_mm_dw(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    scale_b: Tensor | None = None,
    granularity: Granularity = ROW,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = False,
    emulate: bool = False,
) -> Tensor:
    """dw [E, N, K]: the columns of group e of `a` times those of `b`, transposed.

    Args:
        a, b: eight-bit data [N, M] and [K, M]. On a GPU each group has a positive multiple of `COLUMNS` columns:
            columns of zeros fill groups up (`octavo.ops.aligned_groups`). With scales along M it has them everywhere.
        scale_a: float32 [E, N, 1], multiplied into dw. (Scales along M are folded into the data before.) With another
            `granularity`, groups of 32, 64 or 128 columns, [N, groups] of a.
        offsets: int32 [E], where each group of columns ends.
        scale_b: [K, groups] of b, with such a granularity.
    """
    scale_b = scale_a if scale_b is None else scale_b  # with row scales it is not read
    given = a, b, scale_a, scale_b, granularity.name, granularity.name
    return _grouped_mm_dw(*given, offsets, out_dtype, fast_accumulation, emulate)


def grouped_mm_reference(operands: Operands, offsets: Tensor) -> Tensor:
    """float32 y [M, N] from a [M, K] and b [E, N, K]. Rows beyond the last group are zero."""
    a, b, scale_a, scale_b, by_a, by_b = operands
    y = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    for e, rows in enumerate(rows_of_groups(offsets)):
        y[rows] = scaled_mm_reference(Operands(a[rows], b[e], scale_a[rows], scale_b[e], by_a, by_b))
    return y


def grouped_mm_dw_reference(operands: Operands, offsets: Tensor) -> Tensor:
    """float32 dw [E, N, K] from a [N, M] and b [K, M]."""
    a, b, scale_a, scale_b, by, _ = operands
    dw = a.new_zeros((len(offsets), a.shape[0], b.shape[0]), dtype=torch.float32)
    wide_a, wide_b = wide_operand(a, scale_a, by), wide_operand(b, scale_b, by)
    with torch.autocast(a.device.type, enabled=False):  # it would run these products in BF16
        for e, columns in enumerate(rows_of_groups(offsets)):
            dw[e] = wide_a[:, columns] @ wide_b[:, columns].t()  # [N,M_e] @ [K,M_e]^T
    return dw * scale_a if by == ROW else dw


def rows_of_groups(offsets: Tensor) -> Iterator[slice]:
    """The rows of each group, of which `offsets` int32 [E] has the ends. The host waits for the numbers."""
    return starmap(slice, pairwise([0, *offsets.tolist()]))


def _backend(operands: Operands, emulate: bool) -> str:  # chosen within the operation, as in `octavo.ops.gemm`
    a, b, scale_a, scale_b, *granularities = operands
    formats = format_of(a.dtype).name, format_of(b.dtype).name
    e8m0 = scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
    backend = find_grouped_backend(a.device, formats, *granularities, e8m0=e8m0)
    if backend.name == "none" and not emulate:
        raise RuntimeError(
            f"no grouped FP8 GEMM here: {backend.reason}. Leave the experts in BF16, or pass emulate=True to "
            "compute it slowly in float32"
        )
    return "emulated" if backend.name == "none" else backend.name


def _check(operands: Operands, offsets: Tensor, *rest: Any) -> None:
    a, b, _, _, by_a, by_b = operands
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[2]:
        raise ValueError(f"need a [M, K] and b [E, N, K] with the same K, got {list(a.shape)} and {list(b.shape)}")
    if (by_a, by_b) != (ROW, ROW) and not takes_blocks(by_a, by_b):
        raise ValueError(
            "the grouped GEMM takes operands with row scales, equal groups of 32, 64 or 128, or group:128 and "
            f"block:128x128, got {by_a.name} and {by_b.name}: choose the recipe rowwise"
        )
    check_tensor("offsets", offsets, (b.shape[0],), torch.int32)
    _check_aligned(a, *b.shape[1:])


def _check_dw(operands: Operands, offsets: Tensor, *rest: Any) -> None:
    a, b, scale_a, scale_b, by, _ = operands
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"need a [N, M] and b [K, M] with the same M, got {list(a.shape)} and {list(b.shape)}")
    if by == ROW:
        check_tensor("offsets", offsets, (scale_a.shape[0],), torch.int32)
        check_tensor("scale", scale_a, (scale_a.shape[0], a.shape[0], 1), torch.float32)
    elif takes_blocks(by, by):
        check_tensor("scale_a", scale_a, by.scale_shape(tuple(a.shape)), *SCALE_DTYPES)
        check_tensor("scale_b", scale_b, by.scale_shape(tuple(b.shape)), *SCALE_DTYPES)
    else:
        raise ValueError(f"dw takes operands with row scales, or equal groups of 32, 64 or 128, got {by.name}")
    _check_aligned(a, a.shape[0], b.shape[0], a.shape[1])


def _check_aligned(a: Tensor, *sizes: int) -> None:
    if a.is_cuda and any(size % ALIGNMENT for size in sizes):
        raise ValueError(
            f"the grouped GEMM takes sizes in multiples of {ALIGNMENT}, got {list(sizes)}: leave these experts in "
            "BF16, or make them wider"
        )


@operation(check=_check, like=lambda on, _, dtype, *rest: on.a.new_empty((on.a.shape[0], on.b.shape[1]), dtype=dtype))
def _grouped_mm(operands: Operands, offsets: Tensor, out_dtype: torch.dtype, fast: bool, emulate: bool) -> Tensor:
    (a, b, scale_a, scale_b, by_a, _), backend = operands, _backend(operands, emulate)
    if backend == "emulated" or a.numel() == 0:
        return grouped_mm_reference(operands, offsets).to(out_dtype)
    if backend == "cutlass" and not any(size % 32 for size in b.shape[1:]):
        return cutlass.mx_grouped_mm(operands, offsets).to(out_dtype)
    rows, groups = a.shape[0], len(offsets)
    if by_a == ROW and takes_cutlass(a, b, groups, fast):
        return cutlass.grouped_mm(a.contiguous(), scale_a, b, scale_b, offsets, fast=False).to(out_dtype)
    from octavo.ops.kernels import grouped_gemm as kernel

    if by_a not in (ROW, STRIP) and rows > MAX_MEAN_ROWS * groups:
        return kernel.dequantized_mm(operands, offsets, out_dtype)
    return kernel.grouped_mm(operands, offsets, out_dtype, fast)


@operation(
    check=_check_dw,
    like=lambda on, ends, dtype, *_: on.a.new_empty((ends.shape[0], on.a.shape[0], on.b.shape[0]), dtype=dtype),
)
def _grouped_mm_dw(operands: Operands, offsets: Tensor, out_dtype: torch.dtype, fast: bool, emulate: bool) -> Tensor:
    (a, b, scale_a, _, by, _), backend = operands, _backend(operands, emulate)
    if backend == "emulated":
        return grouped_mm_dw_reference(operands, offsets).to(out_dtype)
    if backend == "cutlass":
        return cutlass.mx_grouped_mm(operands, offsets).to(out_dtype)
    if by == ROW and takes_cutlass(a, b, len(offsets), fast):
        return cutlass.grouped_mm_dw(a.contiguous(), scale_a, b.contiguous(), offsets, fast=False).to(out_dtype)
    from octavo.ops.kernels import grouped_gemm as kernel

    if by not in (ROW, STRIP) and a.shape[1] > MAX_MEAN_ROWS * len(offsets):
        return kernel.dequantized_mm(operands, offsets, out_dtype)
    return kernel.grouped_mm_dw(operands, offsets, out_dtype, fast)
