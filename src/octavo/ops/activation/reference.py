"""The activations in plain PyTorch: what the kernels must equal, and what a CPU runs.

    swiglu  u = [gate, up] (halves of each row),  h = gate * sigmoid(gate) * up      Shazeer (arXiv:2002.05202)
    gelu    h = u * (1 + erf(u / sqrt(2))) / 2                                      Hendrycks and Gimpel (1606.08415)

in float32, each step rounded once, and exp(x) = 2^(x log2 e) with the power of two as the device has it (so a CPU and a
GPU may differ in an element that lies on the border of two codes; a kernel and its twin on one device do not): a GPU
has an instruction for it, and eight for an exp that is good to the last bit. Where exp(-u^2 / 2) would be subnormal,
below u = -13.2, it is zero: that instruction flushes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.ops.quantization.reference import quantize

HALF_SQRT = 2**-0.5
DENSITY = (2 * math.pi) ** -0.5  # of the normal distribution, at 0
LOG2_E = math.log2(math.e)


def activation_quantize(u: Tensor, kind: str, how: Cast) -> tuple[Tensor, Tensor]:
    """Data and scale of h [M, F] from u [M, 2F] (swiglu) or [M, F] (gelu)."""
    if kind == "swiglu":
        gate, up = u.float().chunk(2, 1)
        h = gate * _sigmoid(gate) * up
    else:
        h = _gelu(u.float())[0]
    return quantize(h, how, None, None, None)


def activation_gradient(dh: Tensor, u: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The gradient of u, and h again, both float32."""
    dh = dh.float()
    if kind == "swiglu":
        gate, up = u.float().chunk(2, 1)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((dh * up * slope, dh * silu), 1), silu * up
    h, cumulative, e = _gelu(u.float())
    return dh * (cumulative + u.float() * (e * DENSITY)), h


def _gelu(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gelu(u) = max(u, 0) - |u| erfc(|u| / sqrt(2)) / 2, the normal distribution up to u, and exp(-u^2 / 2)."""
    z = u.abs() * HALF_SQRT
    exponent = z * z * -LOG2_E
    e = torch.where(exponent < -126, 0.0, torch.exp2(exponent))
    half = 0.5 * _erfc(z, e)
    return u.clamp(min=0) - u.abs() * half, torch.where(u < 0, half, 1 - half), e


def activation_backward(
    dh: Tensor,
    u: Tensor,
    kind: str,
    how: Cast,
    column_scale: Tensor,
    row_scale: Tensor,
    h_how: Cast,
    h_scale: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data and scale of du * column_scale * row_scale, the data of h as forward made it, and du in u's dtype."""
    du, h = activation_gradient(dh, u, kind)
    data, scale = quantize(du, how, column_scale, row_scale, None)
    h_data = (h * (1 / h_scale)).to(h_how.fmt.dtype)
    return data, scale, h_data, du.to(u.dtype) if keep else u.new_empty(0)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp2(x.clamp(min=-80) * -LOG2_E))  # below, it would overflow


def _erfc(z: Tensor, e: Tensor) -> Tensor:
    """1 - erf(z) within 2e-7 for z >= 0, with e = exp(-z^2): Abramowitz and Stegun, 7.1.26.

    A library's own erf differs between a kernel and its twin.
    """
    t = 1 / (1 + 0.3275911 * z)
    series = t * 1.061405429 - 1.453152027
    series = t * series + 1.421413741
    series = t * series - 0.284496736
    return (t * series + 0.254829592) * t * e
