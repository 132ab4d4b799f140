"""Grouped GEMMs as Triton kernels: with row scales, with scales that vary along K, and weight-only."""

from itertools import starmap

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.numerics.qtensor import Granularity
from octavo.ops.kernels.block_scaled_gemm import NEIGHBOURS, SMALL_M, Tiling, find_tile, readable_scale, sum_groups
from octavo.ops.kernels.block_scaled_gemm import choose as choose_blocks
from octavo.ops.kernels.gemm import MAX_BLOCK_M, store_sums, sum_products
from octavo.ops.kernels.weight_only import choose as choose_weight_tiling
from octavo.ops.kernels.weight_only import dequantize, widened_mm
from octavo.ops.kernels.weight_only import readable_scale as readable_weight_scale
from octavo.ops.launching import Operands, allocate, cdiv, has_kernels, is_hopper, power_of_two_above, shared_memory
from octavo.ops.registration import launcher

# ---- The grouped GEMM as Triton kernels: of rows in groups, and of a reduction in groups.
#
#     y[m,N]    = (b[e] @ a[m]^T)^T * s_a[m] * s_b[e]     for the rows m of group e
#     dw[e,N,K] = (a[:,M_e] @ b[:,M_e]^T) * scale[e]      for the columns M_e of group e
#
# Programs find their group from the offsets, so nothing is read on the host. A group of rows of y has tiles of its own,
# the last of them in part empty. Groups of any size, empty ones too, take one launch, whose number of programs is the
# largest that M rows in E groups can need. The number of tiles of dw does not depend on the groups. With scales that
# vary along the reduction, the sums are those of `kernels/block_scaled_gemm.py`.
#
# The tensor cores of Ada and Hopper keep about 14 bits of a sum of FP8 products (SageAttention2, arXiv:2411.10958;
# DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Without fast accumulation a step's product of 128 elements is added to
# a float32 sum in registers, on every GPU.
#
# Hopper's copy engine (TMA) loads a tile by a descriptor of the whole tensor, without pointers or masks in registers.
# Fast sums of groups of 512 rows gain 1.2x to 1.3x by it, and those of 4,096 rows 1.03x to 1.08x (bench/log.md). In dw
# it stores too: a program sums many tiles, and loads the next one while a tile is stored. Groups of 512 gain 1.2x.


DEPTH = 128  # elements of the reduction in a step, between additions in float32
LARGE = 768  # rows from which a tile of fast sums has 256 of the right operand, and not of the left
DESCRIBED = Tiling(256, 128, 1, 4, 8)  # of fast sums that the copy engine loads
DESCRIBED_NARROW = Tiling(128, 128, 1, 3, 4)  # of those of matrices with a side below 1,024
DESCRIBED_DW = Tiling(128, 128, 1, 3, 8)  # of dw whose operands the copy engine loads
SHORT = 2048  # mean columns of a group up to which it does so
PROGRAMS = 792  # that share its tiles, six for each multiprocessor of a large Hopper: a collective may hold some


def grouped_mm(
    operands: Operands, offsets: Tensor, out_dtype: torch.dtype, fast: bool, tiling: Tiling | None = None
) -> Tensor:
    """Same as `grouped_mm` of the operation, for row scales, a in groups along K and b in the same groups, or in square
    blocks. Rows behind the groups are not written. tiling: None chooses one; its split_k has no effect."""
    a, b, scale_a, scale_b, by_a, by_b = operands
    (m, k), (e, n, _), group = a.shape, b.shape, by_a.cols or 0
    a, b = a.contiguous(), b if b.stride(2) == 1 else b.contiguous()
    rows = likely_rows(m, e)
    described = tiling is None and fast and not group and take_descriptors(a, b)
    if described:
        tiling = DESCRIBED if min(n, k) >= 1024 else DESCRIBED_NARROW
    elif tiling is None:
        tiling = choose_blocks(rows, n, k, group, a.device) if group else choose(rows, fast, a.device)
    block_n, block_m, groups, stages, warps, _ = tiling
    y, tiles_m, step = allocate(a, (m, n), out_dtype), most_tiles(m, e, block_m), group or DEPTH
    scales = readable_scale(scale_a, block_m), readable_scale(scale_b, block_m)
    given = *scales, offsets.contiguous(), y, tiles_m, e, n, k
    tile = {
        "BLOCK_E": power_of_two_above(e), "BLOCK_N": block_n, "BLOCK_M": block_m, "BLOCK_K": step,
        "NEIGHBOURS": NEIGHBOURS, "NUM_STAGES": stages, "num_warps": warps,
    }  # fmt: skip
    grid = (cdiv(n, block_n) * tiles_m,)
    if described:
        steps = _layout(b)
        blocks = (a, [block_m, step]), (b.flatten(0, 1) if steps[0] else b.transpose(0, 1).flatten(1), [block_n, step])
        launcher(_described_kernel, grid)(*starmap(TensorDescriptor.from_tensor, blocks), *given, *steps, **tile)
        return y
    launcher(_rows_kernel, grid)(
        a, b, *given, b.stride(0), b.stride(1), GROUP=group, ROWS_B=by_b.rows or 1, GROUPS=groups,
        PROMOTE=0 if fast or group else DEPTH, EVEN_K=k % (groups * step) == 0, **tile,
    )  # fmt: skip
    return y


