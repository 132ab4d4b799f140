"""The activations: checks, the registered operations, and the choice between the kernels and the reference."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops.activation.reference import (
    activation_backward_reference,
    activation_quantize_reference,
    activation_quantize_scaled_reference,
    activation_scales_reference,
)
from octavo.ops.checks import FLOATS, check_row_cast, check_tensor, eager_check
from octavo.ops.inductor import operation
from octavo.ops.triton_support import quantizes_rows, runs_fused

WIDTHS = {"swiglu": 2, "geglu": 2, "gelu": 1}  # columns of u for each column of h


class ActivationGradient(NamedTuple):
    """The quantized gradient of u, the quantized h of forward, and the gradient of a bias (empty if not asked)."""

    du: QTensor
    h: QTensor
    dbias: Tensor


def activation_quantize(u: Tensor, kind: str, cast: Cast) -> QTensor:
    """Compute h = activation(u) and quantize it by row, in one pass.

    Args:
        u: float32, bfloat16 or float16. [M, 2F] for the kinds "swiglu", with the columns of gate before those of up,
            and "geglu", with those of up before those of gate; [M, F] for the kind "gelu". GELU is the exact one, not
            the tanh approximation.
        cast: of h [M, F], by row, rounded to nearest, with scale "fp32" or "pow2", without a relative floor.

    Raises:
        ValueError: for another kind, cast, shape or dtype.
    """
    check_row_cast("activation_quantize", cast)
    _check(u, kind)
    data, scale = _activation_quantize(u, cast.spec, kind)
    return QTensor(data, scale, cast.fmt, ROW)


def activation_scales(u: Tensor, kind: str, cast: Cast) -> Tensor:
    """The scales [M, 1] that `activation_quantize` computes, without the data.

    Where a row of h is cut over several ranks, the largest of their scales is that of the whole row.
    """
    check_row_cast("activation_scales", cast)
    _check(u, kind)
    result: Tensor = _activation_scales(u, cast.spec, kind)
    return result


def activation_quantize_scaled(u: Tensor, kind: str, scale: Tensor, cast: Cast) -> QTensor:
    """`activation_quantize` by given scales [M, 1] (float32), at least as large as its own."""
    check_row_cast("activation_quantize_scaled", cast)
    _check(u, kind)
    return QTensor(_activation_quantize_scaled(u, cast.spec, kind, scale), scale, cast.fmt, ROW)


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
    biased: bool,
    group: Tensor | None = None,
) -> ActivationGradient:
    """Compute the gradient through an activation and quantize it by row, in one pass.

    Args:
        dh, u: [M, F], and u as in `activation_quantize`.
        cast: of the gradient of u, with the limits of `activation_quantize`.
        column_scale, row_scale: float32 [1, columns of u] and [M, 1], multiplied into that gradient first. With
            `group`, column_scale is [E, columns of u].
        h_cast, h_scale: the cast of h in forward and the scale [M, 1] (float32) that it got. The data of h is computed
            again from these instead of being saved.
        biased: also return the gradient of a bias in u, float32 [columns of u]: the sum of the rows of du, before du is
            multiplied by the scales.
        group: int32 [M], the line of column_scale that each row is multiplied by, from 0 to E - 1.

    Raises:
        ValueError: for another kind, cast, shape or dtype.
    """
    check_row_cast("activation_backward", cast)
    check_row_cast("activation_backward", h_cast)
    _check_backward(dh, u, kind, column_scale, row_scale, h_scale, group)
    data, scale, h_data, dbias = _activation_backward(
        dh, u, cast.spec, h_cast.spec, biased, kind, column_scale, row_scale, h_scale, group
    )
    return ActivationGradient(QTensor(data, scale, cast.fmt, ROW), QTensor(h_data, h_scale, h_cast.fmt, ROW), dbias)


@eager_check
def _check(u: Tensor, kind: str) -> None:
    if kind not in WIDTHS:
        raise ValueError(f"unknown activation {kind!r}: choose one of {', '.join(WIDTHS)}")
    if u.ndim != 2 or u.dtype not in FLOATS or u.shape[1] % WIDTHS[kind]:
        raise ValueError(
            f"{kind} takes a matrix of float32, bfloat16 or float16 whose columns divide by {WIDTHS[kind]}, "
            f"got {u.dtype} {list(u.shape)}"
        )


@eager_check
def _check_backward(
    dh: Tensor,
    u: Tensor,
    kind: str,
    column_scale: Tensor,
    row_scale: Tensor,
    h_scale: Tensor,
    group: Tensor | None,
) -> None:
    _check(u, kind)
    m, columns = u.shape
    check_tensor("dh", dh, (m, columns // WIDTHS[kind]), *FLOATS)
    check_tensor("group", group, (m,), torch.int32)
    lines = 1 if group is None else column_scale.shape[0]
    check_tensor("column_scale", column_scale, (lines, columns), torch.float32)
    check_tensor("row_scale", row_scale, (m, 1), torch.float32)
    check_tensor("h_scale", h_scale, (m, 1), torch.float32)


def _quantizes(u: Tensor, spec: str, kind: str) -> bool:
    return quantizes_rows(u, u.shape[1] // WIDTHS[kind], parse_cast(spec).format)


@operation("activation_quantize", _quantizes)
def _activation_quantize(u: Tensor, spec: str, kind: str) -> tuple[Tensor, Tensor]:
    if not _quantizes(u, spec, kind):
        return activation_quantize_reference(u.contiguous(), kind, parse_cast(spec))
    from octavo.ops.activation import kernel

    return kernel.activation_quantize(u.contiguous(), kind, parse_cast(spec))


@_activation_quantize.register_fake
def _(u: Tensor, spec: str, kind: str) -> tuple[Tensor, Tensor]:
    _check(u, kind)
    data = u.new_empty((u.shape[0], u.shape[1] // WIDTHS[kind]), dtype=parse_cast(spec).fmt.dtype)
    return data, u.new_empty((u.shape[0], 1), dtype=torch.float32)


@operation("activation_scales", _quantizes)
def _activation_scales(u: Tensor, spec: str, kind: str) -> Tensor:
    if not _quantizes(u, spec, kind):
        return activation_scales_reference(u.contiguous(), kind, parse_cast(spec))
    from octavo.ops.activation import kernel

    return kernel.activation_scales(u.contiguous(), kind, parse_cast(spec))


@_activation_scales.register_fake
def _(u: Tensor, spec: str, kind: str) -> Tensor:
    return u.new_empty((u.shape[0], 1), dtype=torch.float32)


def _quantizes_scaled(u: Tensor, spec: str, kind: str, scale: Tensor) -> bool:
    return _quantizes(u, spec, kind)


@operation("activation_quantize_scaled", _quantizes_scaled)
def _activation_quantize_scaled(u: Tensor, spec: str, kind: str, scale: Tensor) -> Tensor:
    if not _quantizes(u, spec, kind):
        return activation_quantize_scaled_reference(u.contiguous(), kind, scale, parse_cast(spec))
    from octavo.ops.activation import kernel

    return kernel.activation_quantize_scaled(u.contiguous(), kind, scale.contiguous(), parse_cast(spec))


@_activation_quantize_scaled.register_fake
def _(u: Tensor, spec: str, kind: str, scale: Tensor) -> Tensor:
    return u.new_empty((u.shape[0], u.shape[1] // WIDTHS[kind]), dtype=parse_cast(spec).fmt.dtype)


def _differentiates(dh: Tensor, u: Tensor, spec: str, h_spec: str, *rest: Any) -> bool:
    return runs_fused(u, dh.shape[1], parse_cast(spec).format, parse_cast(h_spec).format)


@operation("activation_backward", _differentiates)
def _activation_backward(
    dh: Tensor,
    u: Tensor,
    spec: str,
    h_spec: str,
    biased: bool,
    kind: str,
    column_scale: Tensor,
    row_scale: Tensor,
    h_scale: Tensor,
    group: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cast, h_cast = parse_cast(spec), parse_cast(h_spec)
    dh, u, column_scale, row_scale, h_scale = (t.contiguous() for t in (dh, u, column_scale, row_scale, h_scale))
    if not _differentiates(dh, u, spec, h_spec):
        return activation_backward_reference(dh, u, kind, cast, column_scale, row_scale, h_cast, h_scale, biased, group)
    from octavo.ops.activation import kernel

    return kernel.activation_backward(dh, u, kind, cast, column_scale, row_scale, h_cast, h_scale, biased, group)


@_activation_backward.register_fake
def _(dh: Tensor, u: Tensor, spec: str, h_spec: str, biased: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_backward(dh, u, *rest)
    data = u.new_empty(u.shape, dtype=parse_cast(spec).fmt.dtype)
    h_data = dh.new_empty(dh.shape, dtype=parse_cast(h_spec).fmt.dtype)
    dbias = u.new_empty(u.shape[1] if biased else 0, dtype=torch.float32)
    return data, u.new_empty((u.shape[0], 1), dtype=torch.float32), h_data, dbias
