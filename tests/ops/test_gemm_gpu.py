"""Hopper's scaled GEMMs against float64 on the same quantized operands, judged on the worst row.

The bound on the error of a row, in the norm of the row:

    u |y| + s |r|        r[m,n]^2 = sum over k of (a[m,k] b[n,k])^2

u is the unit roundoff of the GEMM's result: 2^-8 for BF16, 2^-24 for float32. Adding a bias rounds once more. r is the
size of a sum of independent terms, and s the part of it that the tensor core may lose. Its partial sums keep about 14
bits and are truncated, so that one instruction (32 terms) loses at most 2^-13 of the sum (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2):

    promoted every 128 terms    4 instructions on a sum of size sqrt(128 / K) |r|, and K / 128 of these losses, which
                                add up like sqrt(K / 128): s = 4 * 2^-13, four times that for the products' alignment
    fast                        one accumulator for all K / 32 instructions, its loss always toward zero: 2^-13 each
"""

import math

import numpy as np
import pytest
import torch
from gemm_examples import ROUNDOFF, errors_and_bounds, on_gpu, operands, row_norm, wide
from gpu_memory import poison
from hopper import ONLY_HOPPER

from octavo.numerics import QTensor
from octavo.ops import find_backend, scaled_mm

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

NATIVE = ["tensor", "tensor-e5m2", "row", "row-gradient", "row-e5m2", "strip-square", "strip-strip", "square-strip"]
MISSING = {
    "group96": "PyTorch has no GEMM with group:96 x group:96 scales in float32 on Hopper",
    "mixed": "PyTorch has no GEMM with group:7 x tensor scales in float32 on Hopper",
}
SIZES = [(1, 16, 16), (16, 16, 16), (33, 48, 80), (257, 515, 129), (1024, 4096, 512)]  # m, k, n


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pair", NATIVE)
def test_worst_row(pair, size, dtype, with_bias, fast):
    m, k, n = size
    a, b = operands(pair, m, k, n)
    bias = torch.randn(n).to(dtype) if with_bias else None
    gpu_a, gpu_b, gpu_bias = on_gpu(a), on_gpu(b), None if bias is None else bias.cuda()
    e8m0 = a.scale.dtype == torch.float8_e8m0fnu, b.scale.dtype == torch.float8_e8m0fnu
    backend = find_backend(gpu_a.data.device, a.granularity, b.granularity, (a.format.name, b.format.name), e8m0=e8m0)
    assert backend.name == "cublaslt"
    poison()
    y = scaled_mm(gpu_a, gpu_b, bias=gpu_bias, out_dtype=dtype, fast_accumulation=fast)
    assert (y.shape, y.dtype, y.device.type, y.is_contiguous()) == ((m, n), dtype, "cuda", True)
    error, bound = errors_and_bounds(y, a, b, bias, fast)
    worst = int(np.argmax(error / np.maximum(bound, 1e-300)))
    assert (error <= bound).all(), f"row {worst}: {error[worst]:.3g} is more than {bound[worst]:.3g}"
    for _ in range(2):
        poison()
        assert torch.equal(scaled_mm(gpu_a, gpu_b, bias=gpu_bias, out_dtype=dtype, fast_accumulation=fast), y)


@pytest.mark.parametrize("pair", NATIVE)
def test_each_column_too_and_a_wrong_scale_is_seen(pair):
    """Rows of b differ in size by 2^8, so the norm of a row of y could hide an error in a small column."""
    a, b = operands(pair, 257, 515, 129)
    poison()
    error, bound = errors_and_bounds(scaled_mm(on_gpu(a), on_gpu(b)).t(), b, a, None, False)
    assert (error <= bound).all()
    scale = b.scale.clone()
    scale[0] *= 1 + 1 / 16
    y = scaled_mm(on_gpu(a), on_gpu(QTensor(b.data, scale, b.format, b.granularity)))
    error, bound = errors_and_bounds(y.t(), b, a, None, False)
    assert error[0] > 4 * bound[0]


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 32), (32, 64, 0), (32, 0, 32)])
@pytest.mark.parametrize("pair", ["tensor", "row", "strip-square", "strip-strip"])
def test_empty_operands(pair, m, k, n):
    """Experts often get no tokens. An empty reduction sums to zero."""
    a, b = operands(pair, m, k, n)
    poison()
    assert torch.equal(scaled_mm(on_gpu(a), on_gpu(b)).cpu(), torch.zeros(m, n, dtype=torch.bfloat16))


@pytest.mark.parametrize("size", [(32, 64, 48), (33, 48, 80)], ids=str)
def test_transposed_views_are_taken(size):
    m, k, n = size
    a, b = operands("tensor", m, k, n)
    turned = QTensor(b.data.t().contiguous(), b.scale, b.format, b.granularity)
    poison()
    assert torch.equal(scaled_mm(on_gpu(a), on_gpu(turned).t()), scaled_mm(on_gpu(a), on_gpu(b)))


@pytest.mark.parametrize("pair", ["tensor", "row", "strip-square", "strip-strip"])
def test_what_is_not_finite_stays_so(pair):
    a, b = operands(pair, 33, 515, 80)
    scale = a.scale.clone()
    scale[-1] = torch.nan
    y = scaled_mm(on_gpu(QTensor(a.data, scale, a.format, a.granularity)), on_gpu(b)).cpu()
    assert y[-1].isnan().all()
    assert y[:-1].isfinite().all() or pair == "tensor"


# ---- what Hopper has not


@pytest.mark.parametrize("pair", MISSING)
def test_a_missing_gemm_is_named_and_emulated_when_asked_for(pair):
    for size in SIZES[:4]:
        m, k, n = size
        a, b = operands(pair, m, k, n)
        gpu_a, gpu_b, bias = on_gpu(a), on_gpu(b), torch.randn(n)
        with pytest.raises(RuntimeError) as error:
            scaled_mm(gpu_a, gpu_b)
        assert MISSING[pair] in str(error.value)
        assert "emulate=True" in str(error.value)
        poison()
        y = scaled_mm(gpu_a, gpu_b, bias=bias.cuda(), out_dtype=torch.float32, emulate=True)
        expected = scaled_mm(a, b, bias=bias, out_dtype=torch.float32)
        assert (y.device.type, y.dtype, y.is_contiguous()) == ("cuda", torch.float32, True)
        difference = row_norm((y.cpu().double() - expected.double()).numpy())
        # two float32 sums of k terms in different orders; their scales and the bias
        size_of_terms = row_norm(np.sqrt(wide(a) ** 2 @ (wide(b) ** 2).T)) + float(bias.norm())
        assert (difference <= 2.0**-23 * (math.sqrt(k) + 4) * size_of_terms).all()


def test_emulation_is_no_substitute_where_the_gemm_is_there():
    """`emulate` allows emulation. It does not choose it: the reported backend is the one that runs."""
    a, b = (on_gpu(q) for q in operands("row", 33, 4096, 80))
    assert torch.equal(scaled_mm(a, b, emulate=True), scaled_mm(a, b))
