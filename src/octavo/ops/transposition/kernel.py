"""The byte transpose as a Triton kernel: one tile a program, since a loop over transposed stores lost bytes.

(Triton 3.6, H100: the wrong bytes moved from run to run, pipelined or not: docs/log.md.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.inductor import launcher

ROWS, COLS = 64, 256


def transpose(data: Tensor, shift: Tensor | None) -> Tensor:
    """As the twin's `transpose`, for data [M, K] contiguous."""
    m, k = data.shape
    result = data.new_empty((k, m))
    launcher(_transpose_kernel, (triton.cdiv(k, COLS), triton.cdiv(m, ROWS)))(
        data, result, shift, m, k, ROWS=ROWS, COLS=COLS, num_warps=8
    )
    return result


@triton.jit
def _transpose_kernel(data, result, shift, m, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    here = (row < m)[:, None] & (col < k)[None, :]
    v = tl.load(data + row[:, None] * k + col[None, :], here)
    if shift is not None:
        places = tl.load(shift + row, row < m, other=0)[:, None]
        if data.dtype.element_ty == tl.float8e4nv:  # float16 holds its products exactly; beyond 2^-24 all of them are 0
            v = (v.to(tl.float16) * _power_of_two(-tl.minimum(places, 24)).to(tl.float16)).to(v.dtype)
        else:
            wide = v.to(tl.float32)
            shifted = (wide * _power_of_two(-tl.minimum(places, 100))).to(v.dtype)
            v = tl.where(tl.abs(wide) == float("inf"), v, shifted)  # the cast saturates inf
    tl.store(result + col[:, None] * m + row[None, :], tl.trans(v), tl.trans(here))


@triton.jit
def _power_of_two(exponent):
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True)
