"""The norms: checks, the registered operations, and the choice between the kernels and the reference."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops.checks import FLOATS, check_matrix, check_row_cast, check_tensor, eager_check
from octavo.ops.inductor import operation
from octavo.ops.norm.reference import norm_backward_reference, norm_quantize_reference
from octavo.ops.triton_support import quantizes_rows, runs_fused


class Normed(NamedTuple):
    """The input of a norm with its residual added, the quantized output, and the statistics [M, 1] for backward."""

    total: Tensor
    output: QTensor
    mean: Tensor
    rstd: Tensor


def norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, cast: Cast, *, center: bool
) -> Normed:
    """Add a residual, norm and quantize by row, in one pass.

    Args:
        x: [M, K], float32, bfloat16 or float16, as are the next three.
        residual: [M, K], added to x first.
        weight, bias: [K].
        eps: added under the square root, rounded to float32.
        cast: of the output, by row, rounded to nearest, with scale "fp32" or "pow2", without a relative floor.
        center: subtract the mean (layer norm) or not (root-mean-square norm).

    Raises:
        ValueError: for another cast, shape or dtype.
    """
    check_row_cast("norm_quantize", cast)
    _check(x, residual, weight, bias)
    total, data, scale, mean, rstd = _norm_quantize(x, cast.spec, residual, weight, bias, eps, center, True)
    return Normed(x if residual is None else total, QTensor(data, scale, cast.fmt, ROW), mean, rstd)


def norm_quantize_inference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, cast: Cast, *, center: bool
) -> tuple[Tensor, QTensor]:
    """The total and the output of `norm_quantize`, without the statistics that only the backward pass needs."""
    check_row_cast("norm_quantize_inference", cast)
    _check(x, residual, weight, bias)
    total, data, scale, *_ = _norm_quantize(x, cast.spec, residual, weight, bias, eps, center, False)
    return x if residual is None else total, QTensor(data, scale, cast.fmt, ROW)


def norm_backward(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, *, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients through a norm.

    Args:
        dn, x: [M, K], the gradient of the output, and the input of the norm (its residual included).
        weight, mean, rstd: [K], and float32 [M, 1], as given to and returned by `norm_quantize`.
        residual: [M, K], a gradient that reaches x on another path, added to the result.
        center: as in `norm_quantize`.

    Returns:
        dx [M, K] in x's dtype, and dweight [K] and dbias [K] in weight's, summed in float32. Without `center`, dbias is
        empty.

    Raises:
        ValueError: for another shape or dtype.
    """
    _check_backward(dn, x, weight, mean, rstd, residual)
    result: tuple[Tensor, Tensor, Tensor] = _norm_backward(dn, x, weight, mean, rstd, residual, center)
    return result


@eager_check
def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
    check_matrix("a norm", x)
    check_tensor("residual", residual, tuple(x.shape), *FLOATS)
    check_tensor("weight", weight, (x.shape[1],), *FLOATS)
    check_tensor("bias", bias, (x.shape[1],), *FLOATS)


@eager_check
def _check_backward(dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None) -> None:
    _check(x, residual, weight, None)
    check_tensor("dn", dn, tuple(x.shape), *FLOATS)
    check_tensor("mean", mean, (x.shape[0], 1), torch.float32)
    check_tensor("rstd", rstd, (x.shape[0], 1), torch.float32)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _quantizes(x: Tensor, spec: str, *rest: Any) -> bool:
    return quantizes_rows(x, x.shape[1], parse_cast(spec).format)


@operation("norm_quantize", _quantizes)
def _norm_quantize(
    x: Tensor,
    spec: str,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    center: bool,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    cast = parse_cast(spec)
    eps = float(np.float32(eps))  # Triton rounds it so: the reference gets the same number
    x, residual, weight, bias = x.contiguous(), _contiguous(residual), weight.contiguous(), _contiguous(bias)
    if not _quantizes(x, spec):
        return norm_quantize_reference(x, residual, weight, bias, eps, cast, center, statistics)
    from octavo.ops.norm import kernel

    return kernel.norm_quantize(x, residual, weight, bias, eps, cast, center, statistics)


@_norm_quantize.register_fake
def _(
    x: Tensor,
    spec: str,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    center: bool,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, residual, weight, bias)
    scale = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    mean, rstd = (scale.new_empty(scale.shape) if statistics else x.new_empty(0) for _ in range(2))
    data = x.new_empty(x.shape, dtype=parse_cast(spec).fmt.dtype)
    return x.new_empty(0 if residual is None else x.shape), data, scale, mean, rstd


def _differentiates(dn: Tensor, x: Tensor, *rest: Any) -> bool:
    return runs_fused(x, x.shape[1])


@operation("norm_backward", _differentiates)
def _norm_backward(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dn, x, weight, mean, rstd = (t.contiguous() for t in (dn, x, weight, mean, rstd))
    if not _differentiates(dn, x):
        return norm_backward_reference(dn, x, weight, mean, rstd, _contiguous(residual), center)
    from octavo.ops.norm import kernel

    return kernel.norm_backward(dn, x, weight, mean, rstd, _contiguous(residual), center)


@_norm_backward.register_fake
def _(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(dn, x, weight, mean, rstd, residual)
    return x.new_empty(x.shape), weight.new_empty(x.shape[1]), weight.new_empty(x.shape[1] if center else 0)
