"""The formulas of the reference as functions of Triton kernels."""

import math

import triton
import triton.language as tl

from octavo.ops.device_math import add

HALF_SQRT = tl.constexpr(2**-0.5)
DENSITY = tl.constexpr((2 * math.pi) ** -0.5)
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _reciprocal(x):
    """1 / x, correctly rounded, for x in [1, 2^120]: the fast path of a division, without its test and branch."""
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


@triton.jit
def _exp2(x):
    """2^x with the bits of torch.exp2 on this device, but 0 where that is subnormal."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x):
    return _reciprocal(add(1.0, _exp2(tl.maximum(x, -80.0) * -LOG2_E)))


@triton.jit
def _gelu(u):
    """The formulas of the reference: gelu(u), the cumulative normal distribution at u, and exp(-u^2 / 2)."""
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
def _load(ptr, offs, mask):
    return tl.load(ptr + offs, mask, other=0.0).to(tl.float32)


@triton.jit
def activation_of_row(u_ptr, m, offs, F, GATED: tl.constexpr, GELU: tl.constexpr):
    """h of row m, at `offs`."""
    mask = offs < F
    if GATED and GELU:  # geglu
        h, _, _ = _gelu(_load(u_ptr + m * 2 * F + F, offs, mask))
        h *= _load(u_ptr + m * 2 * F, offs, mask)
    elif GATED:  # swiglu
        gate = _load(u_ptr + m * 2 * F, offs, mask)
        h = gate * _sigmoid(gate) * _load(u_ptr + m * 2 * F + F, offs, mask)
    else:
        h, _, _ = _gelu(_load(u_ptr + m * F, offs, mask))
    return h


@triton.jit
def gradient_of_row(dh_ptr, u_ptr, m, offs, F, GATED: tl.constexpr, GELU: tl.constexpr):
    """The gradients of both halves of u (or of u, and zeros) and h of row m, or of rows m, at `offs`."""
    mask = offs < F
    dh = _load(dh_ptr + m * F, offs, mask)
    if GATED and GELU:  # geglu
        up, gate = _load(u_ptr + m * 2 * F, offs, mask), _load(u_ptr + m * 2 * F + F, offs, mask)
        h, cumulative, e = _gelu(gate)
        return dh * h, dh * up * add(cumulative, gate * (e * DENSITY)), h * up
    if GATED:  # swiglu
        gate, up = _load(u_ptr + m * 2 * F, offs, mask), _load(u_ptr + m * 2 * F + F, offs, mask)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid * add(1.0, gate * (1.0 - sigmoid))
        return dh * up * slope, dh * silu, silu * up
    u = _load(u_ptr + m * F, offs, mask)
    h, cumulative, e = _gelu(u)
    return dh * add(cumulative, u * (e * DENSITY)), tl.zeros(dh.shape, tl.float32), h
