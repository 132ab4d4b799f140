"""The activations in plain PyTorch. The kernels must equal them, and a CPU runs them.

    swiglu  u = [gate, up] (halves of each row),  h = gate * sigmoid(gate) * up      Shazeer (arXiv:2002.05202)
    geglu   u = [up, gate],  h = up * gelu(gate), in the order of diffusers          Shazeer (arXiv:2002.05202)
    gelu    h = u * (1 + erf(u / sqrt(2))) / 2                                      Hendrycks and Gimpel (1606.08415)

All steps are in float32, each rounded once. exp(x) is computed as 2^(x log2 e), with the exp2 of the device. A GPU has
one instruction for exp2; an exp that is exact to the last bit takes eight. So a CPU and a GPU may quantize an element
to neighbouring codes. A kernel and its reference on one device do not differ. The GPU's instruction flushes subnormal
results to zero, so exp(-u^2 / 2) is zero below u = -13.2.
"""

import math

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.ops.quantization.reference import quantize_reference, to_data

HALF_SQRT = 2**-0.5
DENSITY = (2 * math.pi) ** -0.5  # the density of the normal distribution at 0
LOG2_E = math.log2(math.e)


def activation_quantize_reference(u: Tensor, kind: str, cast: Cast) -> tuple[Tensor, Tensor]:
    """Data and scale of h [M, F] from u [M, 2F] (swiglu, geglu) or [M, F] (gelu)."""
    return quantize_reference(_activation(u, kind), cast, None, None, None)


def activation_scales_reference(u: Tensor, kind: str, cast: Cast) -> Tensor:
    """The scales [M, 1] of h."""
    return activation_quantize_reference(u, kind, cast)[1]


def activation_quantize_scaled_reference(u: Tensor, kind: str, scale: Tensor, cast: Cast) -> Tensor:
    """Data of h by given scales [M, 1]."""
    return to_data(_activation(u, kind) * (1 / scale), cast.fmt)


def _activation(u: Tensor, kind: str) -> Tensor:
    """h, in float32."""
    if kind == "gelu":
        return _gelu(u.float())[0]
    if kind == "geglu":
        up, gate = u.float().chunk(2, 1)
        return _gelu(gate)[0] * up
    gate, up = u.float().chunk(2, 1)
    return gate * _sigmoid(gate) * up


def activation_gradient(dh: Tensor, u: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The gradient of u, and h, both float32."""
    dh = dh.float()
    if kind == "swiglu":
        gate, up = u.float().chunk(2, 1)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((dh * up * slope, dh * silu), 1), silu * up
    if kind == "geglu":
        up, gate = u.float().chunk(2, 1)
        h, cumulative, e = _gelu(gate)
        return torch.cat((dh * h, dh * up * (cumulative + gate * (e * DENSITY))), 1), h * up
    h, cumulative, e = _gelu(u.float())
    return dh * (cumulative + u.float() * (e * DENSITY)), h


def _gelu(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gelu(u) = max(u, 0) - |u| erfc(|u| / sqrt(2)) / 2, the cumulative normal distribution at u, and exp(-u^2 / 2)."""
    z = u.abs() * HALF_SQRT
    exponent = z * z * -LOG2_E
    e = torch.where(exponent < -126, 0.0, torch.exp2(exponent))
    half = 0.5 * _erfc(z, e)
    return u.clamp(min=0) - u.abs() * half, torch.where(u < 0, half, 1 - half), e


def activation_backward_reference(
    dh: Tensor,
    u: Tensor,
    kind: str,
    cast: Cast,
    column_scale: Tensor,
    row_scale: Tensor,
    h_cast: Cast,
    h_scale: Tensor,
    biased: bool,
    group: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data and scale of du * column_scale * row_scale, the data of h as in forward, and the sum of the rows of du."""
    du, h = activation_gradient(dh, u, kind)
    column_scale = column_scale if group is None else column_scale[group]
    data, scale = quantize_reference(du, cast, column_scale, row_scale, None)
    h_data = to_data(h * (1 / h_scale), h_cast.fmt)
    return data, scale, h_data, du.sum(0) if biased else du.new_empty(0)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp2(x.clamp(min=-80) * -LOG2_E))  # a smaller x would overflow


def _erfc(z: Tensor, e: Tensor) -> Tensor:
    """1 - erf(z) within 2e-7 for z >= 0, with e = exp(-z^2): Abramowitz and Stegun, 7.1.26."""
    # The erf of a library is not used, since that of Triton and that of PyTorch differ.
    t = 1 / (1 + 0.3275911 * z)
    series = t * 1.061405429 - 1.453152027
    series = t * series + 1.421413741
    series = t * series - 0.284496736
    return (t * series + 0.254829592) * t * e
