"""The activations as Triton kernels.

A row's scale must be known before its first byte. Where a row fits the registers of one program it is made once;
longer rows are made twice, in chunks, the second time from the cache. The numbers of warps are the quickest of those
measured on an H100.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.ops.device_math import add, amax_bits, inverse, scale_from_amax
from octavo.ops.inductor import launcher
from octavo.ops.triton_support import power_of_two_above

LONGEST_CHUNK = 16384  # columns whose gradients one program keeps in its registers; of h, twice as many
HALF_SQRT = tl.constexpr(2**-0.5)
DENSITY = tl.constexpr((2 * math.pi) ** -0.5)
LOG2_E = tl.constexpr(math.log2(math.e))


def activation_quantize(u: Tensor, kind: str, how: Cast) -> tuple[Tensor, Tensor]:
    """As the twin's, for u contiguous."""
    f = u.shape[1] // (2 if kind == "swiglu" else 1)
    data = u.new_empty((u.shape[0], f), dtype=how.fmt.dtype)
    scale = u.new_empty((u.shape[0], 1), dtype=torch.float32)
    chunk = _chunk(f, 2 * LONGEST_CHUNK)
    launcher(_forward_kernel, (u.shape[0],))(
        u, data, scale, f, FORMAT_MAX=how.fmt.max, SWIGLU=kind == "swiglu", POWER_OF_TWO=how.power_of_two,
        CHUNK=chunk, ONCE=chunk >= f, num_warps=max(8, chunk // 1024) if kind == "swiglu" else _warps(f, chunk),
    )  # fmt: skip
    return data, scale


def activation_backward(
    dh: Tensor,
    u: Tensor,
    kind: str,
    how: Cast,
    column_scale: Tensor,
    row_scale: Tensor,
    h_how: Cast,
    h_scale: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the twin's, for tensors that are contiguous."""
    m, f = dh.shape
    data, h_data = torch.empty_like(u, dtype=how.fmt.dtype), torch.empty_like(dh, dtype=h_how.fmt.dtype)
    scale = u.new_empty((m, 1), dtype=torch.float32)
    wide = torch.empty_like(u) if keep else None
    chunk = _chunk(f, LONGEST_CHUNK)
    launcher(_backward_kernel, (m,))(
        dh, u, column_scale, row_scale, h_scale, data, scale, h_data, wide, f,
        FORMAT_MAX=how.fmt.max, SWIGLU=kind == "swiglu", POWER_OF_TWO=how.power_of_two,
        CHUNK=chunk, ONCE=chunk >= f, num_warps=_warps(f, chunk),
    )  # fmt: skip
    return data, scale, h_data, wide if wide is not None else u.new_empty(0)


def _chunk(f: int, longest: int) -> int:
    """Columns at a time of a program over a row of `f` columns."""
    return min(max(power_of_two_above(f), 16), longest)


@triton.jit
def _reciprocal(x):
    """1 / x, correctly rounded, for x in [1, 2^120]: the quick half of the division, without its test and branch."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 guess, error;
        rcp.approx.ftz.f32 guess, $1;
        fma.rn.f32 error, guess, $1, 0fBF800000;
        neg.f32 error, error;
        fma.rn.f32 $0, guess, error, guess;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


def _warps(f: int, chunk: int) -> int:
    alone = chunk // 2 < f <= chunk == LONGEST_CHUNK  # so many registers that no other program has room beside it
    return 32 if alone else max(4, chunk // 1024)


@triton.jit
def _exp2(x):
    """2^x: the bits of torch.exp2 on this device, but 0 where that is subnormal."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x):
    return _reciprocal(add(1.0, _exp2(tl.maximum(x, -80.0) * -LOG2_E)))


@triton.jit
def _gelu(u):
    """As the twin's: gelu(u), the normal distribution up to u, and exp(-u^2 / 2)."""
    magnitude = tl.abs(u)
    z = magnitude * HALF_SQRT
    e = _exp2(z * z * -LOG2_E)
    t = _reciprocal(add(1.0, 0.3275911 * z))
    series = add(t * 1.061405429, -1.453152027)
    series = add(t * series, 1.421413741)
    series = add(t * series, -0.284496736)
    half = 0.5 * (add(t * series, 0.254829592) * t * e)
    return add(tl.maximum(u, 0.0), -magnitude * half), tl.where(u < 0, half, add(1.0, -half)), e


@triton.jit
def _activation(u, row, col, f, SWIGLU: tl.constexpr):
    """h of one row, at `col`."""
    if SWIGLU:
        gate = tl.load(u + row * 2 * f + col, col < f, other=0.0).to(tl.float32)
        up = tl.load(u + row * 2 * f + f + col, col < f, other=0.0).to(tl.float32)
        h = gate * _sigmoid(gate) * up
    else:
        v = tl.load(u + row * f + col, col < f, other=0.0).to(tl.float32)
        h, _, _ = _gelu(v)
    return h


@triton.jit
def _gradient(dh, u, row, col, f, SWIGLU: tl.constexpr):
    """(gradient of u, or of gate; gradient of up; h) of one row, at `col`."""
    d = tl.load(dh + row * f + col, col < f, other=0.0).to(tl.float32)
    if SWIGLU:
        gate = tl.load(u + row * 2 * f + col, col < f, other=0.0).to(tl.float32)
        up = tl.load(u + row * 2 * f + f + col, col < f, other=0.0).to(tl.float32)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid * add(1.0, gate * (1.0 - sigmoid))
        return d * up * slope, d * silu, silu * up
    v = tl.load(u + row * f + col, col < f, other=0.0).to(tl.float32)
    h, cumulative, e = _gelu(v)
    return d * add(cumulative, v * (e * DENSITY)), tl.zeros(d.shape, tl.float32), h


@triton.jit
def _forward_kernel(
    u, data, scale, f,
    FORMAT_MAX: tl.constexpr, SWIGLU: tl.constexpr, POWER_OF_TWO: tl.constexpr, CHUNK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if ONCE:
        col = tl.arange(0, CHUNK)[None, :]
        h = _activation(u, row, col, f, SWIGLU)
        s = scale_from_amax(amax_bits(h, 1), FORMAT_MAX, POWER_OF_TWO)
        tl.store(data + row * f + col, (h * inverse(s)[:, None]).to(data.dtype.element_ty), col < f)
    else:
        bits = tl.zeros((1,), tl.int32)
        for start in range(0, f, CHUNK):
            col = start + tl.arange(0, CHUNK)[None, :]
            bits = tl.maximum(bits, amax_bits(_activation(u, row, col, f, SWIGLU), 1))
        s = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
        for start in range(0, f, CHUNK):
            col = start + tl.arange(0, CHUNK)[None, :]
            h = _activation(u, row, col, f, SWIGLU)
            tl.store(data + row * f + col, (h * inverse(s)[:, None]).to(data.dtype.element_ty), col < f)
    tl.store(scale + row + tl.arange(0, 1), s)


@triton.jit
def _backward_kernel(
    dh, u, column_scale, row_scale, h_scale, data, scale, h_data, wide, f,
    FORMAT_MAX: tl.constexpr, SWIGLU: tl.constexpr, POWER_OF_TWO: tl.constexpr, CHUNK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inv_h = inverse(tl.load(h_scale + row + tl.arange(0, 1)))[:, None]
    if ONCE:
        col = tl.arange(0, CHUNK)[None, :]
        d0, d1, h = _gradient(dh, u, row, col, f, SWIGLU)
        _store_h(h * inv_h, h_data, row, col, f)
        d0, d1, bits = _factors(d0, d1, column_scale, row_scale, wide, row, col, f, SWIGLU)
        s = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
        _store_gradient(d0, d1, inverse(s)[:, None], data, row, col, f, SWIGLU)
    else:
        bits = tl.zeros((1,), tl.int32)
        for start in range(0, f, CHUNK):
            col = start + tl.arange(0, CHUNK)[None, :]
            d0, d1, h = _gradient(dh, u, row, col, f, SWIGLU)
            _store_h(h * inv_h, h_data, row, col, f)
            d0, d1, here = _factors(d0, d1, column_scale, row_scale, wide, row, col, f, SWIGLU)
            bits = tl.maximum(bits, here)
        s = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
        for start in range(0, f, CHUNK):
            col = start + tl.arange(0, CHUNK)[None, :]
            d0, d1, h = _gradient(dh, u, row, col, f, SWIGLU)
            d0, d1, here = _factors(d0, d1, column_scale, row_scale, None, row, col, f, SWIGLU)
            _store_gradient(d0, d1, inverse(s)[:, None], data, row, col, f, SWIGLU)
    tl.store(scale + row + tl.arange(0, 1), s)


@triton.jit
def _store_h(scaled, h_data, row, col, f):
    tl.store(h_data + row * f + col, scaled.to(h_data.dtype.element_ty), col < f)


@triton.jit
def _factors(d0, d1, column_scale, row_scale, wide, row, col, f, SWIGLU: tl.constexpr):
    """The gradients times their factors, and the bits of their amax; before that, kept in `wide` where it is given."""
    at = row * f * (2 if SWIGLU else 1) + col
    if wide is not None:
        tl.store(wide + at, d0.to(wide.dtype.element_ty), col < f)
        if SWIGLU:
            tl.store(wide + at + f, d1.to(wide.dtype.element_ty), col < f)
    factor = tl.load(row_scale + row)
    d0 = d0 * tl.load(column_scale + col, col < f, other=0.0, eviction_policy="evict_last") * factor
    bits = amax_bits(d0, 1)
    if SWIGLU:
        d1 = d1 * tl.load(column_scale + f + col, col < f, other=0.0, eviction_policy="evict_last") * factor
        bits = tl.maximum(bits, amax_bits(d1, 1))
    return d0, d1, bits


@triton.jit
def _store_gradient(d0, d1, inv, data, row, col, f, SWIGLU: tl.constexpr):
    at = row * f * (2 if SWIGLU else 1) + col
    tl.store(data + at, (d0 * inv).to(data.dtype.element_ty), col < f)
    if SWIGLU:
        tl.store(data + at + f, (d1 * inv).to(data.dtype.element_ty), col < f)
