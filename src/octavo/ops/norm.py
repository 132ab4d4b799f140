"""Norms with a quantized output, and their gradients.

    mean = sum(x) / K (layer norm; 0 for the root mean square),  rstd = 1 / sqrt(sum((x - mean)^2) / K + eps)
    n = (x - mean) * rstd * weight + bias

Each of the two sums first adds groups of 8 neighbours in float32, pairwise and in a fixed order. It then adds the
groups in float64: their order does not change mean and rstd, which are rounded to float32. All other steps are in
float32, each rounded once. n is quantized from float32; it is not rounded to BF16 first. The kernels equal the
references.

Sources: Ba et al. (arXiv:1607.06450); Zhang and Sennrich (arXiv:1910.07467).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.qtensor import ROW, Cast, QTensor
from octavo.ops.launching import runs_fused
from octavo.ops.quantization import quantize_reference
from octavo.ops.registration import FLOATS, check_matrix, check_row_cast, check_tensor, operation


def norm_quantize_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cast: Cast,
    center: bool,
    statistics: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x + residual in x's dtype (None without a residual), data and scale of its norm, and mean and rstd [M, 1] (None
    without `statistics`)."""
    eps = float(np.float32(eps))  # Triton rounds it so: the reference takes the same number
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    mean = _row_sum(wide).div(x.shape[1]).float() if center else wide.new_zeros(x.shape[0], 1)
    rstd = (1 / (_row_sum((wide - mean).square()) / x.shape[1] + eps).sqrt()).float()
    normed = (wide - mean) * rstd * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    data, scale = quantize_reference(normed, cast, None, None, None)
    kept = (mean, rstd) if statistics else (None, None)
    return None if residual is None else total, data, scale, *kept


def _row_sum(x: Tensor) -> Tensor:
    """float64 sums [M, 1] of the rows of a float32 matrix."""
    x = F.pad(x, (0, -x.shape[1] % 8))
    for _ in range(3):
        x = x[:, 0::2] + x[:, 1::2]
    return x.double().sum(1, keepdim=True)


def norm_backward_reference(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [M, K] in x's dtype, and dweight [K] and dbias [K] in weight's, summed in float32. Without `center`, dbias is
    empty.

    Args:
        dn, x: [M, K], the gradient of the output, and the input of the norm (its residual included).
        weight, mean, rstd: [K], and float32 [M, 1], as given to and returned by `norm_quantize`.
        residual: [M, K], a gradient that reaches x on another path, added to the result.
    """
    dn = dn.float()
    unit = (x.float() - mean) * rstd
    dunit = dn * weight.float()
    dx = dunit - unit * (unit * dunit).mean(1, keepdim=True)
    if center:
        dx = dx - dunit.mean(1, keepdim=True)
    dx = dx * rstd
    if residual is not None:
        dx = dx + residual.float()
    dbias = dn.sum(0) if center else dn.new_zeros(0)
    return dx.to(x.dtype), (dn * unit).sum(0).to(weight.dtype), dbias.to(weight.dtype)


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
        x, residual: [M, K], float32, bfloat16 or float16. The residual is added to x first.
        weight, bias: [K].
        eps: added under the square root, rounded to float32.
        cast: of the output, by row, rounded to nearest, with scale "fp32" or "pow2", without a relative floor.
        center: subtract the mean (layer norm) or not (root-mean-square norm).
    """
    check_row_cast("norm_quantize", cast)
    total, data, scale, mean, rstd = _norm_quantize(x, residual, weight, bias, eps, cast.spec, center, True)
    return Normed(x if residual is None else total, QTensor(data, scale, cast.fmt, ROW), mean, rstd)


def norm_quantize_inference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, cast: Cast, *, center: bool
) -> tuple[Tensor, QTensor]:
    """The total and the output of `norm_quantize`, without the statistics that only the backward pass needs."""
    check_row_cast("norm_quantize_inference", cast)
    total, data, scale, *_ = _norm_quantize(x, residual, weight, bias, eps, cast.spec, center, False)
    return x if residual is None else total, QTensor(data, scale, cast.fmt, ROW)


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, *rest: Any) -> None:
    check_matrix("a norm", x)
    shape = x.shape
    check_tensor("residual", residual, shape, *FLOATS)
    check_tensor("weight", weight, (shape[1],), *FLOATS)
    check_tensor("bias", bias, (shape[1],), *FLOATS)


def _check_backward(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> None:
    _check(x, residual, weight, None)
    check_tensor("dn", dn, x.shape, *FLOATS)
    for name, t in (("mean", mean), ("rstd", rstd)):
        check_tensor(name, t, (x.shape[0], 1), torch.float32)


def _like(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, _, _, cast, _, statistics = rest
    scale = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    mean, rstd = (scale.new_empty(scale.shape) if statistics else x.new_empty(0) for _ in range(2))
    total = x.new_empty(0 if residual is None else x.shape)
    return total, x.new_empty(x.shape, dtype=cast.fmt.dtype), scale, mean, rstd


def _like_backward(dn: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(x.shape[1]), weight.new_empty(x.shape[1] if rest[-1] else 0)


_norm_quantize = operation(check=_check, like=_like, runs=lambda x, *rest: runs_fused(x, x.shape[1], rest[4].format))(
    norm_quantize_reference
)
norm_backward = operation(
    check=_check_backward, like=_like_backward, runs=lambda dn, x, *rest: runs_fused(x, x.shape[1])
)(norm_backward_reference)
