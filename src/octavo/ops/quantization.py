"""Quantization: from a matrix to eight-bit data and scales; and again, for scales that are given.

    scale = amax(block) / max       inv_scale = 1 / scale       data = cast(x * inv_scale)

in float32. Each step is rounded once, to nearest, and the kernels equal the references, byte for byte. The three
roundings can lift the largest element above max by at most 2^-22 of it. The cast rounds that away: no clamp is needed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.formats import E2M1, Format
from octavo.numerics.formats import cast as cast_to
from octavo.numerics.qtensor import ROW, TENSOR, Cast, Granularity, QTensor
from octavo.numerics.scaling import new_seed, quotient, scale_from_amax, scale_mantissa, uniform_noise
from octavo.ops.launching import converts, fits, runs_fused
from octavo.ops.registration import FLOATS, check_matrix, check_nearest, check_row_cast, check_tensor, operation
from octavo.ops.transposition import placed, transpose_reference


def quantize_reference(
    x: Tensor, cast: Cast, column_scale: Tensor | None, row_scale: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Data and scale of x [M, K] * column_scale [1, K] * row_scale [M, 1], multiplied in this order if given."""
    x = x.float()
    if column_scale is not None:
        x = x * column_scale
    if row_scale is not None:
        x = x * row_scale
    scale = cast.scale_of(cast.granularity.amax(x))
    x = divided(x, cast.granularity.expand(scale, tuple(x.shape)), cast.fmt)
    data = cast_to(x, cast.fmt, None if seed is None else uniform_noise(x.shape, seed))
    if cast.scale_dtype == torch.float32:
        return data, scale
    return data, (scale.view(torch.int32) >> 23).to(torch.uint8).view(cast.scale_dtype)  # powers of two, and NaN


