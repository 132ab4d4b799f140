"""Requantization: data for given scales, as an earlier quantization computed it or by larger scales.

The same scale gives the same bytes as before.

Forward contracts x and w along their columns, backward along their rows, so backward needs the bytes transposed. Saving
the forward bytes for it costs one byte an element. If the unquantized tensor is saved anyway (a weight, the input of a
norm), casting it again while transposing needs no memory, and reads one byte an element more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.formats import Format
from octavo.numerics.formats import cast as cast_to
from octavo.numerics.qtensor import ROW, Cast, Granularity, QTensor
from octavo.ops.launching import converts
from octavo.ops.quantization import divided
from octavo.ops.registration import check_nearest, check_row_cast, operation

TILE = 64  # of the kernel: a square block has a multiple of so many rows and columns


def requantize_reference(
    tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, transposed: bool
) -> Tensor:
    """[sum of M_i, K], or its transpose, from matrices [M_i, K] and the scales of the stacked matrix."""
    x = torch.cat([x.float() for x in tensors])
    data = cast_to(divided(x, granularity.expand(scale, tuple(x.shape)), fmt), fmt)
    return _transposed(data) if transposed else data


def requantize_norm_reference(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: Format
) -> Tensor:
    """[K, M] from x [M, K], the statistics of its norm [M, 1] and the row scales [M, 1] of the norm's output."""
    centered = x.float() if mean is None else x.float() - mean
    normed = centered * rstd * weight.float()
    normed = normed if bias is None else normed + bias.float()
    return _transposed(cast_to(divided(normed, scale, fmt), fmt))


def _transposed(data: Tensor) -> Tensor:
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def requantize(tensors: Sequence[Tensor], scale: Tensor, cast: Cast) -> QTensor:
    """Quantize matrices [M_i, K] by given row scales, float32 [sum of M_i, 1], to nearest, and stack the results.

    Numbers beyond the format's max saturate; a row with the scale NaN becomes NaN.
    """
    check_nearest("requantize", cast)
    data = _requantize(list(tensors), scale, cast.format, ROW.name, False, None)
    return QTensor(data, scale, cast.fmt, ROW)


def requantize_transposed(tensors: Sequence[Tensor], scale: Tensor, cast: Cast, after: Tensor | None = None) -> Tensor:
    """The data [K, sum of M_i] of an earlier quantization of the matrices [M_i, K], transposed.

    The scales are those of the stacked matrix, float32 or E8M0 in the shape of the cast's granularity. The cast is by
    row, tensor or square block, rounded to nearest. Numbers beyond the format's max saturate. `after` is that of
    `transpose`.
    """
    return _requantize(list(tensors), scale.float(), cast.format, cast.granularity.name, True, after)


def requantize_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, cast: Cast
) -> Tensor:
    """The data [K, M] of an earlier `norm_quantize` with the same weight, bias and cast, transposed.

    x [M, K] is the input of the norm, with its residual. mean, rstd and scale are results of `norm_quantize`, float32
    [M, 1]. mean is None for a root-mean-square norm.
    """
    check_row_cast("requantize_norm", cast)
    return _requantize_norm(x, mean, rstd, weight, bias, scale, cast.format)


def _check(tensors: Sequence[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, transposed: bool) -> None:
    if scale.shape != granularity.scale_shape(_shape(tensors)):
        shapes = [list(x.shape) for x in tensors]
        raise ValueError(f"need the scales of {shapes} by {granularity.name}, got scales {list(scale.shape)}")


def _check_norm(x: Tensor, *rest: Any) -> None:
    scale = rest[4]
    if x.shape[0] != scale.shape[0]:
        raise ValueError(f"need a scale for each row of {list(x.shape)}, got {list(scale.shape)}")


def _shape(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """[sum of M_i, K], the shape of the stacked matrix."""
    return sum(x.shape[0] for x in tensors), tensors[0].shape[1]


def _like(tensors: Sequence[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, transposed: bool) -> Tensor:
    rows, columns = _shape(tensors)
    return scale.new_empty((columns, rows) if transposed else (rows, columns), dtype=fmt.dtype)


def _requantizes(tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, *rest: Any) -> bool:
    """By row, by tensor, or by square blocks of whole tiles."""
    square = granularity.transposes and (granularity.rows or TILE) % TILE == 0
    return (granularity == ROW or square) and converts(scale, fmt.name)


_requantize = operation(check=_check, like=_like, runs=_requantizes, after=True)(requantize_reference)
_requantize_norm = operation(
    check=_check_norm,
    like=lambda x, *rest: x.new_empty((x.shape[1], x.shape[0]), dtype=rest[-1].dtype),
    runs=lambda *args: converts(args[5], args[6].name),
)(requantize_norm_reference)
