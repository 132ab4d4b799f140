"""The byte transpose and the scales of the backward GEMMs as Triton kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.launching import allocate, cdiv
from octavo.ops.registration import launcher

# ---- The byte transpose as a Triton kernel. Each program moves one tile, since a loop over transposed stores lost
# bytes.
#
# (Triton 3.6 on an H100: the wrong bytes differed from run to run, with and without pipelining; see bench/log.md.)


BLOCK_M, BLOCK_K = 256, 128  # with 8 warps the fastest of 24 on an H200


def transpose(data: Tensor, shift: Tensor | None, place: Tensor | None) -> Tensor:
    """Same as `transpose_reference`, for contiguous data [M, K]."""
    m, k = data.shape[0] if place is None else place.shape[0], data.shape[1]
    result = allocate(data, (k, m))
    launcher(_transpose_kernel, (cdiv(k, BLOCK_K), cdiv(m, BLOCK_M)))(
        data, result, shift, place, m, k, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, num_warps=8
    )
    return result


@triton.jit
def _transpose_kernel(data_ptr, result_ptr, shift_ptr, place_ptr, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    row, mask_row = offs_m, offs_m < M
    if place_ptr is not None:
        row = tl.load(place_ptr + offs_m, offs_m < M, other=-1).to(tl.int64)
        mask_row = row >= 0
    data = tl.load(data_ptr + row[:, None] * K + offs_k[None, :], mask_row[:, None] & (offs_k < K)[None, :], other=0.0)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + row, mask_row, other=0)[:, None]
        if data_ptr.dtype.element_ty == tl.float8e4nv:  # exact in float16; divided by more than 2^24, all are 0
            data = (data.to(tl.float16) * _power_of_two(-tl.minimum(shift, 24)).to(tl.float16)).to(data.dtype)
        else:
            wide = data.to(tl.float32)
            shifted = (wide * _power_of_two(-tl.minimum(shift, 100))).to(data.dtype)
            data = tl.where(tl.abs(wide) == float("inf"), data, shifted)  # the cast saturates inf
    tl.store(result_ptr + offs_k[:, None] * M + offs_m[None, :], tl.trans(data), tl.trans(mask))


@triton.jit
def _power_of_two(exponent):
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True)


# ---- The scales of the backward GEMMs as one Triton kernel.
#
# Each program finds the largest exponent among all rows of its group, and writes its part of the results. The scales
# are few: after the first program has read them, they lie in the GPU's cache. The divisions in float64 are slow, so a
# part is small. Rows behind the groups are one more.


BLOCK, PART = 8192, 1024


def fold_scales(s_x: Tensor, s_g: Tensor, s_w: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `fold_scales_reference`, for contiguous scales."""
    t, groups = s_x.shape[0], 1 if offsets is None else offsets.shape[0]
    n = 1 if s_w is None else s_w.shape[-2]
    shape = (n, 1) if offsets is None else (groups, n, 1)
    dx, shift, dw = allocate(s_x, (t, 1)), allocate(s_x, (t,), torch.int32), allocate(s_x, shape)
    block, warps = (BLOCK, 16) if offsets is None else (PART, 4)
    grid = (cdiv(max(t, n), PART), 1) if offsets is None else (cdiv(n, PART), groups + 1)
    launcher(_fold_kernel, grid)(
        s_x, s_g, s_w, offsets, dx, shift, dw, t, n, groups, BLOCK=block, PART=PART, num_warps=warps
    )
    return dx, shift, dw


@triton.jit
def _fold_kernel(
    s_x_ptr, s_g_ptr, s_w_ptr, offsets_ptr, dx_ptr, shift_ptr, dw_ptr, T, N, E,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    part, e, begin, end = tl.program_id(0), tl.program_id(1), 0, T
    if offsets_ptr is not None:
        begin = tl.load(offsets_ptr + e - 1, e > 0, other=0)
        end = tl.load(offsets_ptr + e, e < E, other=T)
    largest = tl.full((BLOCK,), -254, tl.int32)  # the exponents of two zeros
    for start in range(begin, end, BLOCK):
        offs_t = start + tl.arange(0, BLOCK)
        x_bits, g_bits = _bits(s_x_ptr, offs_t, offs_t < end), _bits(s_g_ptr, offs_t, offs_t < end)
        largest = tl.maximum(largest, (x_bits >> 23) + (g_bits >> 23) - 254)
    e_max = tl.max(largest, 0)  # of c_max

    for start in range(begin + part * PART, end, tl.num_programs(0) * PART):
        offs_t = start + tl.arange(0, PART)
        mask = offs_t < end
        x_bits, g_bits = _bits(s_x_ptr, offs_t, mask), _bits(s_g_ptr, offs_t, mask)
        m = ((x_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        tl.store(dx_ptr + offs_t, _quotient(g_bits.to(tl.float32, bitcast=True), m), mask)
        tl.store(shift_ptr + offs_t, e_max - ((x_bits >> 23) + (g_bits >> 23) - 254), mask)

    offs = part * PART + tl.arange(0, PART)
    mask = (offs < N) & (e < E)
    offs += e * N
    bits = (tl.full((PART,), 1023, tl.int64) + e_max) << 52  # of c_max as float64; as float32 it may be inf or 0
    c_max = bits.to(tl.float64, bitcast=True).to(tl.float32)
    if s_w_ptr is not None:
        c_max = _quotient(c_max, tl.load(s_w_ptr + offs, mask, other=1.0))
    tl.store(dw_ptr + offs, c_max, mask)


@triton.jit
def _bits(scale_ptr, offs, mask):
    return tl.load(scale_ptr + offs, mask, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def _quotient(a, b):
    """As `octavo.numerics.scaling.quotient`."""
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.float32)
