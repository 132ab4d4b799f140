"""The door of the activations: checks, the registered operations with their fakes, the choice of implementation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops.activation.reference import activation_backward as reference_backward
from octavo.ops.activation.reference import activation_quantize as reference_quantize
from octavo.ops.checks import FLOATS, check_row_cast, check_tensor
from octavo.ops.inductor import operation
from octavo.ops.triton_support import kernels_of, runs_fused

WIDTHS = {"swiglu": 2, "gelu": 1}  # columns of u for one of h


class ActivationGradient(NamedTuple):
    """The gradient of u, quantized; the bytes of h as forward had them; the gradient in u's dtype, or empty."""

    du: QTensor
    h: QTensor
    wide: Tensor


def activation_quantize(u: Tensor, kind: str, cast: Cast) -> QTensor:
    """h = activation(u), quantized by row in one pass.

    Args:
        u: float32, bfloat16 or float16: [M, 2F], gate beside up, for kind "swiglu"; [M, F] for "gelu" (the exact one).
        cast: of h [M, F], by row, rounded to nearest, with scale "fp32" or "pow2", without a relative floor.

    Raises:
        ValueError: for another kind, cast, shape or dtype.
    """
    check_row_cast("activation_quantize", cast)
    data, scale = torch.ops.octavo.activation_quantize(u, kind, cast.format, cast.scale)
    return QTensor(data, scale, cast.fmt, ROW)


def activation_backward(
    dh: Tensor,
    u: Tensor,
    kind: str,
    cast: Cast,
    *,
    column_scale: Tensor,
    row_scale: Tensor,
    h_cast: Cast,
    h_scale: Tensor,
    keep: bool,
) -> ActivationGradient:
    """The gradient through an activation, quantized by row in the pass that makes it.

    Args:
        dh, u: [M, F] and as in `activation_quantize`.
        cast: of the gradient of u, as there.
        column_scale, row_scale: float32 [1, columns of u] and [M, 1], multiplied into that gradient first.
        h_cast, h_scale: what forward cast h with, and the scale, float32 [M, 1], that it got: its bytes are made again,
            not kept.
        keep: return the gradient in u's dtype too (for a bias).

    Raises:
        ValueError: for another kind, cast, shape or dtype.
    """
    check_row_cast("activation_backward", cast)
    check_row_cast("activation_backward", h_cast)
    data, scale, h_data, wide = torch.ops.octavo.activation_backward(
        dh, u, kind, cast.format, cast.scale, column_scale, row_scale, h_cast.format, h_scale, keep
    )
    return ActivationGradient(QTensor(data, scale, cast.fmt, ROW), QTensor(h_data, h_scale, h_cast.fmt, ROW), wide)


def _check(u: Tensor, kind: str) -> None:
    if kind not in WIDTHS:
        raise ValueError(f"unknown activation {kind!r}: choose one of {', '.join(WIDTHS)}")
    if u.ndim != 2 or u.dtype not in FLOATS or u.shape[1] % WIDTHS[kind]:
        raise ValueError(
            f"{kind} takes a matrix of float32, bfloat16 or float16 whose columns divide by {WIDTHS[kind]}, "
            f"got {u.dtype} {list(u.shape)}"
        )


def _check_backward(dh: Tensor, u: Tensor, kind: str, column_scale: Tensor, row_scale: Tensor, h_scale: Tensor) -> None:
    _check(u, kind)
    m, columns = u.shape
    check_tensor("dh", dh, (m, columns // WIDTHS[kind]), *FLOATS)
    check_tensor("column_scale", column_scale, (1, columns), torch.float32)
    check_tensor("row_scale", row_scale, (m, 1), torch.float32)
    check_tensor("h_scale", h_scale, (m, 1), torch.float32)


def _quantizes(u: Tensor, kind: str, fmt: str, scale: str) -> bool:
    return runs_fused(u, u.shape[1] // WIDTHS[kind], fmt)


@operation("activation_quantize", _quantizes)
def _activation_quantize(u: Tensor, kind: str, fmt: str, scale: str) -> tuple[Tensor, Tensor]:
    _check(u, kind)
    run = kernels_of("activation").activation_quantize if _quantizes(u, kind, fmt, scale) else reference_quantize
    return run(u.contiguous(), kind, Cast(fmt, ROW, scale))


@_activation_quantize.register_fake
def _(u: Tensor, kind: str, fmt: str, scale: str) -> tuple[Tensor, Tensor]:
    _check(u, kind)
    data = u.new_empty((u.shape[0], u.shape[1] // WIDTHS[kind]), dtype=Cast(fmt).fmt.dtype)
    return data, u.new_empty((u.shape[0], 1), dtype=torch.float32)


def _differentiates(
    dh: Tensor, u: Tensor, kind: str, fmt: str, scale: str, columns: Any, rows: Any, h_fmt: str, *_: Any
) -> bool:
    return runs_fused(u, dh.shape[1], fmt, h_fmt)


@operation("activation_backward", _differentiates)
def _activation_backward(
    dh: Tensor,
    u: Tensor,
    kind: str,
    fmt: str,
    scale: str,
    column_scale: Tensor,
    row_scale: Tensor,
    h_fmt: str,
    h_scale: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_backward(dh, u, kind, column_scale, row_scale, h_scale)
    on_gpu = _differentiates(dh, u, kind, fmt, scale, column_scale, row_scale, h_fmt)
    run = kernels_of("activation").activation_backward if on_gpu else reference_backward
    dh, u, column_scale, row_scale, h_scale = (t.contiguous() for t in (dh, u, column_scale, row_scale, h_scale))
    how, h_how = Cast(fmt, ROW, scale), Cast(h_fmt, ROW)
    return run(dh, u, kind, how, column_scale, row_scale, h_how, h_scale, keep)


@_activation_backward.register_fake
def _(
    dh: Tensor,
    u: Tensor,
    kind: str,
    fmt: str,
    scale: str,
    column_scale: Tensor,
    row_scale: Tensor,
    h_fmt: str,
    h_scale: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_backward(dh, u, kind, column_scale, row_scale, h_scale)
    data = u.new_empty(u.shape, dtype=Cast(fmt).fmt.dtype)
    h_data = dh.new_empty(dh.shape, dtype=Cast(h_fmt).fmt.dtype)
    wide = u.new_empty(u.shape if keep else 0)
    return data, u.new_empty((u.shape[0], 1), dtype=torch.float32), h_data, wide
