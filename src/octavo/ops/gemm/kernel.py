"""The scaled GEMM of few rows, as Triton kernels: its time is that of reading b [N, K], once.

    y[M,N] = a[M,K] @ b[N,K]^T * s_a * s_b + bias, rounded; + residual[M,N], rounded again

One row of a: a program multiplies whole rows of b with it in float32 registers, and adds up at the end. More rows: the
tensor core takes rows of b as the side that must be long, a^T [K, M] as the other, padded to 16 columns; where N has
too few tiles for the multiprocessors the reduction is cut, and a second launch adds the parts in their order, so that
the result does not depend on who was first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.inductor import launcher
from octavo.ops.triton_support import power_of_two_above

COMBINED = 256  # columns of y that a program of the second launch adds up
MOST_SPLITS = 8


class Tiling(NamedTuple):
    """Of a program: rows of b, terms at a time, loads in flight, warps. And the parts that a reduction is cut into."""

    rows: int
    terms: int
    stages: int
    warps: int
    splits: int = 1


def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    tiling: Tiling | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As the door's, for scales by tensor or by row, few rows of a and a contiguous residual; `tiling`: None chooses
    one."""
    (m, k), n = a.shape, b.shape[0]
    a, b, scale_a, scale_b = (t.contiguous() for t in (a, b, scale_a, scale_b))
    y = a.new_empty((m, n), dtype=out_dtype)
    if y.numel() == 0 or k == 0:
        y = y.zero_() if bias is None else y.copy_(bias.expand(m, n))
        return y if residual is None else y + residual
    steps = {"STEP_A": int(scale_a.shape[0] > 1), "STEP_B": int(scale_b.shape[0] > 1)}
    tiling = tiling or choose(m, n, k, a.device)
    tile = {"ROWS": tiling.rows, "TERMS": tiling.terms, "STAGES": tiling.stages, "num_warps": tiling.warps}
    tiles = triton.cdiv(n, tiling.rows)
    if m == 1:
        launcher(_row_kernel, (tiles,))(a, b, scale_a, scale_b, bias, residual, y, n, K=k, **steps, **tile)
        return y
    blocks = triton.cdiv(triton.cdiv(k, tiling.terms), tiling.splits)  # of a part
    splits = triton.cdiv(k, blocks * tiling.terms)
    parts = y.new_empty((splits, m, n), dtype=torch.float32) if splits > 1 else None
    promote = 0 if fast_accumulation else min(128, tiling.terms)  # terms; 0: never
    launcher(_tile_kernel, (tiles, splits))(
        a, b, scale_a, scale_b, bias, residual, y, parts, m, n,
        K=k, PART=blocks * tiling.terms, COLUMNS=max(16, power_of_two_above(m)), PROMOTE=promote, **steps, **tile,
    )  # fmt: skip
    if parts is not None:
        launcher(_combine_kernel, (triton.cdiv(n, COMBINED), m))(
            parts, scale_a, scale_b, bias, residual, y, m, n, SPLITS=splits, BLOCK=COMBINED, **steps, num_warps=4
        )
    return y


def choose(m: int, n: int, k: int, device: torch.device) -> Tiling:
    """The tiling for these sizes."""
    if m == 1:
        return Tiling(rows=8, terms=_terms(k, 512), stages=4, warps=4)
    rows, terms = 64, _terms(k, 256 if m <= 32 else 128)
    programs: int = torch.cuda.get_device_properties(device).multi_processor_count
    tiles, blocks = -(-n // rows), -(-k // terms)

    def time(splits: int) -> int:  # of the programs that one multiprocessor runs, in blocks of the reduction
        return -(-tiles * splits // programs) * -(-blocks // splits)

    return Tiling(rows, terms, stages=4, warps=4, splits=min(range(1, MOST_SPLITS + 1), key=time))


def _terms(k: int, most: int) -> int:
    """A power of two, at most `most`: a divisor of `k` where that has one worth it, so that nothing is masked."""
    divisor = k & -k
    return min(most, divisor) if 4 * divisor >= most else min(most, max(32, power_of_two_above(k)))


@triton.jit
def _row_kernel(
    a, b, scale_a, scale_b, bias, residual, y, n,
    K: tl.constexpr, STEP_A: tl.constexpr, STEP_B: tl.constexpr,
    ROWS: tl.constexpr, TERMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), n - 1)
    term = tl.arange(0, TERMS)
    begin = b + row.to(tl.int64) * K
    sums = tl.zeros((ROWS, TERMS), tl.float32)
    for k in tl.range(0, K, TERMS, num_stages=STAGES):
        if K % TERMS == 0:
            u = tl.load(a + k + term)
            v = tl.load(begin[:, None] + (k + term)[None, :])
        else:
            here = k + term < K
            u = tl.load(a + k + term, here, other=0.0)
            v = tl.load(begin[:, None] + (k + term)[None, :], here[None, :], other=0.0)
        sums += v.to(tl.float32) * u.to(tl.float32)[None, :]
    total = tl.sum(sums, 1) * tl.load(scale_a)
    _store(total, 0, row, y, scale_b, bias, residual, n, STEP_B)


@triton.jit
def _tile_kernel(
    a, b, scale_a, scale_b, bias, residual, y, parts, m, n,
    K: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, PROMOTE: tl.constexpr,
    STEP_A: tl.constexpr, STEP_B: tl.constexpr, ROWS: tl.constexpr, TERMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), n - 1)
    token = tl.arange(0, COLUMNS)
    here = token < m
    term = tl.arange(0, TERMS)
    rows = b + row.to(tl.int64) * K
    columns = a + tl.minimum(token, m - 1) * K  # what is computed beyond m is not stored
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(1) * PART
    for k in tl.range(begin, tl.minimum(begin + PART, K), TERMS, num_stages=STAGES):
        if K % TERMS == 0:
            v = tl.load(rows[:, None] + (k + term)[None, :])
            u = tl.load(columns[None, :] + (k + term)[:, None])
        else:
            v = tl.load(rows[:, None] + (k + term)[None, :], (k + term < K)[None, :], other=0.0)
            u = tl.load(columns[None, :] + (k + term)[:, None], (k + term < K)[:, None], other=0.0)
        sums = tl.dot(v, u, sums, max_num_imprecise_acc=PROMOTE if PROMOTE else None)  # [N,K] @ [K,M]
    if parts is not None:
        at = (tl.program_id(1) * m + token).to(tl.int64)[None, :] * n + row[:, None]
        tl.store(parts + at, sums, here[None, :])
    else:
        sums *= tl.load(scale_a + token * STEP_A, here, other=0.0)[None, :]
        _store(sums, token[None, :], row[:, None], y, scale_b, bias, residual, n, STEP_B, here[None, :])


@triton.jit
def _combine_kernel(
    parts, scale_a, scale_b, bias, residual, y, m, n,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STEP_A: tl.constexpr, STEP_B: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    column = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), n - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + (part * m + token).to(tl.int64) * n + column)
    _store(total * tl.load(scale_a + token * STEP_A), token, column, y, scale_b, bias, residual, n, STEP_B)


@triton.jit
def _store(total, token, column, y, scale_b, bias, residual, n, STEP_B: tl.constexpr, here=None):
    """Store sums, scaled by s_a already, to y[token, column]. Programs write a last column several times, the same."""
    total *= tl.load(scale_b + column * STEP_B)
    if bias is not None:
        total += tl.load(bias + column).to(tl.float32)
    at = token * n + column
    if residual is not None:
        total = total.to(y.dtype.element_ty).to(tl.float32) + tl.load(residual + at, here).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), here)
