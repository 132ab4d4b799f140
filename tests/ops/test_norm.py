"""The norms of a CPU against float64: torch's own norms, their gradients by autograd, and the casts of ml_dtypes.

float32 differs from float64 by a few roundings of the magnitudes that are added in an element (if x nearly equals the
mean, the difference of two large numbers is small). A code or a scale must be that of the float64 value. If so small an
error crosses a border between two codes, either is right.
"""

import pytest
import torch
from bits import bits
from fused_op_examples import CASTS, DTYPES, NEAR, SIZES, assert_nan_in_one_row
from gpus import poison
from norm_oracle import EPS, EPS32, given, gradient_magnitudes, gradients64, norm64, statistics64
from quantize_oracle import assert_rounds_to, name_of

from octavo.numerics import Cast
from octavo.ops import norm_backward, norm_quantize, norm_quantize_inference


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_forward(cast, shape, dtype, residual, bias, center):
    x, added, weight, shift = given(shape, dtype, residual, bias)
    total, q, mean, rstd = norm_quantize(x, added, weight, shift, EPS, cast, center=center)
    assert total.dtype == dtype
    assert torch.equal(bits(total), bits(x if added is None else x + added))
    n = norm64(total.double(), weight.double(), None if shift is None else shift.double(), center)
    mean64, rstd64, size = statistics64(total, center)
    magnitude = size * rstd64 * weight.double().abs() + (0 if shift is None else shift.double().abs())
    assert_rounds_to(q, n, NEAR * magnitude, cast)
    assert (mean.dtype, rstd.dtype) == (torch.float32, torch.float32)
    assert ((mean - mean64).abs() <= NEAR * size.mean(1, keepdim=True)).all()
    assert ((rstd - rstd64).abs() <= NEAR * rstd64).all()
    assert center or not mean.any()


def test_the_sum_has_the_dtype_of_x():
    x, residual = given((17, 130), torch.bfloat16).x, given((17, 130), torch.float32, residual=True).residual
    for one, other in ((x, residual), (residual, x)):
        total = norm_quantize(one, other, torch.ones(130), None, EPS, Cast(), center=False).total
        assert total.dtype == one.dtype
        assert torch.equal(bits(total), bits((one + other).to(one.dtype)))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
def test_eps_is_under_the_root(eps, center):
    x = given((17, 130), torch.float32).x * torch.logspace(-5, 2, 17).unsqueeze(1)
    rstd = norm_quantize(x, None, torch.ones(130), None, eps, Cast(), center=center).rstd
    rstd64 = statistics64(x, center, eps)[1]
    assert ((rstd - rstd64).abs() <= NEAR * rstd64).all()


@pytest.mark.parametrize("center", [False, True])
def test_eps_is_a_float32(center):
    """As in a kernel. The difference from the float64 1e-5 shows in rows as small as its root."""
    x = torch.randn(2048, 130) * torch.logspace(-8, 0, 2048).unsqueeze(1)
    assert EPS32 != EPS
    one, other = (norm_quantize(x, None, torch.ones(130), None, eps, Cast(), center=center) for eps in (EPS, EPS32))
    assert torch.equal(bits(one.rstd), bits(other.rstd))
    assert torch.equal(bits(one.output.data), bits(other.output.data))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 130)], ids=str)
def test_layer_norm_of_constant_rows_is_the_bias(shape):
    x, _, weight, bias = given(shape, torch.float32, bias=True)
    for shift in (bias, None):
        q = norm_quantize(torch.full_like(x, 3.0), None, weight, shift, EPS, Cast(), center=True).output
        value = torch.zeros(shape) if shift is None else shift.expand(shape)
        assert_rounds_to(q, value.double(), torch.zeros(shape), Cast())


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_and_no_other(value, center):
    x, _, weight, _ = given((17, 130), torch.bfloat16)
    broken = x.clone()
    broken[4, 70] = value
    q = norm_quantize(broken, None, weight, None, EPS, Cast(), center=center).output
    assert_nan_in_one_row(q, norm_quantize(x, None, weight, None, EPS, Cast(), center=center).output, 4)


# ---- backward


ON_A_GPU = [(1, 1), (3, 5), (17, 130), (129, 257), (5, 4097), (8192, 4096), (3, 32768)]


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("device", "shape"),
    [*(("cpu", shape) for shape in SIZES), *(pytest.param("cuda", shape, marks=pytest.mark.gpu) for shape in ON_A_GPU)],
    ids=str,
)
def test_backward(device, shape, dtype, residual, center):
    dn = torch.randn(shape, device=device).to(dtype)
    x, beside, weight, _ = (None if t is None else t.to(device) for t in given(shape, dtype, residual))
    _, _, mean, rstd = norm_quantize(x, None, weight, None, EPS, Cast(), center=center)
    expected = gradients64(dn, x, weight, beside, center)[: 3 if center else 2]
    magnitudes = gradient_magnitudes(dn, x, weight, center)
    for _ in range(3 if device == "cuda" else 1):
        if device == "cuda":
            poison()
        actual = norm_backward(dn, x, weight, mean, rstd, beside, center)
        assert [t.dtype for t in actual] == [dtype, weight.dtype, weight.dtype]
        assert [t.shape for t in actual] == [shape, shape[1:], (shape[1] if center else 0,)]
        for one, other, size in zip(actual, expected, magnitudes, strict=False):
            last = torch.finfo(one.dtype).eps / 2 * other.abs()
            assert ((one - other).abs() <= 2 * NEAR * size + last).all()


@pytest.mark.parametrize("residual", [False, True])
def test_without_statistics(residual):
    x, weight = torch.randn(3, 9), torch.rand(9)
    added = torch.randn(3, 9) if residual else None
    total, output = norm_quantize_inference(x, added, weight, None, EPS, Cast(), center=False)
    expected = norm_quantize(x, added, weight, None, EPS, Cast(), center=False)
    assert (total is x) == (not residual)
    assert torch.equal(total, expected.total)
    assert torch.equal(bits(output.data), bits(expected.output.data))
    assert torch.equal(output.scale, expected.output.scale)
