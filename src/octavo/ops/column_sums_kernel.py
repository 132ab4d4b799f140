"""Sums of columns as a Triton kernel. It adds the partial sums that programs of another kernel stored."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.inductor import launcher
from octavo.ops.triton_support import cdiv

BLOCK = 32


def sum_columns(partials: Tensor, sums: Tensor, more_sums: Tensor | None = None) -> None:
    """Write the sums of the columns of `partials` [P, N], always added in the same order.

    Args:
        partials: float32, contiguous.
        sums, more_sums: [N_1] and [N - N_1], of any float dtype: the sums of the first columns, and of the others.
    """
    p, n = partials.shape
    launcher(_sum_kernel, (cdiv(n, BLOCK),))(
        partials, sums, more_sums, p, n, sums.shape[0], BLOCK_M=BLOCK, BLOCK_N=BLOCK
    )


@triton.jit
def _sum_kernel(
    partials_ptr, sums_ptr, more_sums_ptr, M, N, SPLIT, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        mask = (start + offs_m < M)[:, None] & (offs_n < N)[None, :]
        acc += tl.load(partials_ptr + (start + offs_m)[:, None] * N + offs_n[None, :], mask, other=0.0)
    total = tl.sum(acc, 0)
    tl.store(sums_ptr + offs_n, total.to(sums_ptr.dtype.element_ty), offs_n < SPLIT)
    if more_sums_ptr is not None:
        mask = (offs_n >= SPLIT) & (offs_n < N)
        tl.store(more_sums_ptr + offs_n - SPLIT, total.to(more_sums_ptr.dtype.element_ty), mask)
