"""The weight-only GEMM as Triton kernels. With a small M it takes as long as reading w_q [N, K], a byte an element.

    y[M,N] = (x[M,K] @ w_q[N,K]^T) * s_w[N] + bias, rounded; + residual[M,N], rounded again

x and the products are BF16 or FP16, the sums float32. E4M3 fits in both, so widening w_q is exact. Scales of groups
along K multiply the sum over each group.

M = 1 (GEMV): a program multiplies whole rows of w_q with x in float32 registers, and sums at the end. Larger M: the
tensor core computes w_q @ x^T. Its first operand comes from registers, where w_q is widened. If N has too few tiles for
the multiprocessors, K is split, and a second launch adds the partial sums in a fixed order.

GPUs before Ada (8.9) have no instruction that converts E4M3. There the kernels read bytes and widen four at a time by
integer instructions (`_WIDEN_BF16`, `WIDEN_FP16`).
"""

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.qtensor import Granularity
from octavo.ops.kernels.gemm import (
    COMBINE_BLOCK_N,
    Tiling,
    choose_split,
    combine_kernel,
    cut,
    empty_product,
    largest_block_k,
    store_sums,
)
from octavo.ops.launching import allocate, cdiv, has_kernels, multiprocessors, power_of_two_above, shared_memory
from octavo.ops.registration import launcher

MAX_BLOCK_M = 128


def weight_only_mm(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    granularity: Granularity,
    bias: Tensor | None,
    residual: Tensor | None,
    tiling: Tiling | None = None,
    native: bool | None = None,
) -> Tensor:
    """Same as `weight_only_mm` of the operation, for x in BF16 or FP16 and a contiguous residual.

    tiling: None chooses one.
    native: whether the GPU converts E4M3 by an instruction; None asks it.
    """
    (m, k), n = x.shape, w.shape[0]
    x, w, scale = x.contiguous(), w.contiguous(), readable_scale(scale)
    y = allocate(x, (m, n))
    if y.numel() == 0 or k == 0:
        return empty_product(y, bias, residual)
    w = w if (has_kernels(x.device) if native is None else native) else w.view(torch.uint8)
    group = granularity.cols or 0
    block_n, block_k, stages, warps, split_k = tiling or choose(m, n, k, group, x.device)
    tile = {
        "SCALE_ROWS": granularity.rows or n, "STRIDE_SCALE": scale.shape[1], "GROUP": group,
        "BLOCK_N": block_n, "BLOCK_K": block_k, "NUM_STAGES": stages, "num_warps": warps,
    }  # fmt: skip
    tiles = cdiv(n, block_n)
    if m == 1:
        launcher(_row_kernel, (tiles,))(x, w, scale, bias, residual, y, n, K=k, **tile)
        return y
    k_per_split, split_k = cut(k, block_k, split_k)
    partials = allocate(x, (split_k, m, n), torch.float32) if split_k > 1 else None
    block_m = min(MAX_BLOCK_M, max(16, power_of_two_above(m)))
    launcher(_tile_kernel, (cdiv(m, block_m), tiles, split_k))(  # the programs that read the same w_q run together
        x, w, scale, bias, residual, y, partials, m, n, K=k, K_PER_SPLIT=k_per_split, BLOCK_M=block_m, **tile
    )
    if partials is not None:
        launcher(combine_kernel, (cdiv(n, COMBINE_BLOCK_N), m))(
            partials, None, None if group else scale, bias, residual, y, m, n, SPLIT_K=split_k,
            BLOCK_N=COMBINE_BLOCK_N, STRIDE_SCALE_A=0, STRIDE_SCALE_B=int(scale.shape[0] > 1), num_warps=4,
        )  # fmt: skip
    return y


