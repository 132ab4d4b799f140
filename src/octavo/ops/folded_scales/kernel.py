"""The scales of the backward GEMMs as one Triton kernel.

Each program finds the largest exponent among all rows, and writes its part of the results. The scales are few: after
the first program has read them, they lie in the GPU's cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.inductor import launcher
from octavo.ops.launching import allocate
from octavo.ops.triton_support import cdiv

BLOCK = 8192


def fold_scales(s_x: Tensor, s_g: Tensor, s_w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `fold_scales_reference`, for contiguous scales."""
    t, n = s_x.shape[0], 1 if s_w is None else s_w.shape[0]
    dx, shift, dw = allocate(s_x, (t, 1)), allocate(s_x, (t,), torch.int32), allocate(s_x, (n, 1))
    launcher(_fold_kernel, (cdiv(max(t, n), BLOCK),))(
        s_x, s_g, s_w, dx, shift, dw, t, n, BLOCK=BLOCK, num_warps=16
    )  # fmt: skip
    return dx, shift, dw


@triton.jit
def _fold_kernel(s_x_ptr, s_g_ptr, s_w_ptr, dx_ptr, shift_ptr, dw_ptr, T, N, BLOCK: tl.constexpr):
    largest = tl.full((BLOCK,), -254, tl.int32)  # the exponents of two zeros
    for start in range(0, T, BLOCK):
        offs_t = start + tl.arange(0, BLOCK)
        x_bits, g_bits = _bits(s_x_ptr, offs_t, offs_t < T), _bits(s_g_ptr, offs_t, offs_t < T)
        largest = tl.maximum(largest, (x_bits >> 23) + (g_bits >> 23) - 254)
    e_max = tl.max(largest, 0)  # of c_max

    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < T
    x_bits, g_bits = _bits(s_x_ptr, offs, mask), _bits(s_g_ptr, offs, mask)
    m = ((x_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    tl.store(dx_ptr + offs, _quotient(g_bits.to(tl.float32, bitcast=True), m), mask)
    tl.store(shift_ptr + offs, e_max - ((x_bits >> 23) + (g_bits >> 23) - 254), mask)

    bits = (tl.full((BLOCK,), 1023, tl.int64) + e_max) << 52  # of c_max as float64; as float32 it may be inf or 0
    c_max = bits.to(tl.float64, bitcast=True).to(tl.float32)
    if s_w_ptr is not None:
        c_max = _quotient(c_max, tl.load(s_w_ptr + offs, offs < N, other=1.0))
    tl.store(dw_ptr + offs, c_max, offs < N)


@triton.jit
def _bits(scale_ptr, offs, mask):
    return tl.load(scale_ptr + offs, mask, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def _quotient(a, b):
    """As `octavo.numerics.scaling.quotient`."""
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.float32)
