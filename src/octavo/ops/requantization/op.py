"""The door of casting again: checks, the registered operations with their fakes, the choice of implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.formats import fp8_format
from octavo.numerics.granularity import parse_granularity
from octavo.ops.checks import check_row_cast
from octavo.ops.inductor import operation
from octavo.ops.requantization.reference import recast_norm as reference_norm
from octavo.ops.requantization.reference import recast_transposed as reference_transposed
from octavo.ops.triton_support import converts, kernels_of


def recast_transposed(tensors: Sequence[Tensor], scale: Tensor, cast: Cast) -> Tensor:
    """The bytes that `quantize` (of one matrix), `quantize_stack` or `quantize_scaled` gave, transposed.

    Args:
        tensors: [M_i, K], the matrices that were quantized.
        scale: float32, the scales of the stacked matrix [sum of M_i, K] in the shape of the cast's granularity. What
            lies beyond the format's max saturates.
        cast: the same, by row, tensor or square block, rounded to nearest.

    Returns:
        [K, sum of M_i] of the cast's dtype.

    Raises:
        ValueError: scales of another shape.
    """
    words = cast.format, cast.granularity.name
    result: Tensor = torch.ops.octavo.recast_transposed(list(tensors), scale, *words)
    return result


def recast_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, cast: Cast
) -> Tensor:
    """The bytes that `norm_quantize` gave, transposed.

    Args:
        x: [M, K], the sum that was normed.
        mean, rstd, scale: float32 [M, 1], what came of it; no mean for a norm that subtracts none.
        weight, bias: [K], as given to it.
        cast: the same.

    Returns:
        [K, M] of the cast's dtype.

    Raises:
        ValueError: for a cast that `norm_quantize` refuses, or scales that are not those of the rows.
    """
    check_row_cast("recast_norm", cast)
    result: Tensor = torch.ops.octavo.recast_norm(x, mean, rstd, weight, bias, scale, cast.format)
    return result


def _recasts(tensors: list[Tensor], scale: Tensor, fmt: str, granularity: str) -> bool:
    return converts(scale, fmt) and bool(kernels_of("requantization").takes(parse_granularity(granularity)))


@operation("recast_transposed", _recasts)
def _recast_transposed(tensors: list[Tensor], scale: Tensor, fmt: str, granularity: str) -> Tensor:
    k, total = _transposed_shape(tensors)
    shared = parse_granularity(granularity)
    if scale.shape != shared.scale_shape((total, k)):
        shapes = [list(x.shape) for x in tensors]
        raise ValueError(f"need the scales of {shapes} by {granularity}, got scales {list(scale.shape)}")
    if not _recasts(tensors, scale, fmt, granularity):
        return reference_transposed(tensors, scale, fp8_format(fmt), shared)
    kernel = kernels_of("requantization").recast_transposed
    return kernel([x.contiguous() for x in tensors], scale.contiguous(), fp8_format(fmt), shared)


@_recast_transposed.register_fake
def _(tensors: list[Tensor], scale: Tensor, fmt: str, granularity: str) -> Tensor:
    return scale.new_empty(_transposed_shape(tensors), dtype=fp8_format(fmt).dtype)


def _transposed_shape(tensors: list[Tensor]) -> tuple[int, int]:
    """[K, sum of M_i]."""
    return tensors[0].shape[1], sum(x.shape[0] for x in tensors)


def _recasts_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: str
) -> bool:
    return converts(scale, fmt)


@operation("recast_norm", _recasts_norm)
def _recast_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: str
) -> Tensor:
    if x.shape[0] != scale.shape[0]:
        raise ValueError(f"need a scale for each row of {list(x.shape)}, got {list(scale.shape)}")
    if not _recasts_norm(x, mean, rstd, weight, bias, scale, fmt):
        return reference_norm(x, mean, rstd, weight, bias, scale, fp8_format(fmt))
    return kernels_of("requantization").recast_norm(x.contiguous(), mean, rstd, weight, bias, scale, fp8_format(fmt))


@_recast_norm.register_fake
def _(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: str
) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=fp8_format(fmt).dtype)
