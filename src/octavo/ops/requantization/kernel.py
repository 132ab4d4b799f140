"""Casting again as a Triton kernel: one tile a program, as in the byte transpose, and for the same reason.

Smaller tiles than there, and fewer warps: of those measured on an H100 the quickest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.formats import Format
from octavo.numerics.granularity import ROW, Granularity
from octavo.ops.device_math import add, inverse
from octavo.ops.inductor import launcher

ROWS, COLS = 64, 64
_WHOLE = 1 << 30  # rows and columns of the block that a tensor is


def takes(granularity: Granularity) -> bool:
    """Whether the kernel reads such scales: one a row, one a tensor, or square blocks of whole tiles."""
    return granularity == ROW or (granularity.transposes and _side(granularity) % ROWS == 0)


def requantize_transposed(tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity) -> Tensor:
    """The same as the reference, for contiguous matrices and a granularity that `takes` names."""
    k, total = tensors[0].shape[1], sum(x.shape[0] for x in tensors)
    result = scale.new_empty((k, total), dtype=fmt.dtype)
    first = 0
    for x in tensors:
        _launch(x, None, None, None, None, scale, result, first, 0 if granularity == ROW else _side(granularity))
        first += x.shape[0]
    return result


def _side(granularity: Granularity) -> int:
    """Rows and columns of a square block."""
    return granularity.rows or _WHOLE


def requantize_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: Format
) -> Tensor:
    """As the twin's, for x contiguous."""
    result = scale.new_empty((x.shape[1], x.shape[0]), dtype=fmt.dtype)
    _launch(x, mean, rstd, weight, bias, scale, result, 0, 0)
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
    side: int,
) -> None:
    m, k = x.shape
    launcher(_recast_kernel, (triton.cdiv(k, COLS), triton.cdiv(m, ROWS)))(
        x, mean, rstd, weight, bias, scale, result, m, k, first, result.shape[1], scale.shape[1],
        SIDE=side, ROWS=ROWS, COLS=COLS, num_warps=2,
    )  # fmt: skip


@triton.jit
def _recast_kernel(
    x, mean, rstd, weight, bias, scale, result, m, k, first, total, scales_across,
    SIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
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
    if SIDE == 0:  # a scale for each row
        s = tl.load(scale + first + row, row < m, other=1.0)
    else:  # a tile lies within one block
        block = (tl.program_id(1) * ROWS // SIDE) * scales_across + tl.program_id(0) * COLS // SIDE
        s = tl.load(scale + block + tl.zeros_like(row))
    q = (v * inverse(s)[:, None]).to(result.dtype.element_ty)
    tl.store(result + col[:, None] * total + (first + row)[None, :], tl.trans(q), tl.trans(here))
