"""The scaled GEMM of large M with scales in groups along K, for Hopper, in Gluon, Triton's language of one level below.

    y[M,N] = sum over g of (a_g[M,G] @ b_g[N,G]^T) * s_a[M,g] * s_b[N,g]  + bias, rounded; + residual, rounded again

The formula and its arithmetic are those of `block_scaled_kernel`. There a group's tile is copied by itself, in rows of
as few as 32 bytes, and the tensor core waits while its sums are scaled. Here

    the tensor memory accelerator copies tiles of 128 bytes of K, and the tensor core reads groups as slices of them
    the product of one group runs while the sums of the group before it are scaled: each has registers of its own
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.numerics.granularity import Granularity
from octavo.ops.compiling import running
from octavo.ops.gemm.backend import LARGE_M
from octavo.ops.launching import allocate
from octavo.ops.triton_support import cdiv

BLOCK_M = BLOCK_N = BLOCK_K = 128
STAGES, WARPS = 5, 8
NEIGHBOURS = 8  # tiles along N that run beside each other and share a, which the L2 cache then holds


def takes(a: Tensor, granularity_a: Granularity, b: Tensor, granularity_b: Granularity) -> bool:
    """Whether the kernel computes a [M, K] @ b [N, K]^T: groups in both, a large M, rows of a multiple of 16 bytes."""
    large = a.shape[0] >= LARGE_M and min(b.shape) > 0 and a.shape[1] % 16 == 0
    return large and granularity_a == granularity_b and granularity_a.rows == 1 and _is_hopper(a.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    group: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None,
) -> Tensor:
    """Same as `scaled_mm` of the operation, for groups of `group` elements along K in both operands."""
    (m, k), n = a.shape, b.shape[0]
    y = allocate(a, (m, n), out_dtype)
    if running.get() is not None:  # compiled at its first launch
        return y
    grid = (cdiv(m, BLOCK_M) * cdiv(n, BLOCK_N),)
    _kernel[grid](
        _descriptor(a), _descriptor(b), _by_group(scale_a), _by_group(scale_b), bias, residual, y, m, n, k,
        cdiv(k, group), GROUP=group, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, NEIGHBOURS=NEIGHBOURS,
        STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return y


def _descriptor(data: Tensor) -> TensorDescriptor:
    """What the tensor memory accelerator copies tiles of [128, 128] by. Beyond the edges it writes zeros."""
    dtype = gl.float8e5 if data.dtype == torch.float8_e5m2 else gl.float8e4nv
    block = [BLOCK_M, BLOCK_K]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    aligned = data.contiguous()
    return TensorDescriptor.from_tensor(aligned if aligned.data_ptr() % 16 == 0 else aligned.clone(), block, layout)


def _by_group(scale: Tensor) -> Tensor:
    """The scales [rows, groups] as float32 [groups, rows]: those of one group are adjacent."""
    return scale.float().t().contiguous()


@gluon.jit
def _kernel(
    a_desc, b_desc, scale_a_ptr, scale_b_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, num_groups,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NEIGHBOURS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = BLOCK_K // GROUP  # of a step
    per_band = NEIGHBOURS * gl.cdiv(M, BLOCK_M)
    pid = gl.program_id(0)
    first_n = pid // per_band * NEIGHBOURS
    width = gl.minimum(gl.cdiv(N, BLOCK_N) - first_n, NEIGHBOURS)
    start_m = pid % per_band // width * BLOCK_M
    start_n = (first_n + pid % per_band % width) * BLOCK_N

    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()

    # Two sets of scales in shared memory: of this step, and of the one that slower warps may still read.
    adjacent: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_scales = ()
    b_scales = ()
    for _ in gl.static_range(GROUPS):
        a_scales = a_scales + (gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], adjacent),)  # type: ignore[assignment]
        b_scales = b_scales + (gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], adjacent),)  # type: ignore[assignment]
    loaded: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    rows_a = start_m + gl.arange(0, BLOCK_M, loaded)
    rows_b = start_n + gl.arange(0, BLOCK_N, loaded)

    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 32])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, sums)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, sums)
    steps = gl.cdiv(K, BLOCK_K)
    for i in gl.static_range(STAGES - 1):
        _copy(a_desc, b_desc, a_tiles, b_tiles, barriers, start_m, start_n, i, i, i < steps)
    s_a = _load_scales(scale_a_ptr, rows_a, M, steps * 0, num_groups, GROUPS)
    s_b = _load_scales(scale_b_ptr, rows_b, N, steps * 0, num_groups, GROUPS)
    for step in range(steps):
        for i in gl.static_range(GROUPS):
            a_scales[i].index(step % 2).store(s_a[i])
            b_scales[i].index(step % 2).store(s_b[i])
        s_a = _load_scales(scale_a_ptr, rows_a, M, (step + 1) * GROUPS, num_groups, GROUPS)
        s_b = _load_scales(scale_b_ptr, rows_b, N, (step + 1) * GROUPS, num_groups, GROUPS)
        stage = step % STAGES
        mbarrier.wait(barriers.index(stage), step // STAGES & 1)
        a = a_tiles.index(stage)
        b = b_tiles.index(stage)
        products = _multiply(a, b, none, 0, GROUP)
        for i in gl.static_range(GROUPS):
            v_a = a_scales[i].index(step % 2).load(gl.SliceLayout(1, sums))  # type: ignore[var-annotated]
            v_b = b_scales[i].index(step % 2).load(gl.SliceLayout(0, sums))
            if i + 1 < GROUPS:
                following = _multiply(a, b, none, i + 1, GROUP)
                found = warpgroup_mma_wait(1, deps=(products,))  # one may still run
                acc += found * (v_a[:, None] * v_b[None, :])
                products = following
            else:
                found = warpgroup_mma_wait(0, deps=(products,))
                ahead = step + STAGES - 1  # into the tiles of the step before, which every warp has multiplied
                _copy(
                    a_desc, b_desc, a_tiles, b_tiles, barriers, start_m, start_n, ahead, ahead % STAGES, ahead < steps
                )
                acc += found * (v_a[:, None] * v_b[None, :])
    _store(acc, bias_ptr, residual_ptr, y_ptr, start_m, start_n, M, N, BLOCK_M, BLOCK_N, num_warps)


@gluon.jit
def _copy(a_desc, b_desc, a_tiles, b_tiles, barriers, start_m, start_n, step, stage, pred):
    """Begin to copy the tiles of `step` to `stage`, if `pred`. The barrier of the stage opens when they are there."""
    barrier = barriers.index(stage)
    start_k = step * a_desc.block_shape[1]
    mbarrier.expect(barrier, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred)
    tma.async_copy_global_to_shared(a_desc, [start_m, start_k], barrier, a_tiles.index(stage), pred)
    tma.async_copy_global_to_shared(b_desc, [start_n, start_k], barrier, b_tiles.index(stage), pred)


@gluon.jit
def _load_scales(ptr, rows, ROWS, first, num_groups, GROUPS: gl.constexpr):
    """The scales of `rows` in the groups from `first` on: a tuple of vectors, zero beyond the edges."""
    found = ()
    for i in gl.static_range(GROUPS):
        g = first + i
        s = gl.load(ptr + g.to(gl.int64) * ROWS + rows, (rows < ROWS) & (g < num_groups), other=0.0)
        found = found + (s,)  # type: ignore[assignment]
    return found


@gluon.jit
def _multiply(a, b, none, i: gl.constexpr, GROUP: gl.constexpr):
    """Begin the product of group i of two tiles."""
    a_group = a.slice(i * GROUP, GROUP, 1)
    b_group = b.slice(i * GROUP, GROUP, 1).permute((1, 0))
    return warpgroup_mma(a_group, b_group, none, use_acc=False, is_async=True)


@gluon.jit
def _store(
    acc, bias_ptr, residual_ptr, y_ptr, start_m, start_n, M, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    lanes: gl.constexpr = BLOCK_N // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])
    offs_m = start_m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    offs = offs_m.to(gl.int64)[:, None] * N + offs_n[None, :]
    y = gl.convert_layout(acc, layout)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + offs_n, offs_n < N, other=0.0).to(gl.float32)[None, :]
    if residual_ptr is not None:
        y = y.to(y_ptr.dtype.element_ty).to(gl.float32) + gl.load(residual_ptr + offs, mask, other=0.0).to(gl.float32)
    gl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask)
