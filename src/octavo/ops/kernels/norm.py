"""The norms as Triton kernels: a program holds whole rows in registers.

Forward reads x (and the residual) once, and writes the sum and one byte an element. In backward each program loops over
many rows, and adds up its part of the gradients of weight and bias in registers. A second launch adds the parts.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.qtensor import Cast
from octavo.ops.kernels.device_math import (
    add,
    amax_bits,
    column,
    inverse,
    row_sum,
    scale_from_amax,
    to_data,
    wait_for_inputs,
)
from octavo.ops.launching import allocate, cdiv, multiprocessors, row_tile
from octavo.ops.registration import launcher

WARPS_PER_SM = 32  # of the backward pass, in programs of 4 to 16


def norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cast: Cast,
    center: bool,
    statistics: bool,
) -> tuple[Any, Any, Any, Any, Any]:
    """Same as `norm_quantize_reference`, for contiguous tensors.

    The sum is None without a residual; mean and rstd are None without `statistics`.
    """
    m, k = x.shape
    total = None if residual is None else allocate(x, x.shape)
    data = allocate(x, x.shape, cast.fmt.dtype)
    scale = allocate(x, (m, 1), torch.float32)
    mean, rstd = (allocate(x, (m, 1), torch.float32) if statistics else None for _ in range(2))
    block_k, block_m, _ = row_tile(k)
    warps = max(4, block_k // 1024)  # fewer than for quantization alone: there are three sums over the row
    launcher(_norm_kernel, (cdiv(m, block_m),))(
        x, residual, weight, bias, total, data, scale, mean, rstd, m, k,
        EPS=float(np.float32(eps)), FORMAT_MAX=cast.fmt.max, CENTER=center, POWER_OF_TWO=cast.power_of_two,
        BLOCK_K=block_k, BLOCK_M=block_m, num_warps=warps,
    )  # fmt: skip
    return total, data, scale, mean, rstd


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, total_ptr, data_ptr, scale_ptr, mean_ptr, rstd_ptr, M, K,
    EPS: tl.constexpr, FORMAT_MAX: tl.constexpr, CENTER: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    offs = offs_m[:, None] * K + offs_k[None, :]
    x = tl.load(x_ptr + offs, mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x = (x + tl.load(residual_ptr + offs, mask, other=0.0).to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offs, x, mask)
        x = x.to(tl.float32)
    count = tl.full((BLOCK_M,), K, tl.float64)
    mean = tl.zeros((BLOCK_M,), tl.float32)
    if CENTER:
        mean = (row_sum(x) / count).to(tl.float32)
        x = tl.where(mask, x - column(mean), 0.0)
    if mean_ptr is not None:
        tl.store(mean_ptr + offs_m, mean, offs_m < M)
    rstd = (1.0 / tl.sqrt(row_sum(x * x) / count + EPS)).to(tl.float32)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + offs_m, rstd, offs_m < M)
    normed = x * column(rstd) * tl.load(weight_ptr + offs_k, offs_k < K, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        normed = add(normed, tl.load(bias_ptr + offs_k, offs_k < K, other=0.0).to(tl.float32)[None, :])
    scale = scale_from_amax(amax_bits(normed, 1), FORMAT_MAX, POWER_OF_TWO)
    tl.store(data_ptr + offs, to_data(normed * column(inverse(scale)), data_ptr.dtype.element_ty), mask)
    tl.store(scale_ptr + offs_m, scale, offs_m < M)


def norm_backward(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `norm_backward_reference`, for contiguous tensors."""
    m, k = x.shape
    dx = allocate(x, x.shape)
    block_k = row_tile(k)[0]
    warps = min(max(block_k // 256, 4), 16)
    programs = min(m, WARPS_PER_SM // warps * multiprocessors(x.device))
    partials = allocate(x, (programs, 2 * k if center else k), torch.float32)  # of dweight, then of dbias
    dweight, dbias = (allocate(x, (size,), weight.dtype) for size in (k, k if center else 0))
    launcher(_backward_kernel, (programs,))(
        dn, x, weight, mean, rstd, residual, dx, partials, m, k, CENTER=center, BLOCK_K=block_k, num_warps=warps
    )
    sum_columns(partials, dweight, dbias)
    return dx, dweight, dbias


@triton.jit
def _backward_kernel(
    dn_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, residual_ptr, dx_ptr, partials_ptr, M, K,
    CENTER: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_k = tl.arange(0, BLOCK_K)
    mask = offs_k < K
    weight = tl.load(weight_ptr + offs_k, mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_K,), tl.float32)
    dbias = tl.zeros((BLOCK_K,), tl.float32)
    for m in range(tl.program_id(0), M, tl.num_programs(0)):
        offs = tl.cast(m, tl.int64) * K + offs_k
        dn = tl.load(dn_ptr + offs, mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + m)
        x_hat = tl.load(x_ptr + offs, mask, other=0.0).to(tl.float32)
        if CENTER:
            x_hat = tl.where(mask, x_hat - tl.load(mean_ptr + m), 0.0)
            dbias += dn
        x_hat *= rstd
        dweight += dn * x_hat
        dx_hat = dn * weight
        dx = dx_hat - x_hat * (tl.sum(x_hat * dx_hat, 0) / K)
        if CENTER:
            dx -= tl.sum(dx_hat, 0) / K
        dx *= rstd
        if residual_ptr is not None:
            dx += tl.load(residual_ptr + offs, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask)
    partial_ptr = partials_ptr + tl.program_id(0).to(tl.int64) * (2 * K if CENTER else K) + offs_k
    tl.store(partial_ptr, dweight, mask)
    if CENTER:
        tl.store(partial_ptr + K, dbias, mask)


# ---- Sums of columns as a Triton kernel. It adds the partial sums that programs of another kernel stored.


BLOCK = 32


def sum_columns(partials: Tensor, sums: Tensor, others: Tensor | None = None) -> None:
    """Write the sums of the columns of `partials` [P, N], float32 and contiguous, always added in the same order, into
    `sums` [N_1] and `others` [N - N_1], of any float dtype."""
    p, n = partials.shape
    launcher(_sum_kernel, (cdiv(n, BLOCK),))(partials, sums, others, p, n, sums.shape[0], BLOCK_M=BLOCK, BLOCK_N=BLOCK)


@triton.jit
def _sum_kernel(partials_ptr, sums_ptr, others_ptr, M, N, SPLIT, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        mask = (start + offs_m < M)[:, None] & (offs_n < N)[None, :]
        acc += tl.load(partials_ptr + (start + offs_m)[:, None] * N + offs_n[None, :], mask, other=0.0)
    total = tl.sum(acc, 0)
    tl.store(sums_ptr + offs_n, total.to(sums_ptr.dtype.element_ty), offs_n < SPLIT)
    if others_ptr is not None:
        mask = (offs_n >= SPLIT) & (offs_n < N)
        tl.store(others_ptr + offs_n - SPLIT, total.to(others_ptr.dtype.element_ty), mask)
