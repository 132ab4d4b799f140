"""The norms and activations that an INT8 folder fuses with quantization, against NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo.checkpoint.scheme import INT8
from octavo.ops import (
    activation_quantize,
    activation_quantize_scaled,
    activation_scales,
    norm_quantize_inference,
)


def integers(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales of the rows of a float32 matrix."""
    rows = x.numpy()
    scale = np.abs(rows).max(1, keepdims=True) / np.float32(127)
    return np.rint(rows * (np.float32(1) / scale)), scale


@pytest.mark.parametrize("center", [False, True], ids=["RMS norm", "layer norm"])
def test_a_norm_is_rounded_to_integers(center: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 64), torch.rand(64) + 0.5
    norm: Any = nn.LayerNorm(64, eps=1e-6) if center else nn.RMSNorm(64, eps=1e-6)
    norm.weight.data.copy_(weight)
    total, q = norm_quantize_inference(x, x, weight, None, 1e-6, INT8.inputs, center=center)
    assert torch.equal(total, x + x)
    expected, scale = integers(norm(x + x).detach())
    assert np.allclose(q.scale, scale, rtol=1e-6)
    assert np.abs(q.data.numpy() - expected).max() <= 1  # of numbers on an edge
    assert (q.data.numpy() == expected).mean() > 0.99


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_an_activation_is_rounded_to_integers(kind: str) -> None:
    torch.manual_seed(0)
    u = torch.randn(6, 64)
    h = nn.functional.silu(u[:, :32]) * u[:, 32:] if kind == "swiglu" else nn.functional.gelu(u)
    q = activation_quantize(u, kind, INT8.inputs)
    expected, scale = integers(h)
    assert np.allclose(q.scale, scale, rtol=1e-6)
    assert np.abs(q.data.numpy() - expected).max() <= 1
    assert (q.data.numpy() == expected).mean() > 0.99
    again = activation_quantize_scaled(u, kind, activation_scales(u, kind, INT8.inputs), INT8.inputs)
    assert torch.equal(again.data, q.data)
