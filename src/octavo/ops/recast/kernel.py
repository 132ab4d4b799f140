"""Casting again as a Triton kernel: one tile a program, as in the byte transpose, and for the same reason.

Smaller tiles than there, and fewer warps: of those measured on an H100 the quickest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.formats import Format
from octavo.ops.device_math import add, inverse
from octavo.ops.lowering import launcher

ROWS, COLS = 64, 64


def recast_transposed(tensors: list[Tensor], scale: Tensor, fmt: Format) -> Tensor:
    """As the twin's, for matrices that are contiguous."""
    k, total = tensors[0].shape[1], scale.shape[0]
    result = scale.new_empty((k, total), dtype=fmt.dtype)
    first = 0
    for x in tensors:
        _launch(x, None, None, None, None, scale, result, first)
        first += x.shape[0]
    return result


def recast_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: Format
) -> Tensor:
    """As the twin's, for x contiguous."""
    result = scale.new_empty((x.shape[1], x.shape[0]), dtype=fmt.dtype)
    _launch(x, mean, rstd, weight, bias, scale, result, 0)
    return result


def _launch(
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    result: Tensor,
    first: int,
) -> None:
    m, k = x.shape
    launcher(_recast_kernel, (triton.cdiv(k, COLS), triton.cdiv(m, ROWS)))(
        x, mean, rstd, weight, bias, scale, result, m, k, first, result.shape[1],
        ROWS=ROWS, COLS=COLS, num_warps=2,
    )  # fmt: skip


@triton.jit
def _recast_kernel(
    x, mean, rstd, weight, bias, scale, result, m, k, first, total, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    here = (row < m)[:, None] & (col < k)[None, :]
    v = tl.load(x + row[:, None] * k + col[None, :], here, other=0.0).to(tl.float32)
    if weight is not None:
        if mean is not None:
            v -= tl.load(mean + row, row < m, other=0.0)[:, None]
        v *= tl.load(rstd + row, row < m, other=0.0)[:, None]
        v *= tl.load(weight + col, col < k, other=0.0).to(tl.float32)[None, :]
        if bias is not None:
            v = add(v, tl.load(bias + col, col < k, other=0.0).to(tl.float32)[None, :])
    q = (v * inverse(tl.load(scale + first + row, row < m, other=1.0))[:, None]).to(result.dtype.element_ty)
    tl.store(result + col[:, None] * total + (first + row)[None, :], tl.trans(q), tl.trans(here))
