"""The GEMM of small M as Triton kernels. It takes as long as reading b [N, K] once.

    y[M,N] = a[M,K] @ b[N,K]^T * s_a * s_b + bias, rounded; + residual[M,N], rounded again

a has eight bits and scales. In the weight-only GEMM (`weight_only`) it is BF16 or FP16, to which b is widened exactly.

M = 1 (GEMV): a program multiplies whole rows of b with a in float32 registers. It adds 8 neighbours in each step, and
all at the end. A norm of a may come first, whose mean of squares each program computes for itself, and SwiGLU last.

Larger M: the tensor core computes b @ a^T, because its first operand needs at least 64 rows; the columns of a^T are
padded to 16. If N has too few tiles for the multiprocessors, K is split (split-K), and a second launch adds the partial
sums. It adds them in a fixed order, so the result does not depend on which program ends first.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kernels.device_math import let_next_start, wait_for_inputs, widen, widen_scale
from octavo.ops.launching import ALONE, Around, Operands, allocate, cdiv, multiprocessors, power_of_two_above
from octavo.ops.registration import launcher

MAX_BLOCK_M = 128


class Tiling(NamedTuple):
    """Rows of b and elements of K in a tile, loads in flight, warps of a program, and parts that K is split into."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    split_k: int = 1


def scaled_mm(
    operands: Operands, bias: Tensor | None, out_dtype: torch.dtype, fast: bool, residual: Tensor | None = None
) -> Tensor:
    """Same as `scaled_mm` of the operation, for scales by tensor or row, a small M and a contiguous residual."""
    a, b, scale_a, scale_b, _, _ = operands
    (m, k), n = a.shape, b.shape[0]
    tiling = choose(m, n, k, a.device)
    promote = 0 if fast else min(128, tiling.block_k)  # elements of K between promotions to float32
    added = bias, residual, allocate(a, (m, n), out_dtype)
    return multiply(a, b, scale_a.contiguous(), scale_b.contiguous(), *added, tiling, promote=promote)


def multiply(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    tiling: Tiling,
    *,
    promote: int = 0,
    scale_rows: int = 1,
    group: int = 0,
    around: Around = ALONE,
) -> Tensor:
    """Fill y [M, N] with the product of a [M, K] and b [N, K], and return it.

    Sums are promoted to float32 after `promote` elements of K, or never (0). `scale_rows` rows of b share a scale, or
    `group` elements of a row (0: all). `around` is for M = 1.
    """
    a, b, (m, n), k = a.contiguous(), b.contiguous(), y.shape, a.shape[1]
    if y.numel() == 0 or k == 0:
        return empty_product(y, bias, residual)
    block_n, block_k, stages, warps, split_k = tiling
    options = {
        "SCALE_ROWS": scale_rows, "STRIDE_SCALE_B": _stride(scale_b), "GROUP": group,
        "BLOCK_N": block_n, "BLOCK_K": block_k, "NUM_STAGES": stages, "num_warps": warps,
    }  # fmt: skip
    if m == 1:
        launcher(_row_kernel, (cdiv(n, block_n),))(
            a, b, scale_a, scale_b, bias, residual, around.norm, y, n,
            K=k, EPS=float(np.float32(around.eps)), GATED=around.gated, **options,
        )  # fmt: skip
        return y
    k_per_split, split_k = cut(k, block_k, split_k)
    partials = allocate(y, (split_k, m, n), torch.float32) if split_k > 1 else None
    block_m = min(MAX_BLOCK_M, max(16, power_of_two_above(m)))
    grid = cdiv(m, block_m), cdiv(n, block_n), split_k  # programs that read the same part of b run together
    launcher(_tile_kernel, grid)(
        a, b, scale_a, scale_b, bias, residual, y, partials, m, n,
        K=k, K_PER_SPLIT=k_per_split, BLOCK_M=block_m, PROMOTE=promote, AXIS_M=0, STRIDE_SCALE_A=_stride(scale_a),
        **options,
    )  # fmt: skip
    if partials is not None:
        add_partials(partials, scale_a, None if group else scale_b, bias, residual, y)
    return y


def _stride(scale: Tensor | None) -> int:
    """The scales from one row of a scale, or of its blocks, to the next; 0 where there is one row."""
    return 0 if scale is None or scale.shape[0] == 1 else scale.shape[1]


