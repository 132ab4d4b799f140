"""INT8, the usual baseline, with a scale for each output channel of the weight and for each token of the input.

    y[T,N] = (x_q[T,K] @ w_q[N,K]^T) * s_x[T] * s_w[N]        s = amax / 127, x_q = round(x / s), ties to even

The products are summed exactly, as an integer unit does. float64 holds every integer up to 2^53.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 127


class Int8(NamedTuple):
    """A matrix [M, K] = data * scale: `data` int8 [M, K] in -127..127, `scale` float32 [M, 1]."""

    data: Tensor
    scale: Tensor


def quantize_int8(x: Tensor) -> Int8:
    """Quantize each row of x [M, K] by its amax. Rows of zeros get the scale 1."""
    x = x.float()
    amax = x.abs().amax(1, keepdim=True)
    scale = torch.where(amax > 0, amax / torch.full_like(amax, LARGEST), torch.ones_like(amax))
    return Int8((x / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale)


def int8_linear(x: Tensor, weight: Int8, bias: Tensor | None = None) -> Tensor:
    """y float32 [..., N] from x [..., K], which is quantized here, a weight [N, K] and a bias [N]."""
    x_q = quantize_int8(x.reshape(-1, x.shape[-1]))
    sums = x_q.data.double() @ weight.data.double().T  # [T,K] @ [K,N]
    y = (sums * x_q.scale.double() * weight.scale.double().T).float()
    y = y if bias is None else y + bias.float()
    return y.view(*x.shape[:-1], -1)
