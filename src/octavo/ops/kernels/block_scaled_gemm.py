"""The scaled GEMM with scales that vary along K, as Triton kernels.

    y[M,N] = sum over g of (a_g[M,G] @ b_g[N,G]^T) * s_a[M,g] * s_b[N,g]  + bias, rounded; + residual, rounded again

A group g of G elements of K has one tensor-core product, whose partial sum is multiplied by the scales and added to a
float32 sum. A step of the loop multiplies several groups. As in the kernels of small M, the tensor core computes
b @ a^T, and K is split where y has too few tiles for the multiprocessors.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kernels.device_math import scale_of_exponent
from octavo.ops.kernels.gemm import add_partials, choose_split, cut, empty_product, store_sums
from octavo.ops.kernels.weight_only import dequantize
from octavo.ops.launching import Operands, allocate, cdiv, multiprocessors, power_of_two_above, shared_memory
from octavo.ops.library_gemms import ALIGNMENT
from octavo.ops.registration import launcher

SMALL_M = 64  # up to which a tile has all rows of a
NEIGHBOURS = 8  # tiles along N that run beside each other and share a, which the L2 cache then holds


class Tiling(NamedTuple):
    """Rows of b and of a in a tile, groups of K in a step, loads in flight, warps, and parts that K is split into."""

    block_n: int
    block_m: int
    groups: int
    stages: int
    warps: int
    split_k: int = 1


def scaled_mm(
    operands: Operands, bias: Tensor | None, out_dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """Same as `scaled_mm` of the operation, for a in groups along K and b in the same groups, or in square blocks."""
    a, b, scale_a, scale_b, by_a, by_b = operands
    (m, n), group = (a.shape[0], b.shape[0]), by_a.cols or 1
    a, b = _aligned(a), _aligned(b)
    scale_a, scale_b = readable_scale(scale_a, m), readable_scale(scale_b, m)
    k = a.shape[1]
    y = allocate(a, (m, n), out_dtype)
    if y.numel() == 0 or k == 0:
        return empty_product(y, bias, residual)
    extra = bias, residual, y
    block_n, block_m, groups, stages, warps, split_k = choose(m, n, k, group, a.device)
    step = groups * group
    k_per_split, split_k = cut(k, step, split_k)
    partials = allocate(y, (split_k, m, n), torch.float32) if split_k > 1 else None
    launcher(_tile_kernel, (cdiv(n, block_n) * cdiv(m, block_m), split_k))(
        a, b, scale_a, scale_b, *extra, partials, m, n, k, k_per_split,
        GROUP=group, ROWS_B=by_b.rows or 1, GROUPS=groups, EVEN_K=k % step == 0,
        BLOCK_M=block_m, BLOCK_N=block_n, NEIGHBOURS=NEIGHBOURS, NUM_STAGES=stages, num_warps=warps,
    )  # fmt: skip
    if partials is not None:
        add_partials(partials, None, None, *extra)
    return y


def dequantized_mm(operands: Operands, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Same as `scaled_mm`, by PyTorch's BF16 product of the operands times their scales, rounded to BF16.

    E4M3 times E8M0 is exact there. A float32 scale adds an error of 2^-9, beside 2^-4 of the quantization.
    """
    a, b, scale_a, scale_b, by_a, by_b = operands
    if a.numel() == 0 or b.numel() == 0:
        return scaled_mm(operands, bias, out_dtype)
    wide_a = dequantize(a, scale_a, by_a, torch.bfloat16)
    wide_b = dequantize(b, scale_b, by_b, torch.bfloat16).t()
    with torch.autocast(a.device.type, enabled=False):
        if out_dtype == torch.float32:
            y = torch.mm(wide_a, wide_b, out_dtype=torch.float32)  # [M,K] @ [K,N]
            return y if bias is None else y.add_(bias)
        if bias is None or bias.dtype != torch.bfloat16:
            y = wide_a @ wide_b
            return (y if bias is None else y + bias).to(out_dtype)
        return torch.addmm(bias, wide_a, wide_b).to(out_dtype)


def choose(m: int, n: int, k: int, group: int, device: torch.device, groups: int = 0) -> Tiling:
    """The tiling for y [m, n] and K = k, in groups of `group`, on `device`. groups: of a step; 0 chooses."""
    few = m <= SMALL_M
    block_n, block_m = (64, max(16, power_of_two_above(m))) if few else (128, 128)
    memory = shared_memory(device)
    if not groups:
        groups = 4 if few and group < 128 else 2
        groups = groups if 2 * _bytes(group, groups, block_n, block_m) <= memory else 1
    stages = min(4, memory // _bytes(group, groups, block_n, block_m))
    programs = multiprocessors(device)
    tiles, steps = cdiv(n, block_n) * cdiv(m, block_m), cdiv(k, groups * group)
    split_k = choose_split(tiles, steps, programs) if tiles < programs else 1
    return Tiling(block_n, block_m, groups, stages, 4 if few else 8, split_k)


def _bytes(group: int, groups: int, block_n: int, block_m: int) -> int:
    """Bytes of a step in shared memory, with its scales."""
    return groups * (group + 4) * (block_n + block_m)


def _aligned(data: Tensor) -> Tensor:
    """The contiguous operand, with zeros at the end of its rows where these are no multiple of a load's 16 bytes. A
    group has a multiple of 16 elements, so the number of groups stays."""
    missing = -data.shape[1] % ALIGNMENT
    return (F.pad(data.view(torch.uint8), (0, missing)).view(data.dtype) if missing else data).contiguous()


def readable_scale(scale: Tensor, m: int) -> Tensor:
    """The contiguous scales [..., groups] as float32; E8M0 as it is for a small M, in words of four groups.

    The kernel decodes E8M0. With a large M each thread would decode a scale for every element of y that it holds.
    """
    if scale.dtype == torch.float32:
        return scale.contiguous()
    if m > SMALL_M or scale.shape[-1] % 4:
        return scale.float().contiguous()
    return scale.contiguous().view(torch.uint8).view(torch.int32)


@triton.jit
def _tile_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr, partials_ptr, M, N, K, k_per_split,
    GROUP: tl.constexpr, ROWS_B: tl.constexpr, GROUPS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NEIGHBOURS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = find_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), NEIGHBOURS)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    start_k = tl.program_id(1) * k_per_split
    acc = sum_groups(
        a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, offs_m, offs_n, pid_n, M, N, K, K, start_k,
        tl.minimum(start_k + k_per_split, K), GROUP, ROWS_B, GROUPS, EVEN_K, BLOCK_M, BLOCK_N, NUM_STAGES,
    )  # fmt: skip
    mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    rows = offs_m.to(tl.int64)[None, :]
    if partials_ptr is not None:
        tl.store(partials_ptr + (tl.program_id(1).to(tl.int64) * M + rows) * N + offs_n[:, None], acc, mask)
    else:
        store_sums(acc, rows, offs_n[:, None], y_ptr, bias_ptr, residual_ptr, N, mask)


