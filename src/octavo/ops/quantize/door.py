"""The door of quantization: checks, the registered operations with their fakes, and the choice of implementation."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.formats import fp8_format
from octavo.numerics.granularity import TENSOR, Granularity, parse_granularity
from octavo.numerics.qtensor import QTensor
from octavo.numerics.rounding import new_seed
from octavo.ops.quantize.reference import quantize as reference_quantize
from octavo.ops.quantize.reference import quantize_scaled as reference_quantize_scaled
from octavo.ops.transpose import transpose


def quantize(x: Tensor, cast: Cast, *, column_scale: Tensor | None = None, row_scale: Tensor | None = None) -> QTensor:
    """Quantize a matrix.

    Args:
        x: [M, K], floating. A block that holds inf or NaN gets a NaN scale.
        cast: format, granularity, scale and rounding (a history is not consulted: see `quantize_scaled`).
        column_scale: [1, K] float32, multiplied into the columns of x first.
        row_scale: [M, 1] float32, multiplied into the rows after that.
    """
    _check(x)
    _check_factor("column_scale", column_scale, (1, x.shape[1]))
    _check_factor("row_scale", row_scale, (x.shape[0], 1))
    data, scale = torch.ops.octavo.quantize(x, *_words(cast), column_scale, row_scale, _seed(x, cast))
    return QTensor(data, scale, cast.fmt, cast.granularity)


def quantize_transposed(x: Tensor, cast: Cast) -> QTensor:
    """Quantize the transpose of `x` [M, K]: data [K, M], with the blocks of `cast` laid along M."""
    data, scale = torch.ops.octavo.quantize_transposed(x, *_words(cast), _seed(x, cast))
    return QTensor(data, scale, cast.fmt, cast.granularity)


def quantize_both(x: Tensor, cast: Cast) -> tuple[QTensor, QTensor]:
    """`x` and its transpose, each ready to be contracted over its last axis.

    Where the granularity transposes this is one quantization and a copy of its bytes; elsewhere it is two.
    """
    q = quantize(x, cast)
    if not cast.granularity.transposes:
        return q, quantize_transposed(x, cast)
    return q, QTensor(transpose(q.data), q.scale.t(), q.format, q.layout)


def quantize_scaled(x: Tensor, scale: Tensor, cast: Cast) -> tuple[QTensor, Tensor]:
    """Quantize `x` [M, K] in one pass by a tensor-wide `scale` [1, 1] known beforehand (delayed scaling).

    Returns:
        The quantized tensor (beyond the format's max it saturates; NaN throughout where x is not finite), and the amax
        [1, 1] of x.
    """
    data, amax = torch.ops.octavo.quantize_scaled(x, scale, cast.format, _seed(x, cast))
    return QTensor(data, scale, cast.fmt, TENSOR), amax


def _words(cast: Cast) -> tuple[str, str, str, float]:
    """A cast in the types that an operation's schema has."""
    return cast.format, cast.granularity.name, cast.scale, cast.relative_floor


@cache
def _cast(fmt: str, granularity: str, scale: str, relative_floor: float) -> Cast:
    return Cast(fmt, parse_granularity(granularity), scale, relative_floor=relative_floor)


def _seed(x: Tensor, cast: Cast) -> Tensor | None:
    return new_seed(x.device) if cast.rounding == "stochastic" else None


def _check(x: Tensor) -> None:
    if x.ndim != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize takes a matrix of float32, bfloat16 or float16, got {x.dtype} {list(x.shape)}")


def _check_factor(name: str, factor: Tensor | None, shape: tuple[int, int]) -> None:
    if factor is not None and (factor.dtype != torch.float32 or factor.shape != shape):
        raise ValueError(f"{name} must be float32 {list(shape)}, got {factor.dtype} {list(factor.shape)}")


@torch.library.custom_op("octavo::quantize", mutates_args=())
def _quantize(
    x: Tensor,
    fmt: str,
    granularity: str,
    scale: str,
    relative_floor: float,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check(x)
    return reference_quantize(
        x.contiguous(), _cast(fmt, granularity, scale, relative_floor), column_scale, row_scale, seed
    )


@_quantize.register_fake
def _(
    x: Tensor,
    fmt: str,
    granularity: str,
    scale: str,
    relative_floor: float,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return _fake(x, tuple(x.shape), _cast(fmt, granularity, scale, relative_floor))


@torch.library.custom_op("octavo::quantize_transposed", mutates_args=())
def _quantize_transposed(
    x: Tensor, fmt: str, granularity: str, scale: str, relative_floor: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check(x)
    return reference_quantize(x.t().contiguous(), _cast(fmt, granularity, scale, relative_floor), None, None, seed)


@_quantize_transposed.register_fake
def _(
    x: Tensor, fmt: str, granularity: str, scale: str, relative_floor: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _fake(x, (x.shape[1], x.shape[0]), _cast(fmt, granularity, scale, relative_floor))


@torch.library.custom_op("octavo::quantize_scaled", mutates_args=())
def _quantize_scaled(x: Tensor, scale: Tensor, fmt: str, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(x)
    return reference_quantize_scaled(x.contiguous(), scale, fp8_format(fmt), seed)


@_quantize_scaled.register_fake
def _(x: Tensor, scale: Tensor, fmt: str, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(x)
    return x.new_empty(x.shape, dtype=fp8_format(fmt).dtype), x.new_empty((1, 1), dtype=torch.float32)


def _fake(x: Tensor, shape: tuple[int, ...], cast: Cast) -> tuple[Tensor, Tensor]:
    _check(x)
    granularity: Granularity = cast.granularity
    scale_dtype = torch.float8_e8m0fnu if cast.scale == "e8m0" else torch.float32
    return (
        x.new_empty(shape, dtype=cast.fmt.dtype),
        x.new_empty(granularity.scale_shape(shape), dtype=scale_dtype),
    )