STEP = 128  # bytes of a row of a and b in a tile of an ordered GEMM, the same for every M


def ordered_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Same as `ordered_mm_reference`, for contiguous tensors. One sum in the tensor core runs over all of K, its first
    operand always 64 rows of b, so neither M nor the tile changes the order in which it adds."""
    (m, k), n = a.shape, b.shape[0]
    y = allocate(a, (m, n), torch.bfloat16)
    if y.numel() == 0 or k == 0:
        return empty_product(y, bias, residual)
    few = m <= 64
    block_m, block_n, stages, warps = (max(16, power_of_two_above(m)), 64, 6, 4) if few else (128, 128, 4, 8)
    launcher(_tile_kernel, (cdiv(n, block_n), cdiv(m, block_m)))(
        a, b, scale_a, scale_b, bias, residual, y, None, m, n,
        K=k, K_PER_SPLIT=k, BLOCK_M=block_m, PROMOTE=0, AXIS_M=1, STRIDE_SCALE_A=1,
        SCALE_ROWS=1, STRIDE_SCALE_B=1, GROUP=0,
        BLOCK_N=block_n, BLOCK_K=largest_block_k(k, STEP // a.element_size()), NUM_STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return y


def choose(m: int, n: int, k: int, device: torch.device) -> Tiling:
    """The tiling for y [m, n] and K = k on `device`."""
    if m == 1:
        return Tiling(block_n=4, block_k=largest_block_k(k, 512), stages=4, warps=2)
    if 32 < m <= 64 and n > 8192:
        return Tiling(block_n=128, block_k=largest_block_k(k, 128), stages=4, warps=8)
    block_n, block_k = 64, largest_block_k(k, 256 if m <= 64 else 128)
    split_k = choose_split(cdiv(n, block_n), cdiv(k, block_k), multiprocessors(device))
    return Tiling(block_n, block_k, stages=4, warps=4, split_k=split_k)


def largest_block_k(k: int, most: int) -> int:
    """A power of two up to `most`. If `k` has a divisor that is large enough, that one: then no load is masked."""
    divisor = k & -k
    return min(most, divisor) if 4 * divisor >= most else min(most, max(32, power_of_two_above(k)))


@triton.jit
def _row_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, norm_ptr, y_ptr, N,
    K: tl.constexpr, EPS: tl.constexpr, GATED: tl.constexpr,
    SCALE_ROWS: tl.constexpr, STRIDE_SCALE_B: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    offs_n = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    b_rows, scale_b_ptrs = b_ptr + offs_n.to(tl.int64) * K, scale_b_ptr + offs_n // SCALE_ROWS * STRIDE_SCALE_B
    # What the sums are multiplied by, and what is added to them, is loaded before the loop, which takes as long.
    scale_a = 1.0 if scale_a_ptr is None else tl.load(scale_a_ptr)
    scale_b = 1.0 if GROUP else tl.load(scale_b_ptrs)
    bias = None if bias_ptr is None else tl.load(bias_ptr + offs_n)
    residual = None if residual_ptr is None else tl.load(residual_ptr + offs_n)
    if GATED:  # b is the gate, then up, with scales by row or by tensor
        offs_up = N + offs_n
        up_rows, scale_up = b_ptr + offs_up.to(tl.int64) * K, tl.load(scale_b_ptr + offs_up * STRIDE_SCALE_B)
        bias_up = None if bias_ptr is None else tl.load(bias_ptr + offs_up)
    acc = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        mask = None if K % BLOCK_K == 0 else k + offs_k < K
        a = _load(a_ptr + k + offs_k, mask).to(tl.float32)
        if norm_ptr is not None:
            squares += a * a
            a *= _load(norm_ptr + k + offs_k, mask).to(tl.float32)
        acc += _row_products(b_rows, scale_b_ptrs, a, k, offs_k, mask, GROUP)
        if GATED:
            up += _row_products(up_rows, None, a, k, offs_k, mask, 0)
    let_next_start()
    if norm_ptr is not None:
        scale_a = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + EPS)
    y = tl.sum(acc, 1) * scale_a * scale_b
    if GATED:
        up = tl.sum(up, 1) * scale_a * scale_up
        if bias is not None and bias_up is not None:
            y, up = y + bias.to(tl.float32), up + bias_up.to(tl.float32)
        y, bias = y / (1.0 + tl.exp(-y)) * up, None
    _add_and_store(y, bias, residual, y_ptr + offs_n, None)


@triton.jit
def _row_products(b_rows, scale_ptrs, a, k, offs_k, mask, GROUP: tl.constexpr):
    """Sums of 8 products of rows of b with a [BLOCK_K], from k on."""
    b = _load(b_rows[:, None] + (k + offs_k)[None, :], None if mask is None else mask[None, :])
    products = widen(b, tl.float32) * a[None, :]
    sums = tl.sum(tl.reshape(products, (b.shape[0], b.shape[1] // 8, 8)), 2)  # in the registers of a thread
    if GROUP:
        sums *= widen_scale(tl.load(scale_ptrs + k // GROUP))[:, None]
    return sums


@triton.jit
def _load(ptrs, mask):
    return tl.load(ptrs) if mask is None else tl.load(ptrs, mask, other=0.0)


@triton.jit
def _tile_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr, partials_ptr, M, N,
    K: tl.constexpr, K_PER_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, PROMOTE: tl.constexpr, AXIS_M: tl.constexpr,
    STRIDE_SCALE_A: tl.constexpr, SCALE_ROWS: tl.constexpr, STRIDE_SCALE_B: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    offs_n = tl.minimum(tl.program_id(1 - AXIS_M) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    offs_m = tl.program_id(AXIS_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    # Rows beyond M are the first ones again, and not stored. Programs that read one row would wait for each other.
    a_rows = a_ptr + (offs_m % M).to(tl.int64) * K
    if scale_b_ptr is not None:
        scale_b_ptr += offs_n // SCALE_ROWS * STRIDE_SCALE_B
    start_k = tl.program_id(2) * K_PER_SPLIT
    scale_a, scale_b = 1.0, 1.0
    if partials_ptr is None:  # before the sums, which take as long as these loads
        if scale_a_ptr is not None:
            scale_a = tl.load(scale_a_ptr + offs_m * STRIDE_SCALE_A, mask_m, other=0.0)[None, :]
        if scale_b_ptr is not None and not GROUP:
            scale_b = tl.load(scale_b_ptr)[:, None]
    acc = sum_products(
        b_ptr + offs_n.to(tl.int64) * K, a_rows, scale_b_ptr, start_k, tl.minimum(start_k + K_PER_SPLIT, K), K,
        K % BLOCK_K == 0, PROMOTE, GROUP, BLOCK_N, BLOCK_M, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    let_next_start()
    if partials_ptr is not None:
        offs = (tl.program_id(2) * M + offs_m).to(tl.int64)[None, :] * N + offs_n[:, None]
        tl.store(partials_ptr + offs, acc, mask_m[None, :])
    else:
        rows = offs_m.to(tl.int64)[None, :]
        store_sums(acc * scale_a * scale_b, rows, offs_n[:, None], y_ptr, bias_ptr, residual_ptr, N, mask_m[None, :])


@triton.jit
def sum_products(
    b_rows, a_rows, scale_ptrs, start, end, K, EVEN: tl.constexpr, PROMOTE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_N, BLOCK_M] of products over K from `start` to `end`, for pointers to rows of b and of a.

    EVEN: no step reaches beyond K. With PROMOTE, products of so many elements are added to a float32 sum. Scales of
    GROUP elements along K, to the first of which `scale_ptrs` point, are multiplied in; others are not.
    """
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(start, end, BLOCK_K, num_stages=NUM_STAGES):
        if EVEN:
            b = tl.load(b_rows[:, None] + (k + offs_k)[None, :])
            a = tl.load(a_rows[None, :] + (k + offs_k)[:, None])
        else:
            b = tl.load(b_rows[:, None] + (k + offs_k)[None, :], (k + offs_k < K)[None, :], other=0.0)
            a = tl.load(a_rows[None, :] + (k + offs_k)[:, None], (k + offs_k < K)[:, None], other=0.0)
        if b.dtype.primitive_bitwidth < a.dtype.primitive_bitwidth:
            b = widen(b, a.dtype)
        if GROUP:
            product = tl.dot(b, a)  # [N,K] @ [K,M]
            acc += product * widen_scale(tl.load(scale_ptrs + k // GROUP))[:, None]
        elif PROMOTE:
            # Without a limit Triton makes one product of this sum. Hopper's code adds within the product too, after
            # each PROMOTE elements; that of other GPUs adds here alone, after BLOCK_K.
            acc += tl.dot(b, a, max_num_imprecise_acc=PROMOTE)
        else:
            acc = tl.dot(b, a, acc)
    return acc


@triton.jit
def store_sums(acc, offs_m, offs_n, y_ptr, bias_ptr, residual_ptr, N, mask=None):
    """Store sums, already multiplied by their scales, to y[offs_m, offs_n].

    Where offs_n is clamped to the last column, several lanes store the same value there.
    """
    offs = offs_m * N + offs_n
    bias = None if bias_ptr is None else tl.load(bias_ptr + tl.minimum(offs_n, N - 1))
    residual = None if residual_ptr is None else tl.load(residual_ptr + offs, mask)
    _add_and_store(acc, bias, residual, y_ptr + offs, mask)


@triton.jit
def _add_and_store(acc, bias, residual, y_ptrs, mask):
    dtype: tl.constexpr = y_ptrs.dtype.element_ty
    if bias is not None:
        acc += bias.to(tl.float32)
    if residual is not None:
        acc = acc.to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(y_ptrs, acc.to(dtype), mask)


# ---- GEMMs whose K is split into parts (split-K): one launch multiplies the parts, and a second adds the partial sums.


COMBINE_BLOCK_N = 256  # columns of y of a program of the second launch
COMBINE_STEPS = 12  # the second launch takes as long as so many tiles of a program
MAX_SPLIT_K = 8


def choose_split(tiles: int, steps: int, programs: int) -> int:
    """The number of parts of K for the shortest time, for so many tiles of y, steps of the loop over K, and programs at
    a time, one on each multiprocessor."""

    def time(split_k: int) -> int:  # of the programs of one multiprocessor, in steps
        combine = COMBINE_STEPS if split_k > 1 else 0
        return cdiv(tiles * split_k, programs) * cdiv(steps, split_k) + combine

    return min(range(1, MAX_SPLIT_K + 1), key=time)


def cut(k: int, step: int, split_k: int) -> tuple[int, int]:
    """Elements of K in each of at most `split_k` parts, a multiple of `step`, and the number of parts."""
    k_per_split = cdiv(cdiv(k, step), split_k) * step
    return k_per_split, cdiv(k, k_per_split)


def add_partials(
    partials: Tensor, s_a: Tensor | None, s_b: Tensor | None, bias: Tensor | None, residual: Tensor | None, y: Tensor
) -> None:
    """Add the float32 sums [parts, M, N] of all parts of K in their order, and store them to y."""
    split_k, m, n = partials.shape
    launcher(_combine_kernel, (cdiv(n, COMBINE_BLOCK_N), m))(
        partials, s_a, s_b, bias, residual, y, m, n, SPLIT_K=split_k, BLOCK_N=COMBINE_BLOCK_N,
        STRIDE_SCALE_A=_stride(s_a), STRIDE_SCALE_B=_stride(s_b), num_warps=4,
    )  # fmt: skip


@triton.jit
def _combine_kernel(
    partials_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr, M, N,
    SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr, STRIDE_SCALE_A: tl.constexpr, STRIDE_SCALE_B: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    m = tl.program_id(1)
    offs_n = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        acc += tl.load(partials_ptr + (split * M + m).to(tl.int64) * N + offs_n)
    if scale_a_ptr is not None:
        acc *= tl.load(scale_a_ptr + m * STRIDE_SCALE_A)
    if scale_b_ptr is not None:
        acc *= tl.load(scale_b_ptr + offs_n * STRIDE_SCALE_B)
    store_sums(acc, m, offs_n, y_ptr, bias_ptr, residual_ptr, N)


def empty_product(y: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y [M, N] of K = 0, or without elements: the bias, and the residual."""
    y = y.zero_() if bias is None else y.copy_(bias.expand(y.shape))
    return y if residual is None else y + residual
