"""Requantization: checks, the registered operations, and the choice between the kernels and the reference."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.formats import eight_bit_format
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops.checks import check_row_cast, eager_check
from octavo.ops.inductor import operation
from octavo.ops.requantization.reference import (
    requantize_norm_reference,
    requantize_reference,
    requantize_transposed_reference,
)
from octavo.ops.triton_support import converts


def requantize(tensors: Sequence[Tensor], scale: Tensor, cast: Cast) -> QTensor:
    """Quantize matrices by given row scales, and stack the results.

    Args:
        tensors: [M_i, K].
        scale: float32 [sum of M_i, 1]. Numbers beyond the format's max saturate; a row with the scale NaN becomes NaN.
        cast: by row, rounded to nearest.

    Raises:
        ValueError: the scales have another shape, or the cast is another.
    """
    if scale.shape != (_transposed_shape(tensors)[1], 1):
        raise ValueError(f"need a scale for each row of {[list(x.shape) for x in tensors]}, got {list(scale.shape)}")
    if not cast.by_row or cast.rounding != "nearest":
        raise ValueError(f"requantize takes a cast by row, rounded to nearest, got {cast}")
    return QTensor(_requantize(list(tensors), cast.spec, scale), scale, cast.fmt, ROW)


def requantize_transposed(tensors: Sequence[Tensor], scale: Tensor, cast: Cast, after: Tensor | None = None) -> Tensor:
    """The data of an earlier `quantize` (of one matrix), `quantize_stack` or `quantize_scaled`, transposed.

    Args:
        tensors: [M_i, K], the matrices that were quantized.
        scale: float32 or E8M0, the scales of the stacked matrix [sum of M_i, K], in the shape of the cast's
            granularity. Numbers beyond the format's max saturate.
        cast: the cast of the earlier call, by row, tensor or square block, rounded to nearest.
        after: as in `transpose`.

    Returns:
        [K, sum of M_i] of the cast's dtype.

    Raises:
        ValueError: the scales have another shape.
    """
    _check_transposed(tensors, scale, cast)
    result: Tensor = _requantize_transposed(list(tensors), cast.spec, scale.float(), after)
    return result


def requantize_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, cast: Cast
) -> Tensor:
    """The data of an earlier `norm_quantize`, transposed.

    Args:
        x: [M, K], the input of the norm, its residual included.
        mean, rstd, scale: float32 [M, 1], results of `norm_quantize`; mean is None for a root-mean-square norm.
        weight, bias: [K], as given to `norm_quantize`.
        cast: the cast given to `norm_quantize`.

    Returns:
        [K, M] of the cast's dtype.

    Raises:
        ValueError: a cast that `norm_quantize` refuses, or a number of scales that is not the number of rows.
    """
    check_row_cast("requantize_norm", cast)
    if x.shape[0] != scale.shape[0]:
        raise ValueError(f"need a scale for each row of {list(x.shape)}, got {list(scale.shape)}")
    result: Tensor = _requantize_norm(x, cast.format, scale, mean, rstd, weight, bias)
    return result


@eager_check
def _check_transposed(tensors: Sequence[Tensor], scale: Tensor, cast: Cast) -> None:
    k, total = _transposed_shape(tensors)
    if scale.shape != cast.granularity.scale_shape((total, k)):
        shapes = [list(x.shape) for x in tensors]
        raise ValueError(f"need the scales of {shapes} by {cast.granularity.name}, got scales {list(scale.shape)}")


def _transposed_shape(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """[K, sum of M_i]."""
    return tensors[0].shape[1], sum(x.shape[0] for x in tensors)


def _requantizes(tensors: list[Tensor], spec: str, scale: Tensor, *rest: Any) -> bool:
    cast = parse_cast(spec)
    if not converts(scale, cast.format):
        return False
    from octavo.ops.requantization import kernel

    return kernel.takes(cast.granularity)


@operation("requantize", _requantizes)
def _requantize(tensors: list[Tensor], spec: str, scale: Tensor) -> Tensor:
    fmt = parse_cast(spec).fmt
    if not _requantizes(tensors, spec, scale):
        return requantize_reference(tensors, scale, fmt)
    from octavo.ops.requantization import kernel

    return kernel.requantize([x.contiguous() for x in tensors], scale.contiguous(), fmt)


@_requantize.register_fake
def _(tensors: list[Tensor], spec: str, scale: Tensor) -> Tensor:
    k, total = _transposed_shape(tensors)
    return scale.new_empty((total, k), dtype=parse_cast(spec).fmt.dtype)


@operation("requantize_transposed", _requantizes)
def _requantize_transposed(tensors: list[Tensor], spec: str, scale: Tensor, after: Tensor | None) -> Tensor:
    cast = parse_cast(spec)
    if not _requantizes(tensors, spec, scale):
        return requantize_transposed_reference(tensors, scale, cast.fmt, cast.granularity)
    from octavo.ops.requantization import kernel

    tensors, scale = [x.contiguous() for x in tensors], scale.contiguous()
    return kernel.requantize_transposed(tensors, scale, cast.fmt, cast.granularity)


@_requantize_transposed.register_fake
def _(tensors: list[Tensor], spec: str, scale: Tensor, *rest: Any) -> Tensor:
    _check_transposed(tensors, scale, parse_cast(spec))
    return scale.new_empty(_transposed_shape(tensors), dtype=parse_cast(spec).fmt.dtype)


def _requantizes_norm(x: Tensor, fmt: str, scale: Tensor, *rest: Any) -> bool:
    return converts(scale, fmt)


@operation("requantize_norm", _requantizes_norm)
def _requantize_norm(
    x: Tensor, fmt: str, scale: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    if not _requantizes_norm(x, fmt, scale):
        return requantize_norm_reference(x, mean, rstd, weight, bias, scale, eight_bit_format(fmt))
    from octavo.ops.requantization import kernel

    return kernel.requantize_norm(x.contiguous(), mean, rstd, weight, bias, scale, eight_bit_format(fmt))


@_requantize_norm.register_fake
def _(x: Tensor, fmt: str, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=eight_bit_format(fmt).dtype)
