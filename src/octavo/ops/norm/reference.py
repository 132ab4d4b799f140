"""The norms in plain PyTorch. The kernels must equal them, and a CPU runs them.

    mean = sum(x) / K (layer norm; 0 for the root mean square),  rstd = 1 / sqrt(sum((x - mean)^2) / K + eps)
    n = (x - mean) * rstd * weight + bias

Each of the two sums first adds groups of 8 neighbours in float32, pairwise and in a fixed order. It then adds the
groups in float64: their order does not change mean and rstd, which are rounded to float32. All other steps are in
float32, each rounded once. n is quantized from float32; it is not rounded to BF16 first.

Sources: Ba et al. (arXiv:1607.06450); Zhang and Sennrich (arXiv:1910.07467).
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.ops.quantization.reference import quantize_reference


def norm_quantize_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cast: Cast,
    center: bool,
    statistics: bool = True,
) -> tuple[Any, Any, Any, Any, Any]:
    """x + residual in x's dtype (None without a residual), data and scale of its norm, and mean and rstd [M, 1] (None
    without `statistics`)."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    mean = _row_sum(wide).div(x.shape[1]).float() if center else wide.new_zeros(x.shape[0], 1)
    rstd = (1 / (_row_sum((wide - mean).square()) / x.shape[1] + eps).sqrt()).float()
    normed = (wide - mean) * rstd * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    data, scale = quantize_reference(normed, cast, None, None, None)
    return None if residual is None else total, data, scale, *((mean, rstd) if statistics else (None, None))


def _row_sum(x: Tensor) -> Tensor:
    """float64 sums [M, 1] of the rows of a float32 matrix."""
    x = F.pad(x, (0, -x.shape[1] % 8))
    for _ in range(3):
        x = x[:, 0::2] + x[:, 1::2]
    return x.double().sum(1, keepdim=True)


def norm_backward_reference(
    dn: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (plus `residual`, a gradient that reaches x on another path), weight and bias."""
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
