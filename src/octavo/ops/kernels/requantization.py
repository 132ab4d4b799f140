"""Requantization as a Triton kernel: one tile a program, for the same reason as in the byte transpose.

The size of the tile and the number of warps are the fastest of those measured on an H100.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.formats import Format
from octavo.numerics.qtensor import ROW, Granularity
from octavo.ops.kernels.device_math import add, inverse, to_data
from octavo.ops.launching import allocate, cdiv
from octavo.ops.registration import launcher

BLOCK_M, BLOCK_K = 64, 64
Norm = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # mean, rstd, weight and bias of a norm
_WHOLE = 1 << 30  # a scale of the whole tensor is one of a square block larger than any tensor


def requantize(tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, transposed: bool) -> Tensor:
    """Same as `requantize_reference`, for contiguous matrices, by row, by tensor or by square blocks of whole tiles."""
    rows, columns = sum(x.shape[0] for x in tensors), tensors[0].shape[1]
    result = allocate(scale, (columns, rows) if transposed else (rows, columns), fmt.dtype)
    side, first_row = 0 if granularity == ROW else granularity.rows or _WHOLE, 0
    for x in tensors:
        _launch(x, (None, None, None, None), scale, result, first_row, side, transposed=transposed)
        first_row += x.shape[0]
    return result


def requantize_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: Format
) -> Tensor:
    """Same as `requantize_norm_reference`, for a contiguous x."""
    result = allocate(scale, (x.shape[1], x.shape[0]), fmt.dtype)
    _launch(x, (mean, rstd, weight, bias), scale, result, 0, 0, transposed=True)
    return result


def _launch(
    x: Tensor, norm: Norm, scale: Tensor, result: Tensor, first_row: int, side: int, *, transposed: bool
) -> None:
    m, k = x.shape
    launcher(_requantize_kernel, (cdiv(k, BLOCK_K), cdiv(m, BLOCK_M)))(
        x, *norm, scale, result, m, k, first_row, result.shape[1], scale.shape[1],
        SIDE=side, TRANSPOSED=transposed, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, num_warps=2,
    )  # fmt: skip


@triton.jit
def _requantize_kernel(
    x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, result_ptr, M, K, first_row, total_rows, stride_scale,
    SIDE: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
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
        block = (tl.program_id(1) * BLOCK_M // SIDE) * stride_scale + tl.program_id(0) * BLOCK_K // SIDE
        scale = tl.load(scale_ptr + block + tl.zeros_like(offs_m))
    q = to_data(x * inverse(scale)[:, None], result_ptr.dtype.element_ty)
    if TRANSPOSED:
        tl.store(result_ptr + offs_k[:, None] * total_rows + (first_row + offs_m)[None, :], tl.trans(q), tl.trans(mask))
    else:
        tl.store(result_ptr + (first_row + offs_m)[:, None] * K + offs_k[None, :], q, mask)