@triton.jit
def find_tile(pid, tiles_m, tiles_n, NEIGHBOURS: tl.constexpr):
    """(pid_m, pid_n) of tile `pid`: programs go through `NEIGHBOURS` tiles of N for each tile of M."""
    per_band = NEIGHBOURS * tiles_m
    first_n = pid // per_band * NEIGHBOURS
    width = tl.minimum(tiles_n - first_n, NEIGHBOURS)
    return pid % per_band // width, first_n + pid % per_band % width


@triton.jit
def sum_groups(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, offs_m, offs_n, pid_n, end_m, N, K, stride_n, start_k, end_k,
    GROUP: tl.constexpr, ROWS_B: tl.constexpr, GROUPS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_N, BLOCK_M] over K from start_k to end_k, for a tile of rows `offs_m` of a, of which those before
    `end_m` count, and rows `offs_n` of b, the tile number `pid_n` of N, `stride_n` bytes apart."""
    offs_k = tl.arange(0, GROUP)
    # Rows behind the end of a and b are not stored, those of a are the first ones (`gemm._tile_kernel`).
    a_ptrs = a_ptr + (offs_m % end_m).to(tl.int64)[None, :] * K + offs_k[:, None]
    b_ptrs = b_ptr + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * stride_n + offs_k[None, :]
    stride = tl.cdiv(K, GROUP)
    A_FIRST: tl.constexpr = BLOCK_M >= 64 and ROWS_B > 1
    acc = tl.zeros((BLOCK_M, BLOCK_N) if A_FIRST else (BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(start_k, end_k, GROUPS * GROUP, num_stages=NUM_STAGES):
        for i in tl.static_range(GROUPS):
            g = k // GROUP + i
            if i % 2 == 0:
                s_a = _pair(scale_a_ptr, offs_m, end_m, g, stride, BLOCK_M, GROUPS, EVEN_K)
                if ROWS_B == 1:
                    s_b = _pair(scale_b_ptr, offs_n, N, g, stride, BLOCK_N, GROUPS, EVEN_K)
            at = g * GROUP
            if EVEN_K:
                b = tl.load(b_ptrs + at)
                a = tl.load(a_ptrs + at)
            else:
                mask = at + offs_k < K
                b = tl.load(b_ptrs + at, mask[None, :], other=0.0)
                a = tl.load(a_ptrs + at, mask[:, None], other=0.0)
            if ROWS_B == 1:
                acc += tl.dot(b, a) * (s_b[i % 2][:, None] * s_a[i % 2][None, :])  # [N,G] @ [G,M]
            else:
                tl.static_assert(ROWS_B % BLOCK_N == 0, "a tile must lie in one row of blocks")
                s = tl.load(scale_b_ptr + pid_n * BLOCK_N // ROWS_B * stride + g, EVEN_K or g < stride, other=0.0)
                s *= s_a[i % 2]
                if A_FIRST:
                    acc += tl.dot(tl.trans(a), tl.trans(b)) * s[:, None]  # [M,G] @ [G,N]
                else:
                    acc += tl.dot(b, a) * s[None, :]  # [N,G] @ [G,M]
    if A_FIRST:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _pair(ptr, offs_row, ROWS, g, stride, BLOCK: tl.constexpr, GROUPS: tl.constexpr, EVEN_K: tl.constexpr):
    """The scales of rows `offs_row` in the groups g and g + 1, two vectors [BLOCK]; of g alone if GROUPS is 1.

    They are loaded together: a vector alone would be loaded by every thread that needs a part of it, one by one.
    """
    COUNT: tl.constexpr = min(GROUPS, 2)
    mask = offs_row < ROWS
    if ptr.dtype.element_ty == tl.float32:
        offs_g = g + tl.arange(0, COUNT)
        mask_pair = mask[:, None] if EVEN_K else mask[:, None] & (offs_g < stride)[None, :]
        scales = tl.load(ptr + offs_row[:, None] * stride + offs_g[None, :], mask_pair, other=0.0)
        if COUNT == 2:
            pair = tl.split(scales)
        else:
            pair = (tl.reshape(scales, (BLOCK,)),)
    else:  # a word has the exponents of four groups
        word = tl.load(ptr + offs_row * (stride // 4) + g // 4, mask, other=0)
        pair = (scale_of_exponent((word >> g % 4 * 8) & 255), scale_of_exponent((word >> (g % 4 + 1) * 8) & 255))
    return pair
