"""The door of the scaled GEMM: checks, the registered operation with its fake, and the choice of implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.numerics.granularity import parse_granularity
from octavo.numerics.qtensor import QTensor
from octavo.ops.checks import check_tensor
from octavo.ops.gemm.backend import find_backend
from octavo.ops.gemm.cublaslt import scaled_mm as native_mm
from octavo.ops.gemm.reference import scaled_mm as reference_mm
from octavo.ops.inductor import operation, tell_inductor
from octavo.ops.triton_support import kernels_of


def scaled_mm(
    a: QTensor,
    b: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = False,
    emulate: bool = False,
) -> Tensor:
    """y = (a.data * a.scale) @ (b.data * b.scale)^T + bias, then + residual.

    Args:
        a, b: [M, K] and [N, K], both contracted over their last axis.
        bias: [N], added before the one rounding to `out_dtype` where the implementation can.
        residual: [M, N] of `out_dtype`, added to the rounded y, and rounded again: as y + residual is.
        out_dtype: of y; sums are float32.
        fast_accumulation: partial sums may stay at the tensor core's 14 bits. Emulation is exact, and block-scaled
            GEMMs promote each block, all the same.
        emulate: permit emulation on a GPU that has no kernel for these layouts.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        ValueError: the shapes do not match, or the residual's dtype.
        RuntimeError: a GPU without the kernel, and `emulate` is False.
    """
    if a.data.ndim != 2 or b.data.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"need a [M, K] and b [N, K] with the same K, got {list(a.shape)} and {list(b.shape)}")
    check_tensor("residual", residual, (a.shape[0], b.shape[0]), out_dtype)
    formats, size = (a.format.name, b.format.name), (a.shape[0], b.shape[0])
    e8m0 = a.scale.dtype == torch.float8_e8m0fnu, b.scale.dtype == torch.float8_e8m0fnu
    backend = find_backend(a.data.device, a.layout, b.layout, formats, size, e8m0=e8m0)
    if backend.name == "none" and not emulate:
        raise RuntimeError(
            f"no FP8 GEMM here: {backend.reason}. Choose another recipe (`octavo doctor` lists what runs), "
            "or pass emulate=True to compute it slowly in float32"
        )
    runs = "emulated" if backend.name == "none" else backend.name
    operands = (a.data, a.scale, a.layout.name, b.data, b.scale, b.layout.name)
    y: Tensor = torch.ops.octavo.scaled_mm(*operands, bias, residual, out_dtype, fast_accumulation, runs)
    return y


def _inlines(a: Tensor, scale_a: Tensor, layout_a: str, *rest: Any) -> bool:
    """Not emulated, nor block-scaled: torch 2.11's own fake of those GEMMs refuses the scales that the GEMMs want."""
    return rest[-1] != "emulated" and layout_a in ("tensor", "row")


@operation("scaled_mm", _inlines)
def _scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    layout_a: str,
    b: Tensor,
    scale_b: Tensor,
    layout_b: str,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    backend: str,
) -> Tensor:
    layouts = parse_granularity(layout_a), parse_granularity(layout_b)
    if backend == "triton":
        added = None if residual is None else residual.contiguous()
        return kernels_of("gemm").scaled_mm(a, scale_a, b, scale_b, bias, out_dtype, fast_accumulation, residual=added)
    if backend != "emulated":
        y = native_mm(a, scale_a, layouts[0], b, scale_b, layouts[1], bias, out_dtype, fast_accumulation)
    else:
        y = reference_mm(a, scale_a, layouts[0], b, scale_b, layouts[1])
        y = (y if bias is None else y.add_(bias)).to(out_dtype)
    return y if residual is None else y + residual


@_scaled_mm.register_fake
def _(
    a: Tensor,
    scale_a: Tensor,
    layout_a: str,
    b: Tensor,
    scale_b: Tensor,
    layout_b: str,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    backend: str,
) -> Tensor:
    tell_inductor()  # a graph of ours is being traced: every one has a GEMM
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
