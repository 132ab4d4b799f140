"""The grouped weight-only GEMM as a Triton kernel: tiles as in `octavo.ops.grouped_gemm`, sums as in `kernel`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.granularity import Granularity
from octavo.ops.gemm.kernel import Tiling, store_sums
from octavo.ops.grouped_gemm.block_scaled_kernel import find_rows, likely_rows, most_tiles
from octavo.ops.inductor import launcher
from octavo.ops.launching import allocate
from octavo.ops.triton_support import cdiv, has_kernels, power_of_two_above
from octavo.ops.weight_only.kernel import MAX_BLOCK_M, choose, readable_scale, sum_products


def grouped_weight_only_mm(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    granularity: Granularity,
    offsets: Tensor,
    tiling: Tiling | None = None,
    native: bool | None = None,
) -> Tensor:
    """Same as `grouped_weight_only_mm` of the operation, for x in BF16 or FP16. Rows behind the groups are not written.

    tiling: None chooses one; its split_k has no effect.
    native: whether the GPU converts E4M3 by an instruction; None asks it.
    """
    (m, k), (e, n, _) = x.shape, w.shape
    x, w, scale = x.contiguous(), w.contiguous(), readable_scale(scale)
    w = w if (has_kernels(x.device) if native is None else native) else w.view(torch.uint8)
    y = allocate(x, (m, n))
    group, rows = granularity.cols or 0, max(2, likely_rows(m, e))  # one row has a kernel of its own in a linear layer
    block_n, block_k, stages, warps, _ = tiling or choose(rows, n, k, group, x.device)
    block_m = min(MAX_BLOCK_M, max(16, power_of_two_above(rows)))
    launcher(_tile_kernel, (most_tiles(m, e, block_m), cdiv(n, block_n)))(
        x, w, scale, offsets.contiguous(), y, e, n, scale[0].numel(),
        K=k, SCALE_ROWS=granularity.rows or n, STRIDE_SCALE=scale.shape[2], GROUP=group,
        BLOCK_E=power_of_two_above(e), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        NUM_STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return y


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, scale_ptr, offsets_ptr, y_ptr, E, N, stride_scales,
    K: tl.constexpr, SCALE_ROWS: tl.constexpr, STRIDE_SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    e, start_m, end_m = find_rows(offsets_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if start_m < end_m:
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = tl.minimum(tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
        scale_ptr += e.to(tl.int64) * stride_scales
        acc = sum_products(
            x_ptr, w_ptr + e.to(tl.int64) * N * K, scale_ptr, offs_m, offs_n, end_m, 0, K,
            K, BLOCK_M, SCALE_ROWS, STRIDE_SCALE, GROUP, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
        if not GROUP:
            acc *= tl.load(scale_ptr + offs_n // SCALE_ROWS * STRIDE_SCALE)[:, None]
        store_sums(acc, offs_m.to(tl.int64)[None, :], offs_n[:, None], y_ptr, None, None, None, N, 0,
                   (offs_m < end_m)[None, :])  # fmt: skip
