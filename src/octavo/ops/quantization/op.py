"""Quantization of a matrix: checks, the registered operations, and the choice between the kernels and the reference."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.formats import eight_bit_format
from octavo.numerics.granularity import ROW, TENSOR
from octavo.numerics.qtensor import QTensor
from octavo.numerics.rounding import new_seed
from octavo.numerics.scaling import scale_mantissa
from octavo.ops.checks import FLOATS, check_matrix, check_tensor, eager_check
from octavo.ops.inductor import operation
from octavo.ops.quantization.reference import quantize_reference, quantize_scaled_reference, row_scales_reference
from octavo.ops.triton_support import converts, fits, quantizes_rows


def quantize(
    x: Tensor, cast: Cast, *, column_scale: Tensor | None = None, mantissa_of: Tensor | None = None
) -> QTensor:
    """Quantize a matrix.

    Args:
        x: [M, K], float32, bfloat16 or float16. A block that holds inf or NaN gets the scale NaN.
        cast: format, granularity, scale and rounding. Its history is ignored: see `quantize_scaled`.
        column_scale: [1, K] float32, multiplied into the columns of x first.
        mantissa_of: [M, 1] float32, positive and normal. The mantissa m of each number, m * 2^e with m in [1, 2), is
            multiplied into its row after that.

    Raises:
        ValueError: for another shape or dtype.
    """
    _check(x, column_scale, mantissa_of)
    data, scale = _quantize(x, cast.spec, column_scale, mantissa_of, _seed(x, cast))
    return QTensor(data, scale, cast.fmt, cast.granularity)


def quantize_stack(tensors: Sequence[Tensor], cast: Cast) -> QTensor:
    """Quantize each matrix [N_i, K] by row and stack the results: data [sum of N_i, K].

    A relative floor of the cast applies to each matrix by itself.

    Raises:
        ValueError: for another shape or dtype, or a cast that is not by row and rounded to nearest.
    """
    for x in tensors:
        check_matrix("quantize_stack", x)
    if not cast.by_row or cast.rounding != "nearest":
        raise ValueError(f"quantize_stack takes a cast by row, rounded to nearest, got {cast}")
    data, scale = _quantize_stack(list(tensors), cast.spec)
    return QTensor(data, scale, cast.fmt, ROW)


def quantize_matrices(w: Tensor, cast: Cast) -> QTensor:
    """Quantize the matrices of `w` [E, N, K] by row: data [E, N, K], scale [E, N, 1].

    A relative floor of the cast applies to each matrix by itself.

    Raises:
        ValueError: for another shape or dtype, or a cast that is not by row and rounded to nearest.
    """
    if w.ndim != 3 or w.dtype not in FLOATS:
        raise ValueError(f"quantize_matrices takes [E, N, K] of float32, bfloat16 or float16, got {w.dtype} {w.shape}")
    if not cast.by_row or cast.rounding != "nearest":
        raise ValueError(f"quantize_matrices takes a cast by row, rounded to nearest, got {cast}")
    data, scale = _quantize_matrices(w, cast.spec)
    return QTensor(data.view(w.shape), scale.view(*w.shape[:2], 1), cast.fmt, ROW)


def row_scales(tensors: Sequence[Tensor], cast: Cast) -> Tensor:
    """The float32 scales [sum of N_i, 1] of the matrices [N_i, K], stacked, by row.

    These are the scales of `quantize_stack` before the cast's relative floor and its rounding to powers of two, which
    may depend on parts of the matrices that are elsewhere. `requantize` computes the data for the final scales.

    Raises:
        ValueError: for another shape or dtype, or a cast that is not by row.
    """
    for x in tensors:
        check_matrix("row_scales", x)
    if not cast.by_row:
        raise ValueError(f"row_scales takes a cast by row, got {cast}")
    result: Tensor = _row_scales(list(tensors), cast.spec)
    return result


def quantize_transposed(x: Tensor, cast: Cast) -> QTensor:
    """Quantize the transpose of `x` [M, K]: data [K, M], the blocks of `cast` along M."""
    check_matrix("quantize_transposed", x)
    data, scale = _quantize_transposed(x, cast.spec, _seed(x, cast))
    return QTensor(data, scale, cast.fmt, cast.granularity)


def quantize_scaled(x: Tensor, scale: Tensor, cast: Cast) -> tuple[QTensor, Tensor]:
    """Quantize `x` [M, K] in one pass by a given scale [1, 1] of the whole tensor (delayed scaling).

    Returns:
        The quantized tensor and the amax [1, 1] of x. Numbers beyond the format's max saturate. If x holds inf or NaN,
        all data is NaN.
    """
    check_matrix("quantize_scaled", x)
    data, amax = _quantize_scaled(x, scale.float(), cast.format, _seed(x, cast))
    return QTensor(data, scale, cast.fmt, TENSOR), amax


@eager_check
def _check(x: Tensor, column_scale: Tensor | None, mantissa_of: Tensor | None) -> None:
    check_matrix("quantize", x)
    check_tensor("column_scale", column_scale, (1, x.shape[1]), torch.float32)
    check_tensor("mantissa_of", mantissa_of, (x.shape[0], 1), torch.float32)


def _seed(x: Tensor, cast: Cast) -> Tensor | None:
    return new_seed(x.device) if cast.rounding == "stochastic" else None


def _has_kernel(x: Tensor, cast: Cast) -> bool:
    """Whether a kernel quantizes `x`; very long rows are left to the reference, and so is int8 in another granularity
    than rows."""
    if cast.format == "int8":
        return cast.by_row and not cast.relative_floor and quantizes_rows(x, x.shape[1], cast.format)
    return converts(x, cast.format) and fits(cast, x.shape[1])


def _quantizes(
    x: Tensor, spec: str, column_scale: Tensor | None, mantissa_of: Tensor | None, seed: Tensor | None
) -> bool:
    cast = parse_cast(spec)
    plain = column_scale is None and mantissa_of is None
    return _has_kernel(x, cast) and (plain or cast.by_row)


@operation("quantize", _quantizes)
def _quantize(
    x: Tensor, spec: str, column_scale: Tensor | None, mantissa_of: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not _quantizes(x, spec, column_scale, mantissa_of, seed):
        m = None if mantissa_of is None else scale_mantissa(mantissa_of)
        return quantize_reference(x.contiguous(), parse_cast(spec), column_scale, m, seed)
    from octavo.ops.quantization import kernel

    return kernel.quantize(x.contiguous(), parse_cast(spec), column_scale, mantissa_of, seed)


@_quantize.register_fake
def _(
    x: Tensor, spec: str, column_scale: Tensor | None, mantissa_of: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    _check(x, column_scale, mantissa_of)
    return _empty(x, tuple(x.shape), parse_cast(spec))


def _quantizes_stack(tensors: list[Tensor], spec: str) -> bool:
    return _has_kernel(tensors[0], parse_cast(spec))


@operation("quantize_stack", _quantizes_stack)
def _quantize_stack(tensors: list[Tensor], spec: str) -> tuple[Tensor, Tensor]:
    cast = parse_cast(spec)
    if _quantizes_stack(tensors, spec):
        from octavo.ops.quantization import kernel

        return kernel.quantize_stack([x.contiguous() for x in tensors], cast)
    parts = [quantize_reference(x.contiguous(), cast, None, None, None) for x in tensors]
    data = torch.cat([part.view(torch.uint8) for part, _ in parts]).view(cast.fmt.dtype)
    return data, torch.cat([scale for _, scale in parts])


@_quantize_stack.register_fake
def _(tensors: list[Tensor], spec: str) -> tuple[Tensor, Tensor]:
    shape = (sum(x.shape[0] for x in tensors), tensors[0].shape[1])
    return _empty(tensors[0], shape, parse_cast(spec))


def _quantizes_matrices(w: Tensor, spec: str) -> bool:
    cast = parse_cast(spec)
    return converts(w, cast.format) and fits(cast, w.shape[2])


@operation("quantize_matrices", _quantizes_matrices)
def _quantize_matrices(w: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    if len(w) == 0:  # a rank of FSDP2 without a matrix
        return _empty(w, (0, w.shape[2]), parse_cast(spec))
    if not _quantizes_matrices(w, spec):
        return _quantize_stack(list(w), spec)  # type: ignore[no-any-return]
    from octavo.ops.quantization import kernel

    return kernel.quantize(w.contiguous().view(-1, w.shape[2]), parse_cast(spec), None, None, matrices=w.shape[0])


@_quantize_matrices.register_fake
def _(w: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    return _empty(w, (w.shape[0] * w.shape[1], w.shape[2]), parse_cast(spec))


@operation("row_scales", _quantizes_stack)
def _row_scales(tensors: list[Tensor], spec: str) -> Tensor:
    if not _quantizes_stack(tensors, spec):
        return row_scales_reference(tensors, parse_cast(spec))
    from octavo.ops.quantization import kernel

    return kernel.row_scales([x.contiguous() for x in tensors], parse_cast(spec))


@_row_scales.register_fake
def _(tensors: list[Tensor], spec: str) -> Tensor:
    return tensors[0].new_empty((sum(x.shape[0] for x in tensors), 1), dtype=torch.float32)


def _quantizes_transposed(x: Tensor, spec: str, seed: Tensor | None) -> bool:
    return _has_kernel(x, parse_cast(spec))


@operation("quantize_transposed", _quantizes_transposed)
def _quantize_transposed(x: Tensor, spec: str, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    cast = parse_cast(spec)
    if not _quantizes_transposed(x, spec, seed):
        return quantize_reference(x.t().contiguous(), cast, None, None, seed)
    from octavo.ops.quantization import kernel

    return kernel.quantize_transposed(x, cast, seed)


@_quantize_transposed.register_fake
def _(x: Tensor, spec: str, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(x, (x.shape[1], x.shape[0]), parse_cast(spec))


def _quantizes_scaled(x: Tensor, scale: Tensor, fmt: str, seed: Tensor | None) -> bool:
    return converts(x, fmt)


@operation("quantize_scaled", _quantizes_scaled)
def _quantize_scaled(x: Tensor, scale: Tensor, fmt: str, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    if not _quantizes_scaled(x, scale, fmt, seed):
        return quantize_scaled_reference(x.contiguous(), scale, eight_bit_format(fmt), seed)
    from octavo.ops.quantization import tensor_kernel

    return tensor_kernel.quantize_scaled(x.contiguous(), scale, eight_bit_format(fmt), seed)


@_quantize_scaled.register_fake
def _(x: Tensor, scale: Tensor, fmt: str, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=eight_bit_format(fmt).dtype), x.new_empty((1, 1), dtype=torch.float32)


def _empty(x: Tensor, shape: tuple[int, ...], cast: Cast) -> tuple[Tensor, Tensor]:
    """Data and scale of a matrix of `shape`, without values."""
    scale_dtype = torch.float8_e8m0fnu if cast.scale == "e8m0" else torch.float32
    data = x.new_empty(shape, dtype=cast.fmt.dtype)
    return data, x.new_empty(cast.granularity.scale_shape(shape), dtype=scale_dtype)
