"""The norms as Triton kernels: a program holds whole rows in registers.

Forward reads x (and the residual) once and writes the sum and one byte an element. Backward lets each program walk
over many rows and keep its part of the gradients of weight and bias in registers until the end; a second launch adds
the parts, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.ops.device_math import add, amax_bits, inverse, row_sum, scale_from_amax
from octavo.ops.inductor import launcher
from octavo.ops.triton_support import row_tile

PROGRAMS_PER_SM = 2  # of the backward pass


def norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, how: Cast, center: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the twin's, for tensors that are contiguous and an eps that is a float32."""
    m, k = x.shape
    total = torch.empty_like(x) if residual is not None else x.new_empty(0)
    data = torch.empty_like(x, dtype=how.fmt.dtype)
    scale, mean, rstd = (x.new_empty((m, 1), dtype=torch.float32) for _ in range(3))
    block, rows, _ = row_tile(k)
    warps = max(4, block // 1024)  # fewer than a plain quantizer wants: there are three sums over the row
    launcher(_norm_kernel, (triton.cdiv(m, rows),))(
        x, residual, weight, bias, total, data, scale, mean, rstd, m, k,
        EPS=eps, FORMAT_MAX=how.fmt.max, CENTER=center, POWER_OF_TWO=how.power_of_two,
        BLOCK=block, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    return total, data, scale, mean, rstd


@triton.jit
def _norm_kernel(
    x, residual, weight, bias, total, data, scale, mean, rstd, m, k,
    EPS: tl.constexpr, FORMAT_MAX: tl.constexpr, CENTER: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    here = (row < m)[:, None] & (col < k)[None, :]
    at = row[:, None] * k + col[None, :]
    v = tl.load(x + at, here, other=0.0).to(tl.float32)
    if residual is not None:
        v = (v + tl.load(residual + at, here, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, v, here)
        v = v.to(tl.float32)
    count = tl.full((ROWS,), k, tl.float64)
    mu = tl.zeros((ROWS,), tl.float32)
    if CENTER:
        mu = (row_sum(v) / count).to(tl.float32)
        v = tl.where(here, v - mu[:, None], 0.0)
    tl.store(mean + row, mu, row < m)
    r = (1.0 / tl.sqrt(row_sum(v * v) / count + EPS)).to(tl.float32)
    tl.store(rstd + row, r, row < m)
    n = v * r[:, None] * tl.load(weight + col, col < k, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        n = add(n, tl.load(bias + col, col < k, other=0.0).to(tl.float32)[None, :])
    s = scale_from_amax(amax_bits(n, 1), FORMAT_MAX, POWER_OF_TWO)
    tl.store(data + at, (n * inverse(s)[:, None]).to(data.dtype.element_ty), here)
    tl.store(scale + row, s, row < m)


def norm_backward(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As the twin's, for tensors that are contiguous."""
    m, k = x.shape
    dx = torch.empty_like(x)
    programs = min(m, PROGRAMS_PER_SM * torch.cuda.get_device_properties(x.device).multi_processor_count)
    parts = x.new_empty((programs, 2 * k if center else k), dtype=torch.float32)  # of dweight, then of dbias
    dweight, dbias = (weight.new_empty(size) for size in (k, k if center else 0))
    block, _, warps = row_tile(k)
    launcher(_backward_kernel, (programs,))(
        dn, x, weight, mean, rstd, residual, dx, parts, m, k,
        CENTER=center, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    launcher(_sum_kernel, (triton.cdiv(parts.shape[1], 32),))(
        parts, dweight, dbias, programs, k, CENTER=center, ROWS=32, COLS=32
    )
    return dx, dweight, dbias


@triton.jit
def _backward_kernel(
    dn, x, weight, mean, rstd, residual, dx, parts, m, k,
    CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    here = col < k
    w = tl.load(weight + col, here, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), m, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * k + col
        g = tl.load(dn + at, here, other=0.0).to(tl.float32)
        r = tl.load(rstd + row)
        unit = tl.load(x + at, here, other=0.0).to(tl.float32)
        if CENTER:
            unit = tl.where(here, unit - tl.load(mean + row), 0.0)
            db += g
        unit *= r
        dw += g * unit
        dunit = g * w
        d = dunit - unit * (tl.sum(unit * dunit, 0) / k)
        if CENTER:
            d -= tl.sum(dunit, 0) / k
        d *= r
        if residual is not None:
            d += tl.load(residual + at, here, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), here)
    part = parts + tl.program_id(0).to(tl.int64) * (2 * k if CENTER else k) + col
    tl.store(part, dw, here)
    if CENTER:
        tl.store(part + k, db, here)


@triton.jit
def _sum_kernel(parts, dweight, dbias, count, k, CENTER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    width = 2 * k if CENTER else k
    row = tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, count, ROWS):
        here = (start + row < count)[:, None] & (col < width)[None, :]
        sums += tl.load(parts + (start + row)[:, None] * width + col[None, :], here, other=0.0)
    total = tl.sum(sums, 0)
    tl.store(dweight + col, total.to(dweight.dtype.element_ty), col < k)
    if CENTER:
        tl.store(dbias + col - k, total.to(dbias.dtype.element_ty), (col >= k) & (col < width))
