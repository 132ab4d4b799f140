"""The weight-only GEMM: a weight in E4M3, an input in BF16 or FP16, float32 sums.

The product of an E4M3 and a BF16 or FP16 number has at most 15 significant bits, which float32 holds exactly. A scale
that is constant along the reduction multiplies the sum. Other scales multiply the weight before the product.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.numerics.qtensor import Granularity, QTensor
from octavo.ops.activation import activated
from octavo.ops.dispatch import LOWEST_WEIGHT_ONLY, MAX_MEAN_ROWS, find_weight_only_backend
from octavo.ops.gemm import wide_operand
from octavo.ops.grouped_gemm import rows_of_groups
from octavo.ops.launching import ALONE, Around, has_kernels
from octavo.ops.registration import FLOATS, check_tensor, operation


def weight_only_reference(
    x: Tensor, w: Tensor, scale: Tensor, granularity: Granularity, bias: Tensor | None, around: Around
) -> Tensor:
    """`weight_only_mm` as float32 [M, N], without a residual."""
    wide = x.float()
    if around.norm is not None:
        rms = (wide.double().square().mean(1, keepdim=True) + float(np.float32(around.eps))).sqrt()
        wide = wide * around.norm.float() / rms.float()
    with torch.autocast(x.device.type, enabled=False):  # it would run this product in BF16
        y = wide @ wide_operand(w, scale, granularity).t()  # [M,K] @ [N,K]^T
    y = y * scale.float().t() if granularity.outer else y
    y = y if bias is None else y + bias
    return activated(y, "swiglu") if around.gated else y


def weight_only_mm(
    x: Tensor, w: QTensor, *, bias: Tensor | None = None, residual: Tensor | None = None, around: Around = ALONE
) -> Tensor:
    """y = x @ (w.data * w.scale)^T + bias, then + residual: the weight has eight bits, the input is not quantized.

    For a small M on a GPU, the kernel reads the bytes of the weight and widens them to x's dtype, which is exact. Sums
    are float32, and the scales multiply them. For a large M, w.data * w.scale is rounded to x's dtype first. The kernel
    of one row also computes a norm of x before the product, and SwiGLU after it, in float32.

    Args:
        x: [M, K], bfloat16, float16 or float32, as are the residual and y [M, N].
        w: [N, K] in E4M3, with scales of any granularity.
        bias: [N], added before y is rounded.
        residual: added after y is rounded. The sum is rounded again.
        around: the norm of x, and SwiGLU of 2 N rows of w and of the bias, for M = 1.
    """
    if w.format.name != "e4m3":
        raise ValueError(f"weight_only_mm takes a weight in e4m3, got {w.format.name}: quantize it to e4m3")
    return _weight_only_mm(x, w.data, w.scale, w.granularity.name, bias, residual, *around)


def grouped_weight_only_mm(x: Tensor, w: QTensor, offsets: Tensor) -> Tensor:
    """y [M, N]: each row of group e of `x` times matrix e of `w`, transposed, as in `weight_only_mm`.

    A group may be empty. A GPU from Ampere on computes all groups in one launch, and nothing is read on the host; with
    many rows in each group it widens w to BF16 first. Elsewhere the groups are computed one by one.

    x and y are as in `weight_only_mm`; w is [E, N, K] in E4M3, with scales of any granularity but tensor. offsets has
    the end of each group of rows, int32 [E]. Rows from offsets[-1] on have any numbers in y.
    """
    if w.format.name != "e4m3" or w.granularity.rows is None:
        raise ValueError(
            "grouped_weight_only_mm takes weights in e4m3 with scales of their own, got "
            f"{w.format.name} with {w.granularity.name} scales: quantize each to e4m3 by row"
        )
    return _grouped_weight_only_mm(x, w.data, w.scale, w.granularity.name, offsets)


def _check(x: Tensor, w: Tensor, scale: Tensor, by: Granularity, *rest: Any) -> None:
    bias, residual, (norm, _, gated) = rest
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or x.dtype not in FLOATS:
        raise ValueError(
            "weight_only_mm takes x [M, K] of float32, bfloat16 or float16 and w [N, K] with the same K, got "
            f"{x.dtype} {list(x.shape)} and {list(w.shape)}"
        )
    if (norm is not None or gated) and (x.shape[0] != 1 or not by.outer or (gated and w.shape[0] % 2)):
        raise ValueError(
            "a norm and SwiGLU go with x [1, K] and w with scales by row or by tensor, SwiGLU with an even number of "
            f"rows, got {list(x.shape)} and {list(w.shape)} with scales by {by.name}"
        )
    check_tensor("bias", bias, (w.shape[0],), *FLOATS)
    check_tensor("norm", norm, (x.shape[1],), *FLOATS)
    check_tensor("residual", residual, (x.shape[0], w.shape[0] // (2 if gated else 1)), x.dtype)


@operation(
    check=_check,
    like=lambda x, w, *rest: x.new_empty((x.shape[0], w.shape[0] // (2 if rest[-1].gated else 1))),
    inlines=lambda x, *rest: has_kernels(x.device, LOWEST_WEIGHT_ONLY),
)
def _weight_only_mm(
    x: Tensor, w: Tensor, scale: Tensor, by: Granularity, bias: Tensor | None, residual: Tensor | None, around: Around
) -> Tensor:
    backend = find_weight_only_backend(x.device, x.dtype, by, x.shape[0]).name
    if backend == "emulated" or (backend == "dequantized" and around != ALONE):
        y = weight_only_reference(x, w, scale, by, bias, around).to(x.dtype)
    elif has_kernels(x.device, LOWEST_WEIGHT_ONLY):
        from octavo.ops.kernels import weight_only as kernel

        if backend == "triton":
            added = None if residual is None else residual.contiguous()
            return kernel.weight_only_mm(x, w, scale, by, bias, added, around)
        y = _product(x, kernel.dequantize(w, scale, by, x.dtype), bias)
    else:
        y = _product(x, QTensor(w, scale, E4M3, by).dequantize(x.dtype), bias)
    return y if residual is None else y + residual


def _product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, w, None if bias is None else bias.to(x.dtype))  # [M,K] @ [N,K]^T


def _check_grouped(x: Tensor, w: Tensor, scale: Tensor, by: Granularity, offsets: Tensor) -> None:
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2] or x.dtype not in FLOATS:
        raise ValueError(
            "grouped_weight_only_mm takes x [M, K] of float32, bfloat16 or float16 and w [E, N, K] with the same K, "
            f"got {x.dtype} {list(x.shape)} and {list(w.shape)}"
        )
    check_tensor("offsets", offsets, (w.shape[0],), torch.int32)


@operation(check=_check_grouped, like=lambda x, w, *rest: x.new_empty((x.shape[0], w.shape[1])))
def _grouped_weight_only_mm(x: Tensor, w: Tensor, scale: Tensor, by: Granularity, offsets: Tensor) -> Tensor:
    if x.numel() and find_weight_only_backend(x.device, x.dtype, by, 1).name == "triton":
        from octavo.ops.kernels import grouped_gemm as grouped_kernel
        from octavo.ops.kernels import weight_only as kernel

        whole = w.shape[1] % (by.rows or 1) == 0 and x.dtype == torch.bfloat16
        if whole and x.shape[0] > MAX_MEAN_ROWS * len(offsets):
            return kernel.widened_mm(x, w, scale, by, offsets)
        return grouped_kernel.grouped_weight_only_mm(x, w, scale, by, offsets)
    y = x.new_zeros((x.shape[0], w.shape[1]))
    for e, rows in enumerate(rows_of_groups(offsets)):
        y[rows] = _weight_only_mm(x[rows], w[e], scale[e], by.name, None, None, *ALONE)
    return y
