"""INT8: quantization by row, alone and fused, and the GEMM, against NumPy's integers; a layer as it is loaded."""

import numpy as np
import pytest
import torch
from packed_layers import packed_layer, worst_row
from torch import Tensor, nn

from octavo import ops
from octavo.numerics import ROW, Cast, QTensor
from octavo.ops.int8_gemm import int8_mm

INT8 = Cast("int8", ROW)


def integers(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The integers, int64, and the scales, float32, of the rows of x."""
    rows = x.float().numpy()
    scale = np.maximum(np.abs(rows).max(1, keepdims=True) / np.float32(127), np.float32(2.0**-126))
    return np.rint(rows * (np.float32(1) / scale)).astype(np.int64), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_integers_times_a_scale(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 4096) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    data, scale = integers(x)
    q = ops.quantize(x, INT8)
    assert q.data.dtype == torch.int8
    assert np.array_equal(q.data.numpy(), data)
    assert np.array_equal(q.scale.numpy(), scale)
    assert np.abs(data).max(1).tolist() == [127] * 7
    assert np.array_equal(q.dequantize().numpy(), data.astype(np.float32) * scale)


def test_ties_go_to_even_and_zeros_stay() -> None:
    q = ops.quantize(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0]]), INT8)
    assert q.data.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert q.scale.flatten().tolist() == [1, 2.0**-126]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gives_a_row_of_nan(bad: float) -> None:
    x, w = torch.randn(3, 64), torch.randn(5, 64)
    x[1, 7] = bad
    q = ops.quantize(x, INT8)
    assert q.scale.isnan().flatten().tolist() == [False, True, False]
    assert int8_mm(q, ops.quantize(w, INT8)).isnan().all(1).tolist() == [False, True, False]


def test_the_gemm_is_integer_arithmetic() -> None:
    x, w, b = torch.randn(10, 4096) * 3, torch.randn(48, 4096), torch.randn(48)
    (x_q, s_x), (w_q, s_w) = integers(x), integers(w)
    expected = (x_q @ w_q.T).astype(np.float32) * s_x * s_w.T  # three roundings
    y = int8_mm(ops.quantize(x, INT8), ops.quantize(w, INT8), bias=b, out_dtype=torch.float32)
    assert np.array_equal(y.numpy(), expected + b.numpy())
    residual = torch.randn(10, 48).bfloat16()
    y = int8_mm(ops.quantize(x, INT8), ops.quantize(w, INT8), residual=residual)
    assert torch.equal(y, torch.from_numpy(expected).bfloat16() + residual)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_largest_sums_are_exact(device: str) -> None:
    """127 * 127 * 131072, on a GPU twice with K split, is above 2^30, where float32 has a step of 128."""
    ones = torch.ones(2, 131_072, dtype=torch.int8, device=device) * 127
    ones[1, -1] = 126
    q = QTensor(ones, torch.ones(2, 1, device=device), INT8.fmt, ROW)
    sums = torch.tensor([[2_114_060_288, 2_114_060_161], [2_114_060_161, 2_114_060_034]])
    assert torch.equal(int8_mm(q, q, out_dtype=torch.float32).cpu(), sums.float())


# ---- norms and activations that an INT8 folder fuses with quantization


def check_fused(q: QTensor, exact: Tensor) -> None:
    expected, scale = integers(exact)
    assert np.allclose(q.scale, scale, rtol=1e-6)
    assert np.abs(q.data.numpy() - expected).max() <= 1  # of numbers on an edge
    assert (q.data.numpy() == expected).mean() > 0.99


@pytest.mark.parametrize("center", [False, True], ids=["RMS norm", "layer norm"])
def test_a_norm_is_rounded_to_integers(center: bool) -> None:
    x, weight = torch.randn(6, 64), torch.rand(64) + 0.5
    norm = nn.LayerNorm(64, eps=1e-6) if center else nn.RMSNorm(64, eps=1e-6)
    norm.weight.data.copy_(weight)
    total, q = ops.norm_quantize_inference(x, x, weight, None, 1e-6, INT8, center=center)
    assert torch.equal(total, x + x)
    check_fused(q, norm(x + x).detach())


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_an_activation_is_rounded_to_integers(kind: str) -> None:
    u = torch.randn(6, 64)
    q = ops.activation_quantize(u, kind, INT8)
    check_fused(q, nn.functional.silu(u[:, :32]) * u[:, 32:] if kind == "swiglu" else nn.functional.gelu(u))
    again = ops.activation_quantize(u, kind, INT8, ops.activation_scales(u, kind, INT8))
    assert torch.equal(again.data, q.data)


# ---- a layer


def test_the_output_of_a_layer_is_that_of_its_operands() -> None:
    layer, x = packed_layer("int8").float(), torch.randn(5, 256)
    operand = layer.operand(x)
    exact = operand.dequantize().double() @ layer.packed_weight().dequantize().double().t() + layer.bias.double()
    assert worst_row(layer(x), exact) > 120
    assert layer.weight.dtype == torch.int8


def test_a_frozen_layer_becomes_static() -> None:
    layer, x = packed_layer("int8"), torch.randn(5, 256)
    before = layer(x)
    layer.freeze_input(x.abs().max())
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert worst_row(layer(x), before.double()) > 18
