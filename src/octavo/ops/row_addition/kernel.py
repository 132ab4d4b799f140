"""The sum of a few long rows as a Triton kernel. A program adds a part of all rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.inductor import launcher
from octavo.ops.triton_support import cdiv

BLOCK = 1024  # with 4 warps a thread loads 16 bytes of a row at once


def add_rows(rows: Tensor, total: Tensor, mean: bool) -> None:
    """Same as `octavo.ops.row_addition.op.add_rows`."""
    count, n = rows.shape
    launcher(_add_kernel, (cdiv(n, BLOCK),))(rows, total, n, ROWS=count, MEAN=mean, BLOCK=BLOCK)


@triton.jit
def _add_kernel(rows_ptr, total_ptr, N, ROWS: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    acc = tl.load(rows_ptr + offs, mask, other=0.0).to(tl.float32)
    for _ in range(1, ROWS):
        rows_ptr += N
        acc += tl.load(rows_ptr + offs, mask, other=0.0).to(tl.float32)
    if MEAN:
        acc *= 1.0 / ROWS
    tl.store(total_ptr + offs, acc, mask)
