"""The door of the norms: checks, the registered operations with their fakes, and the choice of implementation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops.checks import FLOATS, check_matrix, check_row_cast, check_tensor
from octavo.ops.inductor import operation
from octavo.ops.norm.reference import norm_backward as reference_backward
from octavo.ops.norm.reference import norm_quantize as reference_quantize
from octavo.ops.triton_support import kernels_of, runs_fused


class Normed(NamedTuple):
    """What a norm leaves: the sum it normed, its quantized output, and the statistics [M, 1] that backward needs."""

    total: Tensor
    output: QTensor
    mean: Tensor
    rstd: Tensor


def norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cast: Cast,
    *,
    center: bool,
) -> Normed:
    """Add, norm and quantize by row in one pass.

    Args:
        x: [M, K], float32, bfloat16 or float16, as all that follow.
        residual: [M, K], added to x first.
        weight, bias: [K].
        eps: under the square root, rounded to float32.
        cast: of the output, by row, rounded to nearest, with scale "fp32" or "pow2", without a relative floor.
        center: subtract the mean (layer norm) or not (root-mean-square norm).

    Raises:
        ValueError: for another cast, shape or dtype.
    """
    check_row_cast("norm_quantize", cast)
    total, data, scale, mean, rstd = torch.ops.octavo.norm_quantize(
        x, residual, weight, bias, eps, cast.format, cast.scale, center
    )
    return Normed(x if residual is None else total, QTensor(data, scale, cast.fmt, ROW), mean, rstd)


def norm_backward(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, *, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient through a norm.

    Args:
        dn, x: [M, K], the gradient of the output and what was normed.
        weight, mean, rstd: [K], and float32 [M, 1], as given to and returned by `norm_quantize`.
        residual: [M, K], a gradient that reached x beside the norm, added to the result.
        center: as in `norm_quantize`.

    Returns:
        dx [M, K] in x's dtype, dweight [K] and dbias [K] in weight's, summed in float32 (dbias empty unless `center`).

    Raises:
        ValueError: for another shape or dtype.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.octavo.norm_backward(dn, x, weight, mean, rstd, residual, center)
    return result


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
    check_matrix("a norm", x)
    check_tensor("residual", residual, tuple(x.shape), *FLOATS)
    check_tensor("weight", weight, (x.shape[1],), *FLOATS)
    check_tensor("bias", bias, (x.shape[1],), *FLOATS)


def _check_backward(dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None) -> None:
    _check(x, residual, weight, None)
    check_tensor("dn", dn, tuple(x.shape), *FLOATS)
    check_tensor("mean", mean, (x.shape[0], 1), torch.float32)
    check_tensor("rstd", rstd, (x.shape[0], 1), torch.float32)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _quantizes(x: Tensor, residual: Any, weight: Any, bias: Any, eps: float, fmt: str, *_: Any) -> bool:
    return runs_fused(x, x.shape[1], fmt)


@operation("norm_quantize", _quantizes)
def _norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    fmt: str,
    scale: str,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, residual, weight, bias)
    eps = float(np.float32(eps))  # what Triton would make of it, for the twin too
    on_gpu = _quantizes(x, residual, weight, bias, eps, fmt)
    run = kernels_of("norm").norm_quantize if on_gpu else reference_quantize
    x, residual, weight, bias = x.contiguous(), _contiguous(residual), weight.contiguous(), _contiguous(bias)
    return run(x, residual, weight, bias, eps, Cast(fmt, ROW, scale), center)


@_norm_quantize.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    fmt: str,
    scale: str,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, residual, weight, bias)
    rows = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    data = x.new_empty(x.shape, dtype=Cast(fmt).fmt.dtype)
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return total, data, torch.empty_like(rows), torch.empty_like(rows), rows


def _differentiates(dn: Tensor, x: Tensor, *_: Any) -> bool:
    return runs_fused(x, x.shape[1])


@operation("norm_backward", _differentiates)
def _norm_backward(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(dn, x, weight, mean, rstd, residual)
    run = kernels_of("norm").norm_backward if _differentiates(dn, x) else reference_backward
    dn, x, weight, mean, rstd = (t.contiguous() for t in (dn, x, weight, mean, rstd))
    return run(dn, x, weight, mean, rstd, _contiguous(residual), center)


@_norm_backward.register_fake
def _(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(dn, x, weight, mean, rstd, residual)
    dweight = weight.new_empty(x.shape[1])
    return x.new_empty(x.shape), dweight, weight.new_empty(x.shape[1] if center else 0)
