"""The INT8 GEMM as Triton kernels, equal to the reference in every byte.

    y[M,N] = float32(a[M,K] @ b[N,K]^T) * s_a[M] * s_b[N] + bias[N], rounded; + residual[M,N], rounded again

The tensor cores multiply int8 and add in int32. If y has too few tiles for the multiprocessors, K is split (split-K),
and a second launch adds the partial sums. These are integers, so their order does not matter.

From 65 rows on cuBLASLt makes the sums, by `torch._int_mm`, and the second launch scales them: our tiles took 1.8 times
as long for 512 rows and 4 times as long for 8,192 (H200, bench.gpu.linears). The sums fill a buffer of at most 256 MB.

For a small M the rows of a tile are those of b, since a tensor-core instruction needs at least 64 rows on Hopper, and
M is padded to 16 columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kernels.block_scaled_gemm import find_tile
from octavo.ops.kernels.device_math import add
from octavo.ops.kernels.gemm import COMBINE_BLOCK_N, choose_split, cut, empty_product, largest_block_k
from octavo.ops.launching import Operands, allocate, cdiv, multiprocessors, power_of_two_above, shared_memory
from octavo.ops.registration import launcher

MAX_SMALL_M = 64  # up to it, the rows of a tile are those of b
MAX_SUMS = 1 << 26  # int32 sums of cuBLASLt that are scaled at once
GROUP_M = 8  # rows of tiles that run together, so that they read the same part of b from the L2 cache


def int8_mm(operands: Operands, bias: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Same as `int8_mm_reference`, for contiguous tensors."""
    a, b, scale_a, scale_b, _, _ = operands
    (m, k), n = a.shape, b.shape[0]
    y = allocate(a, (m, n), out_dtype)
    if y.numel() == 0 or k == 0:
        return empty_product(y, bias, residual)
    if uses_cublas(m, n, k):
        # In parts of rows of equal size: the sums of all rows are never there at once, and torch._int_mm takes no fewer
        # than 17 rows.
        parts = cdiv(m, max(MAX_SUMS // n, 256))
        for i in range(parts):
            part = slice(m * i // parts, m * (i + 1) // parts)
            sums = torch._int_mm(a[part], b.t())  # [M,K] @ [K,N]
            added = None if residual is None else residual[part]
            _combine(sums[None], scale_a[part], scale_b, bias, added, y[part])
        return y
    block_m, block_n, block_k, stages, warps, split_k = choose(m, n, k, a.device)
    k_per_split, split_k = cut(k, block_k, split_k)
    partials = allocate(y, (split_k, m, n), torch.int32) if split_k > 1 else None
    launcher(_tile_kernel, (cdiv(m, block_m) * cdiv(n, block_n), split_k))(
        a, b, scale_a, scale_b, bias, residual, y, partials, m, n,
        K=k, K_PER_SPLIT=k_per_split, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M,
        ROWS_OF_B=m <= MAX_SMALL_M, NUM_STAGES=stages, num_warps=warps,
    )  # fmt: skip
    if partials is not None:
        _combine(partials, scale_a, scale_b, bias, residual, y)
    return y


def uses_cublas(m: int, n: int, k: int) -> bool:
    """True if cuBLASLt makes the sums: for many rows, of sizes that it takes."""
    return m > MAX_SMALL_M and n % 8 == 0 and k % 16 == 0


def _combine(
    partials: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor
) -> None:
    """Add the partial sums [SPLIT_K, M, N] and scale them, into y [M, N]."""
    split_k, m, n = partials.shape
    block_n = COMBINE_BLOCK_N if split_k > 1 else 4 * COMBINE_BLOCK_N  # without splits there are many rows
    launcher(_combine_kernel, (m, cdiv(n, block_n)))(  # CUDA takes at most 65,535 in y
        partials, scale_a, scale_b, bias, residual, y, m, n, SPLIT_K=split_k, BLOCK_N=block_n, num_warps=4
    )


def choose(m: int, n: int, k: int, device: torch.device) -> tuple[int, ...]:
    """For y [m, n] and K = k on `device` the rows of a and of b and the elements of K in a tile, loads in flight, warps
    of a program, and parts that K is split into. They are not measured."""
    if m <= MAX_SMALL_M:
        block_m, block_n, stages, warps = max(16, power_of_two_above(m)), 64, 4, 4
        block_k = largest_block_k(k, 256 if m <= 16 else 128)
    else:
        roomy = shared_memory(device) >= 160 * 1024 and m > 128
        block_m, block_n, stages, warps = 128, 256 if roomy else 128, 3, 8
        block_k = largest_block_k(k, 128)
    tiles = cdiv(m, block_m) * cdiv(n, block_n)
    split_k = choose_split(tiles, cdiv(k, block_k), multiprocessors(device))
    return block_m, block_n, block_k, stages, warps, split_k


@triton.jit
def _tile_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr, partials_ptr, M, N,
    K: tl.constexpr, K_PER_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, ROWS_OF_B: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    pid_n, pid_m = find_tile(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M), GROUP_M)
    offs_m, offs_n = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    offs_m, offs_n = offs_m % M, tl.minimum(offs_n, N - 1)  # the others are computed, and not stored
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    b_ptrs = b_ptr + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    start_k = tl.program_id(1) * K_PER_SPLIT
    acc = tl.zeros((BLOCK_N, BLOCK_M) if ROWS_OF_B else (BLOCK_M, BLOCK_N), tl.int32)
    for k in tl.range(start_k, tl.minimum(start_k + K_PER_SPLIT, K), BLOCK_K, num_stages=NUM_STAGES):
        if K % BLOCK_K == 0:
            a, b = tl.load(a_ptrs + k), tl.load(b_ptrs + k)
        else:
            mask = (k + offs_k < K)[None, :]
            a, b = tl.load(a_ptrs + k, mask, other=0), tl.load(b_ptrs + k, mask, other=0)
        if ROWS_OF_B:
            acc = tl.dot(b, tl.trans(a), acc, out_dtype=tl.int32)  # [N,K] @ [K,M]
        else:
            acc = tl.dot(a, tl.trans(b), acc, out_dtype=tl.int32)  # [M,K] @ [K,N]
    if ROWS_OF_B:
        offs_m, offs_n, mask = offs_m[None, :], offs_n[:, None], mask_m[None, :] & mask_n[:, None]
    else:
        offs_m, offs_n, mask = offs_m[:, None], offs_n[None, :], mask_m[:, None] & mask_n[None, :]
    offs = offs_m.to(tl.int64) * N + offs_n
    if partials_ptr is not None:
        tl.store(partials_ptr + tl.program_id(1).to(tl.int64) * M * N + offs, acc, mask)
    else:
        _store(acc, offs_m, offs_n, offs, mask, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr)


@triton.jit
def _combine_kernel(
    partials_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr, M, N,
    SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) + tl.zeros((1,), tl.int32)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    offs = offs_m.to(tl.int64) * N + offs_n
    acc = tl.zeros((BLOCK_N,), tl.int32)
    for split in tl.static_range(SPLIT_K):
        acc += tl.load(partials_ptr + tl.cast(split, tl.int64) * M * N + offs, mask, other=0)
    offs_n = tl.minimum(offs_n, N - 1)
    _store(acc, offs_m, offs_n, offs, mask, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr)


@triton.jit
def _store(acc, offs_m, offs_n, offs, mask, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr):
    """Store int32 sums to y[offs]. Each step is rounded as in the reference."""
    y = acc.to(tl.float32) * tl.load(scale_a_ptr + offs_m) * tl.load(scale_b_ptr + offs_n)
    if bias_ptr is not None:
        y = add(y, tl.broadcast_to(tl.load(bias_ptr + offs_n).to(tl.float32), y.shape))
    y = y.to(y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        y = add(y.to(tl.float32), tl.load(residual_ptr + offs, mask).to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs, y, mask)
