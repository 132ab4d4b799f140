"""The activations as Triton kernels.

The scale of a row must be known before its first byte is written. A row that fits the registers of one program is
computed once. A longer row is computed twice, block by block, the second time from the cache. The numbers of warps are
the fastest of those measured on an H100, and for gradients on an H200; those of GEGLU's were chosen by its registers.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.qtensor import Cast
from octavo.ops.kernels.device_math import (
    add,
    amax_bits,
    inverse,
    magnitude_bits,
    mantissa,
    scale_from_amax,
    to_data,
    wait_for_inputs,
)
from octavo.ops.kernels.norm import sum_columns
from octavo.ops.kernels.permutation import nonzero
from octavo.ops.launching import Factors, allocate, cdiv, power_of_two_above
from octavo.ops.registration import launcher

MAX_BLOCK_F = 16384  # columns of gradients that fit the registers of a program; of h, twice as many fit
SUM_BLOCK_M, SUM_BLOCK_F = 32, 128  # the tile of the gradients that are added up for a bias
PARTIAL_SUMS = 64  # of each column


def activation_quantize(
    u: Tensor, kind: str, scale: Tensor | None, stored: bool, cast: Cast
) -> tuple[Tensor | None, Tensor | None]:
    """Same as `activation_quantize_reference`, for contiguous tensors."""
    m, f, given = u.shape[0], u.shape[1] // (1 if kind == "gelu" else 2), scale is not None
    data = allocate(u, (m, f), cast.fmt.dtype) if stored else None
    scale = allocate(u, (m, 1), torch.float32) if scale is None else scale
    block_f = _block_f(f, 2 * MAX_BLOCK_F)
    few = kind == "gelu" or block_f <= 1024  # with 4 warps a thread loads 16 bytes of each half of such a row
    warps = _warps(f, block_f) if few else max(8, block_f // 1024)
    launcher(_forward_kernel, (m,))(
        u, data, scale, f, FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, GIVEN=given, **_formula(kind),
        BLOCK_F=block_f, ONE_BLOCK=block_f >= f, num_warps=warps,
    )  # fmt: skip
    return data, None if given else scale


def activation_backward(
    dh: Tensor, u: Tensor, kind: str, cast: Cast, factors: Factors, h_cast: Cast, h_scale: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Same as `activation_backward_reference`, for contiguous tensors. It adds the sums in another order."""
    m, f = dh.shape
    data, h_data = allocate(u, u.shape, cast.fmt.dtype), allocate(dh, dh.shape, h_cast.fmt.dtype)
    scale = allocate(u, (m, 1), torch.float32)
    dbias = allocate(u, (u.shape[1] if biased else 0,), torch.float32)
    dweight = allocate(u, (0,) if factors.row is None else factors.row.shape, torch.float32)
    block_f = _block_f(f, MAX_BLOCK_F)
    warps = _warps(f, block_f) if kind == "gelu" else min(32, max(8 if kind == "geglu" else 4, block_f // 512))
    launcher(_backward_kernel, (m,))(
        dh, u, *factors, h_scale, data, scale, h_data, dweight, f,
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, **_formula(kind),
        BLOCK_F=block_f, ONE_BLOCK=block_f >= f, num_warps=warps,
    )  # fmt: skip
    if biased:
        # The kernel above could add up the rows of a program itself. But the sums of a row of 5,120 would take so many
        # registers that only one program, in place of three, fits a multiprocessor.
        partials = allocate(u, (min(PARTIAL_SUMS, cdiv(m, SUM_BLOCK_M)), u.shape[1]), torch.float32)
        launcher(_sum_kernel, (cdiv(f, SUM_BLOCK_F), partials.shape[0]))(
            dh, u, partials, m, f, **_formula(kind), BLOCK_M=SUM_BLOCK_M, BLOCK_F=SUM_BLOCK_F, num_warps=8
        )
        sum_columns(partials, dbias)
    return data, scale, h_data, dbias, dweight


def _formula(kind: str) -> dict[str, bool]:
    return {"GATED": kind != "gelu", "GELU": kind != "swiglu"}


def _block_f(f: int, longest: int) -> int:
    return min(max(power_of_two_above(f), 16), longest)


def _warps(f: int, block_f: int) -> int:
    alone = block_f // 2 < f <= block_f == MAX_BLOCK_F  # by its registers, one program fits a multiprocessor
    return 32 if alone else max(4, block_f // 1024)


@triton.jit
def _forward_kernel(
    u_ptr, data_ptr, scale_ptr, F,
    FORMAT_MAX: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, POWER_OF_TWO: tl.constexpr, GIVEN: tl.constexpr,
    BLOCK_F: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    # Without `data_ptr` the scales are computed alone; with GIVEN they are read.
    m = tl.program_id(0).to(tl.int64)
    if GIVEN:
        scale = tl.load(scale_ptr + m + tl.arange(0, 1))
        _store_activation(u_ptr, data_ptr, m, inverse(scale)[:, None], F, GATED, GELU, BLOCK_F)
    elif ONE_BLOCK:
        offs = tl.arange(0, BLOCK_F)[None, :]
        h = activation_of_row(u_ptr, m, offs, F, GATED, GELU)
        scale = scale_from_amax(amax_bits(h, 1), FORMAT_MAX, POWER_OF_TWO)
        if data_ptr is not None:
            tl.store(data_ptr + m * F + offs, to_data(h * inverse(scale)[:, None], data_ptr.dtype.element_ty), offs < F)
        tl.store(scale_ptr + m + tl.arange(0, 1), scale)
    else:
        bits = tl.zeros((1,), tl.int32)
        for start in range(0, F, BLOCK_F):
            offs = start + tl.arange(0, BLOCK_F)[None, :]
            bits = tl.maximum(bits, amax_bits(activation_of_row(u_ptr, m, offs, F, GATED, GELU), 1))
        scale = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
        if data_ptr is not None:
            _store_activation(u_ptr, data_ptr, m, inverse(scale)[:, None], F, GATED, GELU, BLOCK_F)
        tl.store(scale_ptr + m + tl.arange(0, 1), scale)


@triton.jit
def _store_activation(u_ptr, data_ptr, m, inv, F, GATED: tl.constexpr, GELU: tl.constexpr, BLOCK_F: tl.constexpr):
    for start in range(0, F, BLOCK_F):
        offs = start + tl.arange(0, BLOCK_F)[None, :]
        h = activation_of_row(u_ptr, m, offs, F, GATED, GELU)
        tl.store(data_ptr + m * F + offs, to_data(h * inv, data_ptr.dtype.element_ty), offs < F)


@triton.jit
def _backward_kernel(
    dh_ptr, u_ptr, column_scale_ptr, group_ptr, mantissa_of_ptr, weight_ptr, slot_ptr, row_ptr, h_scale_ptr, data_ptr,
    scale_ptr, h_data_ptr, dweight_ptr, F,
    FORMAT_MAX: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK_F: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    factor = mantissa(tl.load(mantissa_of_ptr + m))
    inv_h = inverse(tl.load(h_scale_ptr + m + tl.arange(0, 1)))[:, None]
    if group_ptr is not None:
        column_scale_ptr += tl.load(group_ptr + m).to(tl.int64) * F * (2 if GATED else 1)
        slot = tl.load(slot_ptr + m + tl.arange(0, 1))  # before the products, which take as long as these loads
        here, weight = tl.load(row_ptr + slot) >= 0, tl.load(weight_ptr + slot)
        kept = tl.div_rn(weight, nonzero(weight))[:, None]  # 1, but for weights below the least
        factor, inv_h = factor * kept, inv_h * kept
    product = tl.zeros((1,), tl.float32)  # of the rows of dh and h
    if ONE_BLOCK:
        offs = tl.arange(0, BLOCK_F)[None, :]
        d0, d1, h, dh = gradient_of_row(dh_ptr, u_ptr, m, offs, F, GATED, GELU)
        if group_ptr is not None:
            product = tl.sum(dh * h, 1)
        _store_h(h * inv_h, h_data_ptr, m, offs, F)
        d0, d1, bits = _scaled(d0, d1, column_scale_ptr, factor, offs, F, GATED)
        scale = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
        _store_gradient(d0, d1, inverse(scale)[:, None], data_ptr, m, offs, F, GATED)
    else:
        bits = tl.zeros((1,), tl.int32)
        for start in range(0, F, BLOCK_F):
            offs = start + tl.arange(0, BLOCK_F)[None, :]
            d0, d1, h, dh = gradient_of_row(dh_ptr, u_ptr, m, offs, F, GATED, GELU)
            if group_ptr is not None:
                product += tl.sum(dh * h, 1)
            _store_h(h * inv_h, h_data_ptr, m, offs, F)
            d0, d1, block_bits = _scaled(d0, d1, column_scale_ptr, factor, offs, F, GATED)
            bits = tl.maximum(bits, block_bits)
        scale = scale_from_amax(bits, FORMAT_MAX, POWER_OF_TWO)
        for start in range(0, F, BLOCK_F):
            offs = start + tl.arange(0, BLOCK_F)[None, :]
            d0, d1, _, _ = gradient_of_row(dh_ptr, u_ptr, m, offs, F, GATED, GELU)
            d0, d1, _ = _scaled(d0, d1, column_scale_ptr, factor, offs, F, GATED)
            _store_gradient(d0, d1, inverse(scale)[:, None], data_ptr, m, offs, F, GATED)
    tl.store(scale_ptr + m + tl.arange(0, 1), scale)
    if group_ptr is not None:
        tl.store(dweight_ptr + slot, tl.where(here, product / nonzero(weight), 0.0))


@triton.jit
def _store_h(scaled, h_data_ptr, m, offs, F):
    tl.store(h_data_ptr + m * F + offs, to_data(scaled, h_data_ptr.dtype.element_ty), offs < F)


@triton.jit
def _scaled(d0, d1, column_scale_ptr, factor, offs, F, GATED: tl.constexpr):
    d0 = d0 * tl.load(column_scale_ptr + offs, offs < F, other=0.0, eviction_policy="evict_last") * factor
    largest = magnitude_bits(d0)
    if GATED:
        d1 = d1 * tl.load(column_scale_ptr + F + offs, offs < F, other=0.0, eviction_policy="evict_last") * factor
        largest = tl.maximum(largest, magnitude_bits(d1))
    return d0, d1, tl.max(largest, 1)


@triton.jit
def _store_gradient(d0, d1, inv, data_ptr, m, offs, F, GATED: tl.constexpr):
    offs_u = m * F * (2 if GATED else 1) + offs
    tl.store(data_ptr + offs_u, to_data(d0 * inv, data_ptr.dtype.element_ty), offs < F)
    if GATED:
        tl.store(data_ptr + offs_u + F, to_data(d1 * inv, data_ptr.dtype.element_ty), offs < F)


@triton.jit
def _sum_kernel(
    dh_ptr, u_ptr, partials_ptr, M, F,
    GATED: tl.constexpr, GELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    offs = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    sum0 = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    sum1 = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        m = start + offs_m
        d0, d1, _, _ = gradient_of_row(dh_ptr, u_ptr, tl.minimum(m, M - 1), offs, F, GATED, GELU)
        sum0 += tl.where(m < M, d0, 0.0)
        sum1 += tl.where(m < M, d1, 0.0)
    partial_ptr = partials_ptr + tl.program_id(1) * F * (2 if GATED else 1) + offs
    tl.store(partial_ptr, tl.sum(sum0, 0)[None, :], offs < F)
    if GATED:
        tl.store(partial_ptr + F, tl.sum(sum1, 0)[None, :], offs < F)


# ---- The formulas of the reference as functions of Triton kernels.


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
        up, gate = _load(u_ptr + m * 2 * F, offs, mask), _load(u_ptr + m * 2 * F + F, offs, mask)
        h, _, _ = _gelu(gate)
        h *= up
    elif GATED:  # swiglu
        gate, up = _load(u_ptr + m * 2 * F, offs, mask), _load(u_ptr + m * 2 * F + F, offs, mask)
        h = gate * _sigmoid(gate) * up
    else:
        h, _, _ = _gelu(_load(u_ptr + m * F, offs, mask))
    return h


@triton.jit
def gradient_of_row(dh_ptr, u_ptr, m, offs, F, GATED: tl.constexpr, GELU: tl.constexpr):
    """The gradients of both halves of u (or of u, and zeros), h and dh of row m, or of rows m, at `offs`."""
    mask = offs < F
    dh = _load(dh_ptr + m * F, offs, mask)
    if GATED and GELU:  # geglu
        up, gate = _load(u_ptr + m * 2 * F, offs, mask), _load(u_ptr + m * 2 * F + F, offs, mask)
        h, cumulative, e = _gelu(gate)
        return dh * h, dh * up * add(cumulative, gate * (e * DENSITY)), h * up, dh
    if GATED:  # swiglu
        gate, up = _load(u_ptr + m * 2 * F, offs, mask), _load(u_ptr + m * 2 * F + F, offs, mask)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid * add(1.0, gate * (1.0 - sigmoid))
        return dh * up * slope, dh * silu, silu * up, dh
    u = _load(u_ptr + m * F, offs, mask)
    h, cumulative, e = _gelu(u)
    return dh * add(cumulative, u * (e * DENSITY)), tl.zeros(dh.shape, tl.float32), h, dh
