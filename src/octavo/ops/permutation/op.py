"""The permutation of rows: checks, the registered operations, and the choice between the kernels and the reference."""

from typing import Any

import torch
from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops.checks import FLOATS, check_matrix, check_row_cast, check_tensor, eager_check
from octavo.ops.inductor import operation
from octavo.ops.permutation.reference import (
    combine_reference,
    combine_weight_gradient_reference,
    gather_quantize_reference,
)
from octavo.ops.triton_support import has_kernels, runs_fused


def gather_quantize(
    x: Tensor,
    cast: Cast,
    *,
    slot: Tensor | None = None,
    top_k: int = 1,
    column_scale: Tensor | None = None,
    group: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> QTensor:
    """Gather rows and quantize each by its own scale, in one pass.

    Args:
        x: [T, K], float32, bfloat16 or float16.
        cast: by row, rounded to nearest, without a relative floor.
        slot: int32 [M]; row m of the result is row slot[m] // top_k of x. None gathers nothing: M = T.
        top_k: the slots of a row of x.
        column_scale: float32 [E, K], multiplied into row m by its line group[m].
        group: int32 [M], from 0 to E - 1.
        row_scale: float32 [M, 1], multiplied into the rows after that.

    Returns:
        Data [M, K] and scale [M, 1].

    Raises:
        ValueError: for another shape, dtype or cast.
    """
    check_row_cast("gather_quantize", cast)
    _check_gather(x, slot, column_scale, group, row_scale)
    data, scale = _gather_quantize(x, cast.spec, top_k, slot, column_scale, group, row_scale)
    return QTensor(data, scale, cast.fmt, ROW)


def combine(y: Tensor, row: Tensor, weight: Tensor | None = None) -> Tensor:
    """out [T, K]: the sum of weight[t, s] * y[row[t, s]] over the slots s, in float32, rounded once.

    Args:
        y: [M, K], float32, bfloat16 or float16.
        row: int32 [T, top_k]; -1 for a slot that adds nothing.
        weight: float32 [T, top_k], or None for ones.

    Raises:
        ValueError: for another shape or dtype.
    """
    _check_combine(y, row, weight)
    result: Tensor = _combine(y, row, weight)
    return result


def combine_weight_gradient(dout: Tensor, y: Tensor, row: Tensor) -> Tensor:
    """The gradient of `combine` by its weight: float32 [T, top_k], from the gradient of its result, dout [T, K]."""
    _check_combine(y, row, None)
    result: Tensor = _combine_weight_gradient(dout, y, row)
    return result


@eager_check
def _check_gather(
    x: Tensor, slot: Tensor | None, column_scale: Tensor | None, group: Tensor | None, row_scale: Tensor | None
) -> None:
    check_matrix("gather_quantize", x)
    m = x.shape[0] if slot is None else slot.shape[0]
    check_tensor("slot", slot, (m,), torch.int32)
    check_tensor("row_scale", row_scale, (m, 1), torch.float32)
    if column_scale is not None:
        check_tensor("column_scale", column_scale, (column_scale.shape[0], x.shape[1]), torch.float32)
        if group is None:
            raise ValueError("column_scale needs group, the number of its line for each row")
    check_tensor("group", group, (m,), torch.int32)


@eager_check
def _check_combine(y: Tensor, row: Tensor, weight: Tensor | None) -> None:
    check_matrix("combine", y)
    if row.ndim != 2:
        raise ValueError(f"row must be int32 [T, top_k], got {row.dtype} {list(row.shape)}")
    check_tensor("row", row, tuple(row.shape), torch.int32)
    check_tensor("weight", weight, tuple(row.shape), torch.float32)


def _gathers(x: Tensor, spec: str, *rest: Any) -> bool:
    return runs_fused(x, x.shape[1], parse_cast(spec).format)


@operation("gather_quantize", _gathers)
def _gather_quantize(
    x: Tensor,
    spec: str,
    top_k: int,
    slot: Tensor | None,
    column_scale: Tensor | None,
    group: Tensor | None,
    row_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    x, cast = x.contiguous(), parse_cast(spec)
    column_scale = None if column_scale is None else column_scale.contiguous()
    if not _gathers(x, spec):
        return gather_quantize_reference(x, cast, slot, top_k, column_scale, group, row_scale)
    from octavo.ops.permutation import kernel

    return kernel.gather_quantize(x, cast, slot, top_k, column_scale, group, row_scale)


@_gather_quantize.register_fake
def _(x: Tensor, spec: str, top_k: int, slot: Tensor | None, *factors: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_gather(x, slot, *factors)
    m = x.shape[0] if slot is None else slot.shape[0]
    data = x.new_empty((m, x.shape[1]), dtype=parse_cast(spec).fmt.dtype)
    return data, x.new_empty((m, 1), dtype=torch.float32)


def _combines(y: Tensor, *rest: Any) -> bool:
    return y.numel() > 0 and y.dtype in FLOATS and has_kernels(y.device)


@operation("combine", _combines)
def _combine(y: Tensor, row: Tensor, weight: Tensor | None) -> Tensor:
    y, row, weight = y.contiguous(), row.contiguous(), None if weight is None else weight.contiguous()
    if not _combines(y):
        return combine_reference(y, row, weight)
    from octavo.ops.permutation import kernel

    return kernel.combine(y, row, weight)


@_combine.register_fake
def _(y: Tensor, row: Tensor, weight: Tensor | None) -> Tensor:
    return y.new_empty((row.shape[0], y.shape[1]))


@operation("combine_weight_gradient", _combines)
def _combine_weight_gradient(dout: Tensor, y: Tensor, row: Tensor) -> Tensor:
    dout, y, row = dout.contiguous(), y.contiguous(), row.contiguous()
    if not _combines(dout):
        return combine_weight_gradient_reference(dout, y, row)
    from octavo.ops.permutation import kernel

    return kernel.combine_weight_gradient(dout, y, row)


@_combine_weight_gradient.register_fake
def _(dout: Tensor, y: Tensor, row: Tensor) -> Tensor:
    return dout.new_empty(tuple(row.shape), dtype=torch.float32)
