"""The door of the norms: checks, the registered operations with their fakes, and the choice of implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops.kernels import LONGEST_ROW, has_kernels, kernels_of
from octavo.ops.norm.reference import norm_backward as reference_backward
from octavo.ops.norm.reference import norm_quantize as reference_quantize


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
        x: [M, K], floating.
        residual: [M, K], added to x first.
        weight, bias: [K].
        eps: under the square root.
        cast: of the output, by row, rounded to nearest.
        center: subtract the mean (layer norm) or not (root-mean-square norm).
    """
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
        weight, mean, rstd: as in `norm_quantize`.
        residual: [M, K], a gradient that reached x beside the norm, added to the result.
        center: as in `norm_quantize`.

    Returns:
        dx [M, K] in x's dtype, dweight [K] and dbias [K] in float32 (dbias empty unless `center`).
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.octavo.norm_backward(dn, x, weight, mean, rstd, residual, center)
    return result


def _check(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"norm takes x [M, K] and weight [K], got {list(x.shape)} and {list(weight.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {list(x.shape)}, got {list(residual.shape)}")


@torch.library.custom_op("octavo::norm_quantize", mutates_args=())
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
    _check(x, residual, weight)
    how = Cast(fmt, ROW, scale)
    if not (has_kernels(x.device) and x.shape[1] <= LONGEST_ROW):
        return reference_quantize(x, residual, weight, bias, eps, how, center)
    kernel = kernels_of("norm").norm_quantize
    return kernel(x.contiguous(), None if residual is None else residual.contiguous(), weight, bias, eps, how, center)


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
    rows = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    data = x.new_empty(x.shape, dtype=Cast(fmt).fmt.dtype)
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return total, data, torch.empty_like(rows), torch.empty_like(rows), rows


@torch.library.custom_op("octavo::norm_backward", mutates_args=())
def _norm_backward(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, residual, weight)
    if not (has_kernels(x.device) and x.shape[1] <= LONGEST_ROW):
        return reference_backward(dn, x, weight, mean, rstd, residual, center)
    kernel = kernels_of("norm").norm_backward
    residual = None if residual is None else residual.contiguous()
    return kernel(dn.contiguous(), x.contiguous(), weight, mean, rstd, residual, center)


@_norm_backward.register_fake
def _(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dweight = x.new_empty(x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape), dweight, x.new_empty(x.shape[1] if center else 0, dtype=torch.float32)
