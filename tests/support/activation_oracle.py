"""Inputs of activations, torch's own activations and gradients in float64, and the magnitudes that meet in a result."""

from functools import cache

import torch
import torch.nn.functional as F
from fused_op_examples import NEAR
from quantize_oracle import matrix
from torch import Tensor

from octavo.ops.activation import WIDTHS

EITHER_ZERO = 1e-280  # a product of zero and gelu(gate) has no certain sign where float32 rounds gelu(gate) to zero
UNDERFLOW = 2e-35  # the error of the reference's sigmoid where the true one is smaller


@cache
def given(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, dh, and column_scale and mantissa_of for h of this shape. Cached: no test writes into them."""
    m, f = shape
    u = matrix((m, f * WIDTHS[kind]), dtype)
    dh = (torch.randn(m, f) * torch.exp2(torch.randint(-20, 5, (m, 1)))).to(dtype)
    return u, dh, torch.rand(1, u.shape[1]) + 0.01, (1 + torch.rand(m, 1)) * torch.exp2(torch.randint(-9, 9, (m, 1)))


# Gates beyond which exp2 exceeds float32 or is subnormal: below -13.2, exp(-u^2 / 2) is, and below -14.4 it is zero.
FAR = [200.0, -200.0, 79.9, -79.9, 80.1, -80.1, 88.8, -88.8, 104.0, 1e30, -1e30, 0.0, -0.0]
FAR += [-13.0, -13.1, -13.2, -13.3, -13.5, -14.0, -14.3, -14.5]


def h64(u: Tensor, kind: str) -> Tensor:
    """h of u [..., F], or [..., 2 F], by torch."""
    if kind == "gelu":
        return F.gelu(u)
    if kind == "geglu":
        up, gate = u.chunk(2, -1)
        return up * F.gelu(gate)
    gate, up = u.chunk(2, -1)
    return F.silu(gate) * up


def gradient64(dh: Tensor, u: Tensor, kind: str) -> Tensor:
    u = u.double().requires_grad_()
    h64(u, kind).backward(dh.double())
    return u.grad


def h_magnitude(u: Tensor, kind: str) -> Tensor:
    """What meets in h, in units of NEAR."""
    u = u.double()
    if kind == "gelu":
        return u.abs()
    if kind == "geglu":
        up, gate = u.chunk(2, 1)
        return (up * gate).abs() + EITHER_ZERO
    gate, up = u.chunk(2, 1)
    return h64(u, kind).abs() * exponent_magnitude(gate) + (gate * up).abs() * (UNDERFLOW / NEAR)


def exponent_magnitude(gate: Tensor) -> Tensor:
    """What meets in sigmoid(gate) over itself: the exponent gate log2(e) of two is rounded to float32."""
    return 1 + gate.abs() * (2**-24 / NEAR)


def gradient_magnitude(dh: Tensor, u: Tensor, kind: str) -> Tensor:
    """What meets in the gradient of u."""
    dh, u = dh.double().abs(), u.double()
    if kind == "gelu":
        return dh
    if kind == "geglu":
        up, gate = u.abs().chunk(2, 1)
        return torch.cat((dh * gate, dh * up), 1) + EITHER_ZERO
    gate, up = u.chunk(2, 1)
    sigmoid = gate.sigmoid() * exponent_magnitude(gate) + UNDERFLOW / NEAR
    return torch.cat((dh * up.abs() * sigmoid * (1 + gate.abs()), dh * gate.abs() * sigmoid), 1)


def on_the_border(kind: str) -> Tensor:
    """u of 4096 rows of two: the first h is 17/448 of the second, midway between two codes of E4M3, 16 and 18."""
    first = torch.rand(4096, WIDTHS[kind]) * 5 + 0.5
    largest = h64(first.double(), kind).float() * 448 / 17
    if kind == "gelu":
        return torch.cat((first, largest), 1)  # beyond 6, gelu(u) is u
    if kind == "geglu":
        up, gate = first.chunk(2, 1)
        return torch.cat((up, largest / 128, gate, torch.full_like(gate, 128.0)), 1)
    gate, up = first.chunk(2, 1)
    return torch.cat((gate, torch.full_like(gate, 128.0), up, largest / 128), 1)
