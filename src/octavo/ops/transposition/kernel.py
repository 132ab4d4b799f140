"""The byte transpose as a Triton kernel. Each program moves one tile, since a loop over transposed stores lost bytes.

(Triton 3.6 on an H100: the wrong bytes differed from run to run, with and without pipelining; see docs/log.md.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.inductor import launcher
from octavo.ops.launching import allocate
from octavo.ops.triton_support import cdiv

BLOCK_M, BLOCK_K = 64, 256


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