def grouped_mm_dw(
    operands: Operands, offsets: Tensor, out_dtype: torch.dtype, fast: bool, tiling: Tiling | None = None
) -> Tensor:
    """Same as `grouped_mm_dw` of the operation, for offsets in multiples of `DEPTH`. A group may be empty. tiling: None
    chooses one. Its left operand is a."""
    a, b, scale_a, scale_b, by, _ = operands
    (n, m), k, e, group = a.shape, b.shape[0], len(offsets), by.cols or 0
    a, b, offsets, dw = a.contiguous(), b.contiguous(), offsets.contiguous(), allocate(a, (e, n, k), out_dtype)
    described = tiling is None and not group and m <= SHORT * e and has_copy_engine(dw)
    if described:
        tiling = DESCRIBED_DW
    elif tiling is None:
        tiling = choose_blocks(k, n, m, group, a.device, DEPTH // group) if group else choose(k, fast, a.device)
    block_n, block_k, _, stages, warps, _ = tiling
    scales = readable_scale(scale_a, block_k), readable_scale(scale_b, block_k) if group else None
    options = {
        "PROMOTE": None if fast else DEPTH, "BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_M": DEPTH,
        "NEIGHBOURS": NEIGHBOURS, "NUM_STAGES": stages, "num_warps": warps,
    }  # fmt: skip
    if described:
        blocks = (a, [block_n, DEPTH]), (b, [block_k // 2, DEPTH]), (dw, [1, block_n, block_k // 2])
        given = *starmap(TensorDescriptor.from_tensor, blocks), scales[0], offsets, PROGRAMS, e, n, k, m
        launcher(_described_reduction_kernel, (PROGRAMS,))(*given, BLOCK_E=power_of_two_above(e), **options)
        return dw
    launcher(_reduction_kernel, (cdiv(n, block_n) * cdiv(k, block_k), e))(
        a, b, *scales, offsets, dw, n, k, m, GROUP=group, **options
    )
    return dw


def take_descriptors(a: Tensor, b: Tensor) -> bool:
    """True if a Hopper's copy engine loads the tiles of a [M, K] and b [E, N, K] for fast sums."""
    m, k = a.shape
    fits = likely_rows(m, len(b)) > SMALL_M and k % DEPTH == 0 and any(_layout(b))
    return fits and has_copy_engine(a)


def has_copy_engine(t: Tensor) -> bool:
    """True if t has elements, which its descriptor needs, and is on a Hopper."""
    return t.numel() > 0 and is_hopper(t.device)


def _layout(b: Tensor) -> tuple[int, int]:
    """The rows and columns from a matrix of b [E, N, K] to the next, in [E * N, K] or [N, E * K]; zeros in others."""
    e, n, k = b.shape
    if b.stride() == (n * k, k, 1):
        return n, 0
    return 0, k if b.stride() == (k, e * k, 1) else 0


def choose(rows: int, fast: bool, device: torch.device) -> Tiling:
    """The tiling for so many rows of the right operand on `device`. A step takes DEPTH bytes a row in shared memory."""
    left, right, warps, memory = 128, 128, 8, shared_memory(device)
    if rows <= SMALL_M:
        left, right, warps = 64, max(16, power_of_two_above(rows)), 4
    elif fast and memory >= 3 * DEPTH * (128 + 256):  # promoted sums need a second set of registers
        left, right = (128, 256) if rows >= LARGE else (256, 128)
    return Tiling(left, right, 1, min(4, memory // (DEPTH * (left + right))), warps)


@triton.jit
def _rows_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, offsets_ptr, y_ptr, tiles_m, E, N, K, stride_e, stride_n,
    GROUP: tl.constexpr, ROWS_B: tl.constexpr, GROUPS: tl.constexpr, PROMOTE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    NEIGHBOURS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = find_tile(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), NEIGHBOURS)
    e, start_m, end_m = find_rows(offsets_ptr, pid_m, E, BLOCK_E, BLOCK_M)
    if start_m < end_m:
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m, mask_n = offs_m < end_m, offs_n < N
        b_ptr += e.to(tl.int64) * stride_e
        if GROUP:
            stride = tl.cdiv(K, GROUP)
            if scale_b_ptr.dtype.element_ty == tl.int32:  # of E8M0, a word holds four
                stride = stride // 4
            scale_b_ptr += e.to(tl.int64) * tl.cdiv(N, ROWS_B) * stride
            acc = sum_groups(
                a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, offs_m, offs_n, pid_n, end_m, N, K, stride_n, 0, K,
                GROUP, ROWS_B, GROUPS, EVEN_K, BLOCK_M, BLOCK_N, NUM_STAGES,
            )  # fmt: skip
        else:
            a_rows = a_ptr + (offs_m % end_m).to(tl.int64) * K  # rows behind the end of a and b are not
            b_rows = b_ptr + tl.minimum(offs_n, N - 1).to(tl.int64) * stride_n  # stored
            acc = sum_products(b_rows, a_rows, None, 0, K, K, EVEN_K, PROMOTE, 0, BLOCK_N, BLOCK_M, BLOCK_K, NUM_STAGES)
            acc *= tl.load(scale_a_ptr + offs_m, mask_m, other=0.0)[None, :]
            acc *= tl.load(scale_b_ptr + e.to(tl.int64) * N + offs_n, mask_n, other=0.0)[:, None]
        mask = mask_n[:, None] & mask_m[None, :]
        store_sums(acc, offs_m.to(tl.int64)[None, :], offs_n[:, None], y_ptr, None, None, N, mask)


@triton.jit
def _described_kernel(
    of_a, of_b, scale_a_ptr, scale_b_ptr, offsets_ptr, y_ptr, tiles_m, E, N, K, row_step, column_step,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    NEIGHBOURS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`_rows_kernel` with fast sums. Rows of tiles behind a group or a matrix are those of the next: not stored."""
    pid_m, pid_n = find_tile(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), NEIGHBOURS)
    e, start_m, end_m = find_rows(offsets_ptr, pid_m, E, BLOCK_E, BLOCK_M)
    if start_m < end_m:
        row, column = e * row_step + pid_n * BLOCK_N, e * column_step
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m, mask_n = offs_m < end_m, offs_n < N
        scale_a = tl.load(scale_a_ptr + offs_m, mask_m, other=0.0)  # before the sums, which take as long as the load
        scale_b = tl.load(scale_b_ptr + e.to(tl.int64) * N + offs_n, mask_n, other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            acc = tl.dot(of_a.load([start_m, at]), of_b.load([row, column + at]).T, acc)
        acc = acc * scale_a[:, None] * scale_b[None, :]
        mask = mask_m[:, None] & mask_n[None, :]
        store_sums(acc, offs_m.to(tl.int64)[:, None], offs_n[None, :], y_ptr, None, None, N, mask)


@triton.jit
def _reduction_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, offsets_ptr, dw_ptr, N, K, M,
    GROUP: tl.constexpr, PROMOTE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    NEIGHBOURS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    pid_n, pid_k = find_tile(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K), NEIGHBOURS)
    e = tl.program_id(1)
    # Known multiples, so that a load takes 16 bytes.
    start = tl.multiple_of(tl.load(offsets_ptr + e - 1, e > 0, other=0), BLOCK_M)
    end = tl.multiple_of(tl.load(offsets_ptr + e), BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_n, mask_k = offs_n < N, offs_k < K
    rows = e.to(tl.int64) * N + offs_n
    if GROUP:  # the sums have the rows of the second operand first
        acc = sum_groups(
            b_ptr, a_ptr, scale_b_ptr, scale_a_ptr, offs_k, offs_n, pid_n, K, N, M, M, start, end,
            GROUP, 1, BLOCK_M // GROUP, True, BLOCK_K, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
    else:
        a_rows = a_ptr + tl.minimum(offs_n, N - 1).to(tl.int64) * M
        b_rows = b_ptr + tl.minimum(offs_k, K - 1).to(tl.int64) * M
        scale = tl.load(scale_a_ptr + rows, mask_n, other=0.0)  # before the sums, which take as long as the load
        acc = sum_products(a_rows, b_rows, None, start, end, M, True, PROMOTE, 0, BLOCK_N, BLOCK_K, BLOCK_M, NUM_STAGES)
        acc *= scale[:, None]
    store_sums(acc, rows[:, None], offs_k[None, :], dw_ptr, None, None, K, mask_n[:, None] & mask_k[None, :])


@triton.jit
def _described_reduction_kernel(
    of_a, of_b, of_dw, scale_ptr, offsets_ptr, programs, E, N, K, M,
    PROMOTE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    NEIGHBOURS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`_reduction_kernel` with row scales. One loop has the steps of all tiles of a program. Registers hold the sums of
    a tile, and the products of one half of its columns."""
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    tiles, tile = tiles_n * tiles_k, tl.program_id(0) - programs
    offs_e = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + offs_e, offs_e < E, other=0)
    starts = tl.load(offsets_ptr + offs_e - 1, (offs_e > 0) & (offs_e < E), other=0)
    first = offs_e * tiles - tl.program_id(0)
    mine = tl.cdiv(first + tiles, programs) - tl.cdiv(first, programs)  # tiles of each group
    steps = tl.sum(tl.where(offs_e < E, mine * tl.maximum((ends - starts) // BLOCK_M, 1), 0), 0)
    HALF: tl.constexpr = BLOCK_K // 2
    zeros = tl.zeros((BLOCK_N, HALF), tl.float32)
    left, right, e, n, k, at, end = zeros, zeros, 0, 0, 0, 0, 0
    for _ in tl.range(0, steps, num_stages=NUM_STAGES):
        at += BLOCK_M
        if at >= end:
            tile += programs
            e = tile // tiles
            pid_n, pid_k = find_tile(tile % tiles, tiles_n, tiles_k, NEIGHBOURS)
            n, k = pid_n * BLOCK_N, pid_k * BLOCK_K
            end = tl.load(offsets_ptr + e)
            at = tl.load(offsets_ptr + e - 1, e > 0, other=0)
            at = tl.where(at < end, at, M)  # a group without columns loads zeros, which stand behind the last one
        last, scale = at + BLOCK_M >= end, tl.zeros((BLOCK_N,), tl.float32)
        if last:  # before the products, which take as long as the load
            rows = n + tl.arange(0, BLOCK_N)
            scale = tl.load(scale_ptr + tl.cast(e, tl.int64) * N + rows, rows < N, other=0.0)
        a = of_a.load([n, at])
        left = tl.dot(a, of_b.load([k, at]).T, left, max_num_imprecise_acc=PROMOTE)
        right = tl.dot(a, of_b.load([k + HALF, at]).T, right, max_num_imprecise_acc=PROMOTE)
        if last:
            of_dw.store([e, n, k], (left * scale[:, None]).to(of_dw.dtype).reshape(1, BLOCK_N, HALF))
            of_dw.store([e, n, k + HALF], (right * scale[:, None]).to(of_dw.dtype).reshape(1, BLOCK_N, HALF))
            left, right = zeros, zeros


def dequantized_mm(operands: Operands, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Same as `grouped_mm`, or as `grouped_mm_dw` for b [K, M], by PyTorch's BF16 product of the operands times their
    scales, rounded to BF16."""
    a, b, scale_a, scale_b, by_a, by_b = operands
    wide_a = dequantize(a, scale_a, by_a, torch.bfloat16)
    if b.ndim == 3:
        return widened_mm(wide_a, b, scale_b, by_b, offsets).to(out_dtype)
    with torch.autocast(a.device.type, enabled=False):
        y = F.grouped_mm(wide_a, dequantize(b, scale_b, by_b, torch.bfloat16).t(), offs=offsets)  # [N,M_e] @ [K,M_e]^T
    return y.to(out_dtype)


def likely_rows(m: int, groups: int) -> int:
    """The rows for which a tile is chosen: half more than a group has on average, so that most fit into one tile."""
    return cdiv(3 * m, 2 * groups)


def most_tiles(m: int, groups: int, block_m: int) -> int:
    """The largest number of tiles of M that `m` rows in so many groups can have."""
    return (m + (block_m - 1) * min(groups, m)) // block_m


@triton.jit
def find_rows(offsets_ptr, pid_m, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The group of the tile `pid_m`, the tile's first row, and the end of the group; behind the last tile (_, 0, 0)."""
    offs_e = tl.arange(0, BLOCK_E)
    mask = offs_e < E
    ends = tl.load(offsets_ptr + offs_e, mask, other=0)
    starts = tl.load(offsets_ptr + offs_e - 1, mask & (offs_e > 0), other=0)
    tiles = tl.cdiv(ends - starts, BLOCK_M)
    later = tl.cumsum(tiles, 0)  # the first tile of the next group
    tile = pid_m - (later - tiles)  # of each group, if it is this one
    here = (tile >= 0) & (pid_m < later)
    found = tl.where(here, offs_e, 0), tl.where(here, starts + tile * BLOCK_M, 0), tl.where(here, ends, 0)
    return tl.reduce(found, 0, _add_each)  # at once, since warps wait for each other in every reduction


@triton.jit
def _add_each(a, b, c, x, y, z):
    return a + x, b + y, c + z


# ---- The grouped weight-only GEMM as a Triton kernel: tiles as above, sums as in `kernels/weight_only.py`.


def grouped_weight_only_mm(
    x: Tensor, w: Tensor, scale: Tensor, granularity: Granularity, offsets: Tensor, native: bool | None = None
) -> Tensor:
    """Same as `grouped_weight_only_mm` of the operation, for x in BF16 or FP16. Rows behind the groups are not written.

    native: whether the GPU converts E4M3 by an instruction; None asks it.
    """
    (m, k), (e, n, _) = x.shape, w.shape
    x, w, scale = x.contiguous(), w.contiguous(), readable_weight_scale(scale)
    w = w if (has_kernels(x.device) if native is None else native) else w.view(torch.uint8)
    y = allocate(x, (m, n))
    group, rows = granularity.cols or 0, max(2, likely_rows(m, e))  # one row has a kernel of its own in a linear layer
    block_n, block_k, stages, warps, _ = choose_weight_tiling(rows, n, k, group, x.device)
    block_m = min(MAX_BLOCK_M, max(16, power_of_two_above(rows)))
    launcher(_weight_only_kernel, (most_tiles(m, e, block_m), cdiv(n, block_n)))(
        x, w, scale, offsets.contiguous(), y, e, n, scale[0].numel(),
        K=k, SCALE_ROWS=granularity.rows or n, STRIDE_SCALE=scale.shape[2], GROUP=group,
        BLOCK_E=power_of_two_above(e), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        NUM_STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return y


@triton.jit
def _weight_only_kernel(
    x_ptr, w_ptr, scale_ptr, offsets_ptr, y_ptr, E, N, stride_scales,
    K: tl.constexpr, SCALE_ROWS: tl.constexpr, STRIDE_SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    e, start_m, end_m = find_rows(offsets_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if start_m < end_m:
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = tl.minimum(tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
        scale_ptrs = scale_ptr + e.to(tl.int64) * stride_scales + offs_n // SCALE_ROWS * STRIDE_SCALE
        w_rows = w_ptr + e.to(tl.int64) * N * K + offs_n.to(tl.int64) * K
        x_rows = x_ptr + (offs_m % end_m).to(tl.int64) * K  # rows behind the end are not stored
        acc = sum_products(
            w_rows, x_rows, scale_ptrs, 0, K, K, K % BLOCK_K == 0, 0, GROUP, BLOCK_N, BLOCK_M, BLOCK_K, NUM_STAGES
        )
        if not GROUP:
            acc *= tl.load(scale_ptrs)[:, None]
        mask = (offs_m < end_m)[None, :]
        store_sums(acc, offs_m.to(tl.int64)[None, :], offs_n[:, None], y_ptr, None, None, N, mask)