def divided(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """float32 `x` over its scale. Ties are common between the few numbers of E2M1, so these are divided exactly."""
    return quotient(x, scale) if fmt is E2M1 else x * (1 / scale)


def _quantize_reference(
    x: Tensor, cast: Cast, column_scale: Tensor | None, mantissa_of: Tensor | None, seed: Tensor | None, matrices: int
) -> tuple[Tensor, Tensor]:
    """Data and scale of x, or of so many stacked `matrices`: by row, without factors, each with a floor of its own."""
    if matrices > 1:
        return quantize_stack_reference(list(x.view(matrices, len(x) // matrices, x.shape[1])), cast, True)
    row_scale = None if mantissa_of is None else scale_mantissa(mantissa_of)
    return quantize_reference(x, cast, column_scale, row_scale, seed)


def quantize_transposed_reference(
    x: Tensor, cast: Cast, seed: Tensor | None, place: Tensor | None
) -> tuple[Tensor, Tensor]:
    return quantize_reference(placed(x, place).t().contiguous(), cast, None, None, seed)


def quantize_stack_reference(tensors: list[Tensor], cast: Cast, stored: bool) -> tuple[Tensor, Tensor]:
    """Data and scales of the stacked matrices. Without `stored` no data, and the scales [sum of N_i, 1] before a
    relative floor and a power of two."""
    if not stored:
        scales = [scale_from_amax(cast.granularity.amax(x.float()), cast.fmt) for x in tensors]
        return None, torch.cat(scales)  # type: ignore[return-value]
    data, parts = zip(*(quantize_reference(x, cast, None, None, None) for x in tensors), strict=True)
    return joined(data), joined(parts)


def quantize_scaled_reference(x: Tensor, scale: Tensor, fmt: Format, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Data of `x` under a given scale, and the amax [1, 1] of x. If x holds inf or NaN, all data is NaN."""
    x = x.float()
    amax = x.abs().amax().view(1, 1) if x.numel() else x.new_zeros(1, 1)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    noise = uniform_noise(x.shape, seed) if seed is not None else None
    return cast_to(divided(x, scale, fmt), fmt, noise), amax


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
    data, scale = _quantize(x, cast.spec, column_scale, mantissa_of, _seed(x, cast), 1)
    return QTensor(data, scale, cast.fmt, cast.granularity)


def quantize_stack(tensors: Sequence[Tensor], cast: Cast) -> QTensor:
    """Quantize each matrix [N_i, K] by row, rounded to nearest, and stack the results: data [sum of N_i, K].

    A relative floor of the cast applies to each matrix by itself.
    """
    check_nearest("quantize_stack", cast)
    data, scale = _quantize_stack(list(tensors), cast.spec, True)
    return QTensor(data, scale, cast.fmt, ROW)


def quantize_matrices(w: Tensor, cast: Cast) -> QTensor:
    """Quantize the matrices of `w` [E, N, K], each by itself: data [E, N, K], scale [E, N, 1] or those of blocks.

    A cast by row is rounded to nearest. A relative floor of it applies to each matrix by itself.
    """
    if w.ndim != 3 or w.dtype not in FLOATS:
        raise ValueError(f"quantize_matrices takes [E, N, K] of float32, bfloat16 or float16, got {w.dtype} {w.shape}")
    if cast.by_row:
        check_nearest("quantize_matrices", cast)
        data, scale = _quantize(w.flatten(0, 1), cast.spec, None, None, None, len(w))
        return QTensor(data.view(w.shape), scale.view(*w.shape[:2], 1), cast.fmt, ROW)
    parts = [quantize(part, cast) for part in matrices(w, cast.granularity.rows)]
    data, scale = joined([q.data for q in parts]), joined([q.scale for q in parts])
    scale = scale.view(cast.granularity.scale_shape(tuple(w.shape)))
    return QTensor(data.view(w.shape), scale, cast.fmt, cast.granularity)


def quantize_matrices_transposed(w: Tensor, cast: Cast) -> QTensor:
    """Quantize the transposed matrices of `w` [E, N, K]: data [E, K, N], a view; the blocks of `cast` along N."""
    parts = [quantize_transposed(part, cast) for part in matrices(w, cast.granularity.cols)]
    data, scale = joined([q.data for q in parts], 1), joined([q.scale for q in parts], 1)
    data, scale = (t.view(len(t), len(w), -1).transpose(0, 1) for t in (data, scale))
    return QTensor(data, scale, cast.fmt, cast.granularity)


def matrices(t: Tensor, size: int | None) -> list[Tensor]:
    """The matrices of `t` [E, N, K] as one [E * N, K] where none of its blocks of `size` rows lies in two matrices."""
    whole = len(t) == 0 or (size is not None and t.shape[1] % size == 0)
    return [t.flatten(0, 1)] if whole else list(t)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Eight-bit matrices or scales beside each other."""
    bytes_of = [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]  # torch.cat lacks E8M0
    return parts[0] if len(parts) == 1 else torch.cat(bytes_of, dim).view(parts[0].dtype)


def row_scales(tensors: Sequence[Tensor], cast: Cast) -> Tensor:
    """The float32 scales [sum of N_i, 1] of the matrices [N_i, K], stacked, by row.

    These are the scales of `quantize_stack` before the cast's relative floor and its rounding to powers of two, which
    may depend on parts of the matrices that are elsewhere. `requantize` computes the data for the final scales.
    """
    if not cast.by_row:
        raise ValueError(f"row_scales takes a cast by row, got {cast}")
    return _quantize_stack(list(tensors), cast.spec, False)[1]


def quantize_transposed(x: Tensor, cast: Cast, place: Tensor | None = None) -> QTensor:
    """Quantize the transpose of `x` [M, K]: data [K, M], the blocks of `cast` along M; [K, M'] with `place`.

    place: int32 [M'], the row of x that becomes each column, or -1 for a column of zeros (`octavo.ops.aligned_groups`).
    """
    data, scale = _quantize_transposed(x, cast.spec, _seed(x, cast), place)
    return QTensor(data, scale, cast.fmt, cast.granularity)


def quantize_scaled(x: Tensor, scale: Tensor, cast: Cast) -> tuple[QTensor, Tensor]:
    """Quantize `x` [M, K] in one pass by a given scale [1, 1] of the whole tensor (delayed scaling).

    Also the amax [1, 1] of x. Numbers beyond the format's max saturate. If x holds inf or NaN, all data is NaN.
    """
    check_matrix("quantize_scaled", x)
    data, amax = _quantize_scaled(x, scale.float(), cast.format, _seed(x, cast))
    return QTensor(data, scale, cast.fmt, TENSOR), amax


def _seed(x: Tensor, cast: Cast) -> Tensor | None:
    return new_seed(x.device) if cast.rounding == "stochastic" else None


def _check(x: Tensor, cast: Cast, column_scale: Tensor | None, mantissa_of: Tensor | None, *rest: Any) -> None:
    check_matrix("quantize", x)
    check_tensor("column_scale", column_scale, (1, x.shape[1]), torch.float32)
    check_tensor("mantissa_of", mantissa_of, (x.shape[0], 1), torch.float32)


def _check_stack(tensors: Sequence[Tensor], *_: Any) -> None:
    """Raise ValueError unless these are matrices with the same number of columns: a kernel takes that of the first."""
    for x in tensors:
        check_matrix("a stack", x)
    if any(x.shape[1] != tensors[0].shape[1] for x in tensors):
        raise ValueError(f"need matrices with the same number of columns, got {[list(x.shape) for x in tensors]}")


def _check_transposed(x: Tensor, cast: Cast, seed: Tensor | None, place: Tensor | None) -> None:
    check_matrix("quantize_transposed", x)
    check_tensor("place", place, (0 if place is None else place.numel(),), torch.int32)


def _has_kernel(x: Tensor, cast: Cast, columns: int) -> bool:
    """True if a kernel quantizes rows of `columns` elements; very long ones are left to the reference, and so is int8
    not by row."""
    if cast.format == "int8":
        return cast.by_row and not cast.relative_floor and runs_fused(x, columns, cast.format)
    return converts(x, cast.format) and fits(cast, columns)


def like_quantized(x: Tensor, shape: tuple[int, ...], cast: Cast) -> tuple[Tensor, Tensor]:
    """Data and scale of a tensor of this shape, without values."""
    data = x.new_empty(shape, dtype=cast.fmt.dtype)
    return data, x.new_empty(cast.granularity.scale_shape(shape), dtype=cast.scale_dtype)


def _like_stack(tensors: list[Tensor], cast: Cast, stored: bool) -> tuple[Tensor, Tensor]:
    shape, x = _shape(tensors), tensors[0]
    if stored:
        return like_quantized(x, shape, cast)
    return x.new_empty(0), x.new_empty((shape[0], 1), dtype=torch.float32)


_quantize = operation(
    check=_check,
    like=lambda x, cast, *rest: like_quantized(x, tuple(x.shape), cast),
    runs=lambda x, cast, *rest: _has_kernel(x, cast, x.shape[1]) and (cast.by_row or rest[:2] == (None, None)),
)(_quantize_reference)
_quantize_stack = operation(
    check=_check_stack, like=_like_stack, runs=lambda stack, cast, _: _has_kernel(stack[0], cast, stack[0].shape[1])
)(quantize_stack_reference)
_quantize_transposed = operation(
    check=_check_transposed,
    like=lambda x, cast, seed, place: like_quantized(x, (x.shape[1], (x if place is None else place).shape[0]), cast),
    runs=lambda x, cast, seed, place: _has_kernel(x, cast, (x if place is None else place).shape[0]),
    strided=("x",),  # the kernel copies it only where it must
)(quantize_transposed_reference)
_quantize_scaled = operation(
    like=lambda x, scale, fmt, seed: (x.new_empty(x.shape, dtype=fmt.dtype), scale.new_empty((1, 1))),
    runs=lambda x, scale, fmt, seed: converts(x, fmt.name),
)(quantize_scaled_reference)


# ---- Requantization: data for given scales, as an earlier quantization computed it or by larger scales.
#
# The same scale gives the same bytes as before.
#
# Forward contracts x and w along their columns, backward along their rows, so backward needs the bytes transposed.
# Saving the forward bytes for it costs one byte an element. If the unquantized tensor is saved anyway (a weight, the
# input of a norm), casting it again while transposing needs no memory, and reads one byte an element more.


TILE = 64  # of the kernel that casts again: a square block has a multiple of so many rows and columns


def requantize_reference(
    tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, transposed: bool
) -> Tensor:
    """[sum of M_i, K], or its transpose, from matrices [M_i, K] and the scales of the stacked matrix."""
    x = torch.cat([x.float() for x in tensors])
    data = cast_to(divided(x, granularity.expand(scale, tuple(x.shape)), fmt), fmt)
    return transpose_reference(data, None) if transposed else data


def requantize_norm_reference(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: Format
) -> Tensor:
    """[K, M] from x [M, K], the statistics of its norm [M, 1] and the row scales [M, 1] of the norm's output."""
    centered = x.float() if mean is None else x.float() - mean
    normed = centered * rstd * weight.float()
    normed = normed if bias is None else normed + bias.float()
    return transpose_reference(cast_to(divided(normed, scale, fmt), fmt), None)


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


def _check_scales(tensors: Sequence[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, *_: Any) -> None:
    _check_stack(tensors)
    if scale.shape != granularity.scale_shape(_shape(tensors)):
        shapes = [list(x.shape) for x in tensors]
        raise ValueError(f"need the scales of {shapes} by {granularity.name}, got scales {list(scale.shape)}")


def _check_norm(x: Tensor, *rest: Any) -> None:
    check_matrix("requantize_norm", x)
    mean, rstd, weight, bias, scale, _ = rest
    for name, t in (("mean", mean), ("rstd", rstd), ("scale", scale)):
        check_tensor(name, t, (x.shape[0], 1), torch.float32)
    for name, t in (("weight", weight), ("bias", bias)):
        check_tensor(name, t, (x.shape[1],), *FLOATS)


def _shape(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """[sum of M_i, K], the shape of the stacked matrix."""
    return sum([x.shape[0] for x in tensors]), tensors[0].shape[1]


def _like_again(tensors: Sequence[Tensor], scale: Tensor, fmt: Format, *rest: Any) -> Tensor:
    rows, columns = _shape(tensors)
    return scale.new_empty((columns, rows) if rest[-1] else (rows, columns), dtype=fmt.dtype)


def _requantizes(tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity, *rest: Any) -> bool:
    """By row, by tensor, or one by square blocks of whole tiles."""
    square = granularity.transposes and len(tensors) == 1 and (granularity.rows or TILE) % TILE == 0
    return (granularity in (ROW, TENSOR) or square) and converts(scale, fmt.name)


_requantize = operation(check=_check_scales, like=_like_again, runs=_requantizes, after=True)(requantize_reference)
_requantize_norm = operation(
    check=_check_norm,
    like=lambda x, *rest: x.new_empty((x.shape[1], x.shape[0]), dtype=rest[-1].dtype),
    runs=lambda *args: converts(args[5], args[6].name),
)(requantize_norm_reference)