def dequantize(
    w: Tensor, scale: Tensor, granularity: Granularity, dtype: torch.dtype, native: bool | None = None
) -> Tensor:
    """w * scale, computed in float32 and rounded to `dtype`, [N, K]."""
    (n, k), scale = w.shape, readable_scale(scale)
    wide = allocate(scale, (n, k), dtype)
    if wide.numel() == 0:
        return wide
    w = w.contiguous()
    w = w if (has_kernels(w.device) if native is None else native) else w.view(torch.uint8)
    block_n, block_k = 16, 256
    launcher(_dequantize_kernel, (cdiv(k, block_k) * cdiv(n, block_n),))(  # a stack has too many rows for axis 1
        w, scale, wide, n, k, SCALE_ROWS=granularity.rows or n, SCALE_COLS=granularity.cols or k,
        STRIDE_SCALE=scale.shape[1], BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return wide


def widened_mm(x: Tensor, w: Tensor, scale: Tensor, granularity: Granularity, offsets: Tensor) -> Tensor:
    """PyTorch's grouped product of x [M, K] and the widened w [E, N, K] in BF16, for matrices of whole blocks."""
    wide = dequantize(w.flatten(0, 1), scale.flatten(0, 1), granularity, torch.bfloat16).view(w.shape)
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = F.grouped_mm(x.contiguous(), wide.transpose(1, 2), offs=offsets)  # [M_e,K] @ [N,K]^T
    return y


def readable_scale(scale: Tensor) -> Tensor:
    """A scale in E8M0 as bytes: Triton has no such dtype."""
    return (scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale).contiguous()


@cache
def choose(m: int, n: int, k: int, group: int, device: torch.device) -> Tiling:
    """The tiling for y [m, n] and K = k on `device`."""
    return tiling_for(m, n, k, group, multiprocessors(device), shared_memory(device))


def tiling_for(m: int, n: int, k: int, group: int, programs: int, shared: int) -> Tiling:
    """The tiling for y [m, n] and K = k on a GPU of `programs` multiprocessors, each with `shared` bytes of shared
    memory. group: elements along K that share a scale, 0 for all."""
    if m == 1:
        block_k = group or largest_block_k(k, 512)
        return Tiling(4096 // block_k if group else 8, block_k, stages=4, warps=4)
    # Each program reads its part of x from the L2 cache: the more rows of w_q it has, the fewer read the same. A group
    # of 4 warps multiplies 64 rows; with more, the tensor core would wait for each product.
    block_m = min(MAX_BLOCK_M, max(16, power_of_two_above(m)))
    block_n, warps = (64, 4) if block_m <= 32 else (128, 8)
    block_k = group or largest_block_k(k, 256 if block_m <= 32 else 128 if block_m <= 64 else 64)
    stages = max(2, min(4, shared // (block_k * (block_n + 2 * block_m))))
    tiles, steps = cdiv(n, block_n) * cdiv(m, block_m), cdiv(k, block_k)
    split_k = choose_split(tiles, steps, programs) if tiles < programs else 1
    return Tiling(block_n, block_k, stages, warps, split_k)


# Four bytes s eeee mmm in a register become two registers of two numbers each. A byte moves into the upper half of its
# 16 bits (prmt), and its exponent and mantissa to the place that they have in the wider format. The result is the
# number times a power of two, subnormals included, and the last instruction takes this power out. The code of NaN, all
# ones, is the only one that carries into the next bit when one is added; then the exponent is filled up.
# They are one line each: Inductor writes kernels into a file, and a line break within a string ends it there.
_WIDEN_BF16 = tl.constexpr(
    "{ .reg .b32 b, m, t, two, zero; mov.b32 two, 0x7B807B80; mov.b32 zero, 0x80008000; "
    "prmt.b32 b, 0, $2, 0x5040; and.b32 m, b, 0x7F007F00; shr.b32 m, m, 4; add.u32 t, m, 0x00100010; "
    "and.b32 t, t, 0x08000800; mad.lo.u32 m, t, 15, m; lop3.b32 m, b, 0x80008000, m, 0xEA; "
    "fma.rn.bf16x2 $0, m, two, zero; "
    "prmt.b32 b, 0, $2, 0x7060; and.b32 m, b, 0x7F007F00; shr.b32 m, m, 4; add.u32 t, m, 0x00100010; "
    "and.b32 t, t, 0x08000800; mad.lo.u32 m, t, 15, m; lop3.b32 m, b, 0x80008000, m, 0xEA; "
    "fma.rn.bf16x2 $1, m, two, zero; }"
)
WIDEN_FP16 = tl.constexpr(
    "{ .reg .b32 b, m, t, two; mov.b32 two, 0x5C005C00; "
    "prmt.b32 b, 0, $2, 0x5040; and.b32 m, b, 0x7F007F00; shr.b32 m, m, 1; add.u32 t, m, 0x00800080; "
    "and.b32 t, t, 0x40004000; add.u32 m, m, t; lop3.b32 m, b, 0x80008000, m, 0xEA; mul.rn.f16x2 $0, m, two; "
    "prmt.b32 b, 0, $2, 0x7060; and.b32 m, b, 0x7F007F00; shr.b32 m, m, 1; add.u32 t, m, 0x00800080; "
    "and.b32 t, t, 0x40004000; add.u32 m, m, t; lop3.b32 m, b, 0x80008000, m, 0xEA; mul.rn.f16x2 $1, m, two; }"
)


@triton.jit
def _widen(w, DTYPE: tl.constexpr):
    """Numbers of E4M3, or their bytes, in `DTYPE`, exactly."""
    if w.dtype == tl.uint8:
        if tl.float16 == DTYPE:
            wide = tl.inline_asm_elementwise(WIDEN_FP16, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4)
        else:
            wide = tl.inline_asm_elementwise(_WIDEN_BF16, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
        wide = wide.to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        wide = w.to(tl.float32).to(tl.bfloat16)  # the direct conversion runs at a quarter of the rate, from Hopper on
    else:
        wide = w.to(DTYPE)
    return wide


@triton.jit
def _widen_scale(scale):
    """A scale as float32; the byte e + 127 of E8M0 stands for 2^e."""
    if scale.dtype == tl.uint8:
        scale = tl.maximum(scale.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _row_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr, N,
    K: tl.constexpr, SCALE_ROWS: tl.constexpr, STRIDE_SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    offs_n = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    offs_k = tl.arange(0, BLOCK_K)
    w_row_ptr = w_ptr + offs_n.to(tl.int64) * K
    offs_scale = offs_n // SCALE_ROWS * STRIDE_SCALE
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptr + k + offs_k)
            w = tl.load(w_row_ptr[:, None] + (k + offs_k)[None, :])
        else:
            mask_k = k + offs_k < K
            x = tl.load(x_ptr + k + offs_k, mask_k, other=0.0)
            w = tl.load(w_row_ptr[:, None] + (k + offs_k)[None, :], mask_k[None, :], other=0.0)
        product = _widen(w, tl.float32) * x.to(tl.float32)[None, :]
        if GROUP:
            product *= _widen_scale(tl.load(scale_ptr + offs_scale + k // GROUP))[:, None]
        acc += product
    total = tl.sum(acc, 1)
    if not GROUP:
        total *= tl.load(scale_ptr + offs_scale)
    store_sums(total, 0, offs_n, y_ptr, None, bias_ptr, residual_ptr, N, 0)


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr, partials_ptr, M, N,
    K: tl.constexpr, K_PER_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    SCALE_ROWS: tl.constexpr, STRIDE_SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    offs_n = tl.minimum(tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    start_k = tl.program_id(2) * K_PER_SPLIT
    acc = sum_products(
        x_ptr, w_ptr, scale_ptr, offs_m, offs_n, M, start_k, tl.minimum(start_k + K_PER_SPLIT, K),
        K, BLOCK_M, SCALE_ROWS, STRIDE_SCALE, GROUP, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    if partials_ptr is not None:
        offs = (tl.program_id(2) * M + offs_m).to(tl.int64)[None, :] * N + offs_n[:, None]
        tl.store(partials_ptr + offs, acc, mask_m[None, :])
    else:
        if not GROUP:
            acc *= tl.load(scale_ptr + offs_n // SCALE_ROWS * STRIDE_SCALE)[:, None]
        store_sums(acc, offs_m.to(tl.int64)[None, :], offs_n[:, None], y_ptr, None, bias_ptr, residual_ptr, N, 0,
                   mask_m[None, :])  # fmt: skip


@triton.jit
def sum_products(
    x_ptr, w_ptr, scale_ptr, offs_m, offs_n, end_m, start_k, end_k,
    K: tl.constexpr, BLOCK_M: tl.constexpr, SCALE_ROWS: tl.constexpr, STRIDE_SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_N, BLOCK_M] over K from start_k to end_k, for rows `offs_m` of x, of which those before `end_m`
    count, and rows `offs_n` of w, all of them within w. Scales of groups are multiplied in, others are not."""
    offs_k = tl.arange(0, BLOCK_K)
    w_row_ptr = w_ptr + offs_n.to(tl.int64) * K
    x_row_ptr = x_ptr + tl.minimum(offs_m, end_m - 1).to(tl.int64) * K  # rows behind the end are not stored
    offs_scale = offs_n // SCALE_ROWS * STRIDE_SCALE
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(start_k, end_k, BLOCK_K, num_stages=NUM_STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_row_ptr[:, None] + (k + offs_k)[None, :])
            x = tl.load(x_row_ptr[None, :] + (k + offs_k)[:, None])
        else:
            w = tl.load(w_row_ptr[:, None] + (k + offs_k)[None, :], (k + offs_k < K)[None, :], other=0.0)
            x = tl.load(x_row_ptr[None, :] + (k + offs_k)[:, None], (k + offs_k < K)[:, None], other=0.0)
        if GROUP:
            product = tl.dot(_widen(w, x.dtype), x)  # [N,K] @ [K,M]
            acc += product * _widen_scale(tl.load(scale_ptr + offs_scale + k // GROUP))[:, None]
        else:
            acc = tl.dot(_widen(w, x.dtype), x, acc)  # [N,K] @ [K,M]
    return acc


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
    scale = _widen_scale(tl.load(scale_ptr + offs_scale, mask, other=0.0))
    wide = _widen(tl.load(w_ptr + offs, mask, other=0.0), tl.float32) * scale
    tl.store(wide_ptr + offs, wide.to(wide_ptr.dtype.element_ty), mask)
