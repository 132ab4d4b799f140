"""The weight-only GEMM: checks, the registered operation, and the choice between implementations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import parse_granularity
from octavo.numerics.qtensor import QTensor
from octavo.ops.checks import FLOATS, check_tensor
from octavo.ops.grouped_gemm.backend import MAX_MEAN_ROWS
from octavo.ops.grouped_gemm.reference import rows_of_groups
from octavo.ops.inductor import operation, register_lowerings
from octavo.ops.triton_support import has_kernels
from octavo.ops.weight_only.backend import LOWEST, find_weight_only_backend
from octavo.ops.weight_only.reference import weight_only_reference


def weight_only_mm(x: Tensor, w: QTensor, *, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """y = x @ (w.data * w.scale)^T + bias, then + residual: the weight has eight bits, the input is not quantized.

    For a small M on a GPU, the kernel reads the bytes of the weight and widens them to x's dtype, which is exact. Sums
    are float32, and the scales multiply them. For a large M, w.data * w.scale is rounded to x's dtype first.

    Args:
        x: [M, K], bfloat16, float16 or float32.
        w: [N, K] in E4M3, with scales of any granularity.
        bias: [N], added before y is rounded.
        residual: [M, N] of x's dtype, added after y is rounded. The sum is rounded again.

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: a weight of another format, or shapes or dtypes that do not match.
    """
    if w.format.name != "e4m3":
        raise ValueError(f"weight_only_mm takes a weight in e4m3, got {w.format.name}: quantize it to e4m3")
    if x.ndim != 2 or w.data.ndim != 2 or x.shape[1] != w.data.shape[1] or x.dtype not in FLOATS:
        raise ValueError(
            "weight_only_mm takes x [M, K] of float32, bfloat16 or float16 and w [N, K] with the same K, got "
            f"{x.dtype} {list(x.shape)} and {list(w.shape)}"
        )
    m, n = x.shape[0], w.data.shape[0]
    if bias is not None:
        check_tensor("bias", bias, (n,), *FLOATS)
    if residual is not None:
        check_tensor("residual", residual, (m, n), x.dtype)
    y: Tensor = _weight_only_mm(x, w.data, w.scale, w.granularity.name, bias, residual)
    return y


def grouped_weight_only_mm(x: Tensor, w: QTensor, offsets: Tensor) -> Tensor:
    """y [M, N]: each row of group e of `x` times matrix e of `w`, transposed, as in `weight_only_mm`.

    A group may be empty. A GPU from Ampere on computes all groups in one launch, and nothing is read on the host; with
    many rows in each group it widens w to BF16 first. Elsewhere the groups are computed one by one.

    Args:
        x: [M, K], bfloat16, float16 or float32.
        w: [E, N, K] in E4M3, with scales of any granularity but tensor.
        offsets: int32 [E], where each group of rows ends. Rows from offsets[-1] on have any numbers in y.

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: a weight of another format, or shapes or dtypes that do not match.
    """
    if w.format.name != "e4m3" or w.granularity.rows is None:
        raise ValueError(
            "grouped_weight_only_mm takes weights in e4m3 with scales of their own, got "
            f"{w.format.name} with {w.granularity.name} scales: quantize each to e4m3 by row"
        )
    if x.ndim != 2 or w.data.ndim != 3 or x.shape[1] != w.data.shape[2] or x.dtype not in FLOATS:
        raise ValueError(
            "grouped_weight_only_mm takes x [M, K] of float32, bfloat16 or float16 and w [E, N, K] with the same K, "
            f"got {x.dtype} {list(x.shape)} and {list(w.shape)}"
        )
    check_tensor("offsets", offsets, (w.data.shape[0],), torch.int32)
    y: Tensor = _grouped_weight_only_mm(x, w.data, w.scale, w.granularity.name, offsets)
    return y


@operation("weight_only_mm", lambda x, *rest: has_kernels(x.device, LOWEST))
def _weight_only_mm(
    x: Tensor, w: Tensor, scale: Tensor, granularity: str, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    by = parse_granularity(granularity)
    backend = find_weight_only_backend(x.device, x.dtype, by, x.shape[0]).name
    if backend == "emulated":
        y = weight_only_reference(x, w, scale, by)
        y = (y if bias is None else y + bias).to(x.dtype)
    elif has_kernels(x.device, LOWEST):
        from octavo.ops.weight_only import kernel

        if backend == "triton":
            added = None if residual is None else residual.contiguous()
            return kernel.weight_only_mm(x, w, scale, by, bias, added)
        y = _product(x, kernel.dequantize(w, scale, by, x.dtype), bias)
    else:
        y = _product(x, QTensor(w, scale, E4M3, by).dequantize(x.dtype), bias)
    return y if residual is None else y + residual


def _product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, w, None if bias is None else bias.to(x.dtype))  # [M,K] @ [N,K]^T


@_weight_only_mm.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    register_lowerings()
    return x.new_empty((x.shape[0], w.shape[0]))


@operation("grouped_weight_only_mm")
def _grouped_weight_only_mm(x: Tensor, w: Tensor, scale: Tensor, granularity: str, offsets: Tensor) -> Tensor:
    by = parse_granularity(granularity)
    if x.numel() and find_weight_only_backend(x.device, x.dtype, by, 1).name == "triton":
        from octavo.ops.weight_only import grouped_kernel, kernel

        whole = w.shape[1] % (by.rows or 1) == 0 and x.dtype == torch.bfloat16
        if whole and x.shape[0] > MAX_MEAN_ROWS * len(offsets):
            return kernel.widened_mm(x, w, scale, by, offsets)
        return grouped_kernel.grouped_weight_only_mm(x, w, scale, by, offsets)
    y = x.new_zeros((x.shape[0], w.shape[1]))
    for e, rows in enumerate(rows_of_groups(offsets)):
        y[rows] = _weight_only_mm(x[rows], w[e], scale[e], granularity, None, None)
    return y


@_grouped_weight_only_mm.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    register_lowerings()
    return x.new_empty((x.shape[0], w.shape[1]))
