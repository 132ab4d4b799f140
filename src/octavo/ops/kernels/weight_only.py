"""The weight-only GEMM as Triton kernels. With a small M it takes as long as reading w_q [N, K], a byte an element.

    y[M,N] = (x[M,K] @ w_q[N,K]^T) * s_w[N] + bias, rounded; + residual[M,N], rounded again

x and the products are BF16 or FP16, the sums float32. E4M3 fits in both, so widening w_q is exact. Scales of groups
along K multiply the sum over each group.

The kernels are those of the scaled GEMM of small M (`kernels/gemm.py`). Where the tensor core multiplies, its first
operand comes from registers, in which w_q is widened.

GPUs before Ada (8.9) have no instruction that converts E4M3. There the kernels read bytes and widen four at a time by
integer instructions (`device_math.widen`).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.qtensor import Granularity
from octavo.ops.kernels.device_math import widen, widen_scale
from octavo.ops.kernels.gemm import MAX_BLOCK_M, Tiling, choose_split, largest_block_k, multiply
from octavo.ops.launching import (
    ALONE,
    Around,
    allocate,
    cdiv,
    has_kernels,
    multiprocessors,
    power_of_two_above,
    shared_memory,
)
from octavo.ops.registration import launcher


def weight_only_mm(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    granularity: Granularity,
    bias: Tensor | None,
    residual: Tensor | None,
    around: Around = ALONE,
    native: bool | None = None,
) -> Tensor:
    """Same as `weight_only_mm` of the operation, for x in BF16 or FP16 and a contiguous residual.

    native: whether the GPU converts E4M3 by an instruction; None asks it.
    """
    (m, k), n, scale, group = x.shape, w.shape[0], readable_scale(scale), granularity.cols or 0
    n = n // 2 if around.gated else n
    w = w if (has_kernels(x.device) if native is None else native) else w.view(torch.uint8)
    added = bias, residual, allocate(x, (m, n))
    tiling = choose(m, n, k, group, x.device)
    return multiply(x, w, None, scale, *added, tiling, scale_rows=granularity.rows or 1, group=group, around=around)


def dequantize(w: Tensor, scale: Tensor, by: Granularity, dtype: torch.dtype, native: bool | None = None) -> Tensor:
    """w * scale, computed in float32 and rounded to `dtype`, [N, K]."""
    (n, k), scale = w.shape, readable_scale(scale)
    wide = allocate(scale, (n, k), dtype)
    if wide.numel() == 0:
        return wide
    w = w.contiguous()
    w = w if (has_kernels(w.device) if native is None else native) else w.view(torch.uint8)
    block_n, block_k = 16, 256
    launcher(_dequantize_kernel, (cdiv(k, block_k) * cdiv(n, block_n),))(  # a stack has too many rows for axis 1
        w, scale, wide, n, k, SCALE_ROWS=by.rows or n, SCALE_COLS=by.cols or k,
        STRIDE_SCALE=scale.shape[1], BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return wide


def widened_mm(x: Tensor, w: Tensor, scale: Tensor, granularity: Granularity, offsets: Tensor) -> Tensor:
    """PyTorch's grouped product of x [M, K] and the widened w [E, N, K] in BF16, for matrices of whole blocks."""
    wide = dequantize(w.flatten(0, 1), scale.flatten(0, 1), granularity, torch.bfloat16).view(w.shape)
    with torch.autocast(x.device.type, enabled=False):
        return F.grouped_mm(x.contiguous(), wide.transpose(1, 2), offs=offsets)  # [M_e,K] @ [N,K]^T


def readable_scale(scale: Tensor) -> Tensor:
    """A scale in E8M0 as bytes: Triton has no such dtype."""
    return (scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale).contiguous()


def choose(m: int, n: int, k: int, group: int, device: torch.device) -> Tiling:
    """The tiling for y [m, n] and K = k on `device`. group: elements along K that share a scale, 0 for all."""
    if m == 1:
        block_k = group or largest_block_k(k, 512)
        return Tiling(4096 // block_k if group else 8, block_k, stages=5, warps=4 if group else 2)
    # Each program reads its part of x from the L2 cache: the more rows of w_q it has, the fewer read the same. A group
    # of 4 warps multiplies 64 rows; with more, the tensor core would wait for each product.
    block_m = min(MAX_BLOCK_M, max(16, power_of_two_above(m)))
    block_n, warps = (64, 4) if block_m <= 32 else (128, 8)
    block_k = group or largest_block_k(k, 256 if block_m <= 32 else 128 if block_m <= 64 else 64)
    stages = max(2, min(4, shared_memory(device) // (block_k * (block_n + 2 * block_m))))
    tiles, steps = cdiv(n, block_n) * cdiv(m, block_m), cdiv(k, block_k)
    programs = multiprocessors(device)
    split_k = choose_split(tiles, steps, programs) if tiles < programs else 1
    return Tiling(block_n, block_k, stages, warps, split_k)


@triton.jit
def _dequantize_kernel(
    w_ptr, scale_ptr, wide_ptr, N, K, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, STRIDE_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BLOCK_K)
    offs_n = tl.program_id(0) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_n < N)[:, None] & (offs_k < K)[None, :]
    offs = offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    offs_scale = (offs_n // SCALE_ROWS * STRIDE_SCALE)[:, None] + (offs_k // SCALE_COLS)[None, :]
    scale = widen_scale(tl.load(scale_ptr + offs_scale, mask, other=0.0))
    wide = widen(tl.load(w_ptr + offs, mask, other=0.0), tl.float32) * scale
    tl.store(wide_ptr + offs, wide.to(wide_ptr.dtype.element_ty), mask)
