"""The scaled GEMM against float64 on the same quantized operands, judged on the worst row."""

import numpy as np
import pytest
import torch
from gemm_examples import PAIRS, operands, wide, worst_row

from octavo.numerics import FORMATS, TENSOR, Cast, QTensor, group
from octavo.ops import Backend, quantize, scaled_mm
from octavo.ops import gemm as op


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 7), (17, 130, 33), (129, 257, 65), (33, 2050, 40)], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_results_on_the_worst_row(pair, size):
    """One size has a long reduction: sums in BF16 would miss these bounds."""
    a, b = operands(pair, *size)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)):  # of BF16 half an ulp, at most
        y = scaled_mm(a, b, out_dtype=dtype)
        assert (y.shape, y.dtype) == ((size[0], size[2]), dtype)
        assert worst_row(y, wide(a) @ wide(b).T) < bound


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_element_is_within_half_an_ulp_and_the_error_of_its_sum(pair, with_bias, dtype, bits):
    m, k, n = 17, 130, 33
    a, b = operands(pair, m, k, n)
    if dtype == torch.float16:  # stay within its range
        a = QTensor(a.data, torch.ones_like(a.scale), a.format, a.granularity)
        b = QTensor(b.data, torch.full_like(b.scale.float(), 2.0**-14).to(b.scale.dtype), b.format, b.granularity)
        if "e5m2" in a.format.name:
            a = QTensor(a.data, torch.full_like(a.scale, 2.0**-10), a.format, a.granularity)
    bias = torch.randn(n).to(dtype) if with_bias else None
    y = scaled_mm(a, b, bias=bias, out_dtype=dtype).double().numpy()
    exact = wide(a) @ wide(b).T
    total = np.abs(wide(a)) @ np.abs(wide(b)).T
    if bias is not None:
        exact, total = exact + bias.double().numpy(), total + np.abs(bias.double().numpy())
    tiny = float(FORMATS[{8: "bf16", 11: "fp16", 24: "fp32"}[bits]].smallest_normal)
    half_ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), tiny))) - bits)
    assert np.isfinite(y).all()
    # k + 3 roundings of float32: the products' sum, two scales, the bias. (At a power of two an ulp doubles: 1.01.)
    assert (np.abs(y - exact) <= 1.01 * half_ulp + (k + 3) * 2.0**-24 * total).all()


def test_bias_is_added_before_the_one_rounding():
    ones = QTensor(torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1, 1), FORMATS["e4m3"], TENSOR)
    a = QTensor(ones.data, torch.tensor([[1 + 2.0**-8]]), FORMATS["e4m3"], TENSOR)  # a tie in bf16: alone it goes to 1
    assert scaled_mm(a, ones, bias=torch.tensor([2.0**-12]), out_dtype=torch.bfloat16).item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_residual_is_added_to_what_was_rounded(dtype):
    a, b = operands("row", 33, 48, 80)
    bias, residual = torch.randn(80), torch.randn(80, 33).to(dtype).t()
    actual = scaled_mm(a, b, bias=bias, residual=residual, out_dtype=dtype)
    assert torch.equal(actual, scaled_mm(a, b, bias=bias, out_dtype=dtype) + residual)


def test_bf16_is_the_default_and_fast_accumulation_is_exact_here():
    a, b = operands("row", 17, 130, 33)
    y = scaled_mm(a, b)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, scaled_mm(a, b, fast_accumulation=True))
    assert torch.equal(y, scaled_mm(a, b, emulate=True))


def test_a_nan_scale_poisons_its_row_and_no_other():
    x, w = torch.randn(5, 32), torch.randn(3, 32)
    x[2, 7], w[1, 0] = torch.inf, torch.nan
    nan = scaled_mm(quantize(x, Cast()), quantize(w, Cast())).isnan()
    expected = torch.zeros(5, 3, dtype=torch.bool)
    expected[2], expected[:, 1] = True, True
    assert torch.equal(nan, expected)


@pytest.mark.parametrize(
    "cast", [Cast(), Cast(granularity=TENSOR), Cast(granularity=group(4))], ids=lambda c: c.granularity.name
)
@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 4), (4, 8, 0), (3, 0, 4)])
def test_empty_operands(cast, m, k, n):
    """Experts often get no tokens. An empty reduction sums to zero."""
    y = scaled_mm(quantize(torch.zeros(m, k), cast), quantize(torch.zeros(n, k), cast))
    assert torch.equal(y, torch.zeros(m, n, dtype=torch.bfloat16))


def test_a_gpu_without_the_kernel_raises_unless_emulation_is_asked_for(monkeypatch):
    monkeypatch.setattr(op, "_find_cached", lambda *_, **__: Backend("none", "this GPU is a toaster"))
    a, b = operands("group64", 3, 64, 5)
    with pytest.raises(RuntimeError, match="no FP8 GEMM here: this GPU is a toaster") as error:
        scaled_mm(a, b)
    assert "another recipe" in str(error.value)
    assert "emulate=True" in str(error.value)
    assert worst_row(scaled_mm(a, b, emulate=True, out_dtype=torch.float32), wide(a) @ wide(b).T) < 1e-6
