"""Packed layers by themselves, and the gradient of their input."""

import torch
from torch import Tensor, nn

from octavo.checkpoint.scheme import SCHEMES
from octavo.inference.packed_linear import PackedLinear
from octavo.ops import quantize

TOKENS, INPUTS, OUTPUTS = 48, 256, 384


def packed_layer(scheme: str, inputs: int = INPUTS, outputs: int = OUTPUTS, seed: int = 0) -> PackedLinear:
    """A layer whose rows, and blocks of rows, are of very different size."""
    generator = torch.Generator().manual_seed(seed)
    layer = PackedLinear(nn.Linear(inputs, outputs), SCHEMES[scheme])
    w = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-2, 1, outputs)[:, None]
    q = quantize(w, layer.scheme.weight)
    layer.weight.copy_(q.data)
    layer.weight_scale.copy_(layer.scheme.stored_scale(q))
    layer.bias.copy_(torch.randn(outputs, generator=generator))
    if layer.input_scale is not None:
        layer.input_scale.fill_(0.01)
    return layer


def gradients(layer, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The gradient of x [2, T / 2, K], and that of the dequantized weight in float64."""
    generator = torch.Generator().manual_seed(1)
    device = layer.weight.device
    x = torch.randn(2, TOKENS // 2, layer.in_features, generator=generator).to(device, dtype).requires_grad_()
    dy = (torch.randn(2, TOKENS // 2, layer.out_features, generator=generator) * 1e-6).to(device, dtype)
    layer(x).backward(dy)
    return x.grad, dy.double() @ layer.packed_weight().dequantize().double()


def worst_row(x: Tensor, expected: Tensor) -> float:
    """The SQNR in dB of the worst row."""
    error = (x.double() - expected).square().sum(-1)
    return float(10 * torch.log10(expected.square().sum(-1) / error).min())
