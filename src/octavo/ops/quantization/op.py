"""The door of quantization: checks, the registered operations with their fakes, and the choice of implementation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.formats import fp8_format
from octavo.numerics.granularity import ROW, TENSOR, Granularity, parse_granularity
from octavo.numerics.qtensor import QTensor
from octavo.numerics.rounding import new_seed
from octavo.ops.checks import check_matrix
from octavo.ops.inductor import operation
from octavo.ops.quantization.reference import quantize as reference_quantize
from octavo.ops.quantization.reference import quantize_scaled as reference_quantize_scaled
from octavo.ops.transposition import transpose
from octavo.ops.triton_support import converts, fits, kernels_of


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


def quantize_stack(tensors: Sequence[Tensor], cast: Cast) -> QTensor:
    """Quantize matrices [N_i, K] by row, each on its own, and stack them: data [sum of N_i, K]."""
    for x in tensors:
        _check(x)
    if cast.granularity != ROW or cast.rounding != "nearest":
        raise ValueError(f"quantize_stack takes a cast by row, rounded to nearest, got {cast}")
    data, scale = torch.ops.octavo.quantize_stack(list(tensors), *_words(cast))
    return QTensor(data, scale, cast.fmt, ROW)


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
    check_matrix("quantize", x)


def _check_factor(name: str, factor: Tensor | None, shape: tuple[int, int]) -> None:
    if factor is not None and (factor.dtype != torch.float32 or factor.shape != shape):
        raise ValueError(f"{name} must be float32 {list(shape)}, got {factor.dtype} {list(factor.shape)}")


def _quantizes(x: Tensor, *cast_and_factors: Any) -> bool:
    *cast, column_scale, row_scale, seed = cast_and_factors
    how = _cast(*cast)
    plain = column_scale is None and row_scale is None
    return _has_kernel(x, how, seed) and (plain or how.granularity == ROW)


@operation("quantize", _quantizes)
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
    how = _cast(fmt, granularity, scale, relative_floor)
    if not _quantizes(x, fmt, granularity, scale, relative_floor, column_scale, row_scale, seed):
        return reference_quantize(x.contiguous(), how, column_scale, row_scale, seed)
    kernel = kernels_of("quantization").quantize
    return kernel(x.contiguous(), how, column_scale, row_scale)


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


def _quantizes_stack(tensors: list[Tensor], *cast: Any) -> bool:
    return _has_kernel(tensors[0], _cast(*cast), None)


@operation("quantize_stack", _quantizes_stack)
def _quantize_stack(
    tensors: list[Tensor], fmt: str, granularity: str, scale: str, relative_floor: float
) -> tuple[Tensor, Tensor]:
    how = _cast(fmt, granularity, scale, relative_floor)
    if _quantizes_stack(tensors, fmt, granularity, scale, relative_floor):
        return kernels_of("quantization").quantize_stack([x.contiguous() for x in tensors], how)
    parts = [reference_quantize(x.contiguous(), how, None, None, None) for x in tensors]
    data = torch.cat([part.view(torch.uint8) for part, _ in parts]).view(how.fmt.dtype)
    return data, torch.cat([s for _, s in parts])


@_quantize_stack.register_fake
def _(tensors: list[Tensor], fmt: str, granularity: str, scale: str, relative_floor: float) -> tuple[Tensor, Tensor]:
    shape = (sum(x.shape[0] for x in tensors), tensors[0].shape[1])
    return _fake(tensors[0], shape, _cast(fmt, granularity, scale, relative_floor))


def _quantizes_transposed(x: Tensor, *cast_and_seed: Any) -> bool:
    *cast, seed = cast_and_seed
    return _has_kernel(x, _cast(*cast), seed)


@operation("quantize_transposed", _quantizes_transposed)
def _quantize_transposed(
    x: Tensor, fmt: str, granularity: str, scale: str, relative_floor: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check(x)
    how = _cast(fmt, granularity, scale, relative_floor)
    if not _quantizes_transposed(x, fmt, granularity, scale, relative_floor, seed):
        return reference_quantize(x.t().contiguous(), how, None, None, seed)
    kernel = kernels_of("quantization")
    if how.granularity.rows == 1 and how.granularity.cols is not None:
        return kernel.quantize_transposed(x.contiguous(), how)
    return kernel.quantize(x.t().contiguous(), how, None, None)


@_quantize_transposed.register_fake
def _(
    x: Tensor, fmt: str, granularity: str, scale: str, relative_floor: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _fake(x, (x.shape[1], x.shape[0]), _cast(fmt, granularity, scale, relative_floor))


def _quantizes_scaled(x: Tensor, scale: Tensor, fmt: str, seed: Tensor | None) -> bool:
    return _has_kernel(x, _cast(fmt, "tensor", "fp32", 0.0), seed)


@operation("quantize_scaled", _quantizes_scaled)
def _quantize_scaled(x: Tensor, scale: Tensor, fmt: str, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(x)
    if not _quantizes_scaled(x, scale, fmt, seed):
        return reference_quantize_scaled(x.contiguous(), scale, fp8_format(fmt), seed)
    kernel = kernels_of("quantization").quantize_scaled
    return kernel(x.contiguous(), scale, fp8_format(fmt))


@_quantize_scaled.register_fake
def _(x: Tensor, scale: Tensor, fmt: str, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(x)
    return x.new_empty(x.shape, dtype=fp8_format(fmt).dtype), x.new_empty((1, 1), dtype=torch.float32)


def _has_kernel(x: Tensor, how: Cast, seed: Tensor | None) -> bool:
    """Whether the Triton kernels quantize this; stochastic rounding and huge rows are left to the twin."""
    return seed is None and converts(x, how.format) and fits(how, x.shape[1])


def _fake(x: Tensor, shape: tuple[int, ...], cast: Cast) -> tuple[Tensor, Tensor]:
    _check(x)
    granularity: Granularity = cast.granularity
    scale_dtype = torch.float8_e8m0fnu if cast.scale == "e8m0" else torch.float32
    return (
        x.new_empty(shape, dtype=cast.fmt.dtype),
        x.new_empty(granularity.scale_shape(shape), dtype=scale_dtype),
    )
