"""The permutation of rows in plain PyTorch."""

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.ops.quantization.reference import quantize_reference


def gather_quantize_reference(
    x: Tensor,
    cast: Cast,
    slot: Tensor | None,
    top_k: int,
    column_scale: Tensor | None,
    group: Tensor | None,
    row_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Data and scale of the rows x[slot // top_k] * column_scale[group] * row_scale."""
    rows = x.float() if slot is None else x[slot // top_k].float()
    if column_scale is not None and group is not None:
        rows = rows * column_scale[group]
    return quantize_reference(rows, cast, None, row_scale, None)


def combine_reference(y: Tensor, row: Tensor, weight: Tensor | None) -> Tensor:
    """out [T, K], the sum of weight[t, s] * y[row[t, s]] over s, in float32 and in order."""
    total = torch.zeros(row.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for s in range(row.shape[1]):
        part = _rows(y, row[:, s])
        total = total + (part if weight is None else part * weight[:, s, None])
    return total.to(y.dtype)


def combine_weight_gradient_reference(dout: Tensor, y: Tensor, row: Tensor) -> Tensor:
    """dweight [T, top_k] in float32: the products of dout[t] and y[row[t, s]], summed."""
    return torch.stack([(dout.float() * _rows(y, row[:, s])).sum(1) for s in range(row.shape[1])], 1)


def _rows(y: Tensor, row: Tensor) -> Tensor:
    """The rows of y, in float32; zeros where the number of the row is -1."""
    return torch.where(row[:, None] < 0, 0.0, y[row.clamp(min=0)].float())
