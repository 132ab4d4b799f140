"""Inputs of norms, torch's own norms and their gradients in float64, and the magnitudes that meet in a result."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from quantize_oracle import matrix
from torch import Tensor

EPS = 1e-5
EPS32 = float(np.float32(EPS))


class Given(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None


@cache
def given(shape: tuple[int, int], dtype: torch.dtype, residual: bool = False, bias: bool = False) -> Given:
    """Rows of very different size, one of zeros. Cached: no test writes into them."""
    x, added = matrix(shape, dtype), matrix((shape[0] + 1, shape[1]), dtype)[: shape[0]]
    weight, shift = (1 + torch.randn(shape[1]) / 4).to(dtype), torch.randn(shape[1]).to(dtype)
    return Given(x, added if residual else None, weight, shift if bias else None)


def norm64(x: Tensor, weight: Tensor, bias: Tensor | None, center: bool, eps: float = EPS) -> Tensor:
    if center:
        return F.layer_norm(x, x.shape[1:], weight, bias, eps)
    n = F.rms_norm(x, x.shape[1:], weight, eps)
    return n if bias is None else n + bias


def statistics64(x: Tensor, center: bool, eps: float = EPS) -> tuple[Tensor, Tensor, Tensor]:
    """mean, rstd, and the magnitudes that meet in x - mean: all float64, from x [M, K] in any dtype."""
    x = x.double()
    mean = x.mean(1, keepdim=True) if center else x.new_zeros(x.shape[0], 1)
    rstd = ((x - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    return mean, rstd, x.abs() + x.abs().mean(1, keepdim=True) * center


def gradients64(dn: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None, center: bool) -> list[Tensor]:
    """Of x (with what came beside the norm), weight and bias, by autograd."""
    leaves = [t.double().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    norm64(*leaves, center).backward(dn.double())
    dx, dweight, dbias = (leaf.grad for leaf in leaves)
    return [dx if residual is None else dx + residual.double(), dweight, dbias]


def gradient_magnitudes(dn: Tensor, x: Tensor, weight: Tensor, center: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What meets in each element of the gradients of x, weight and bias."""
    mean, rstd, size = statistics64(x, center)
    unit, dn = size * rstd, dn.double().abs()
    dunit = dn * weight.double().abs()
    dx = (dunit + unit * (unit * dunit).mean(1, keepdim=True) + dunit.mean(1, keepdim=True) * center) * rstd
    return dx, (dn * unit).sum(0), dn.sum(0)
