"""An INT8 folder as `octavo.load` runs it: norms and MLPs fused, stacked layers as one GEMM."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metrics import distance
from operation_counts import operations
from runtime_examples import layer_by_layer, logits, make_model
from torch import Tensor, nn

import octavo
from octavo.artifact.packed.scheme import INT8
from octavo.ops import (
    activation_quantize,
    activation_quantize_scaled,
    activation_scales,
    norm_quantize_inference,
)
from octavo.packing import pack

NAMES = ("llama with biases", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("int8")
    for name in NAMES:
        make_model(name).save_pretrained(root / name)
        pack(root / name, root / f"{name} packed", scheme="int8")
    return {name: root / f"{name} packed" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_activations_are_fused_and_layers_stacked(folders: dict[str, Path], name: str) -> None:
    model = octavo.load(folders[name])
    seen = operations(lambda: logits(model))
    assert seen["octavo::norm_quantize"] == 4
    assert seen["octavo::activation_quantize"] == 2
    assert seen["octavo::quantize"] == 2  # the attention's output
    assert seen["octavo::int8_mm"] == 8
    apart = layer_by_layer(model)
    assert operations(lambda: logits(apart))["octavo::int8_mm"] == 14
    for each in (model, apart):
        each.float()  # in which a norm's output is not rounded on its way to the quantizer
    assert distance(logits(model), logits(apart)) < 2e-3


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
