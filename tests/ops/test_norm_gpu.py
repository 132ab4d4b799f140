"""The norms' kernels against their reference on one GPU, bit for bit; their gradients against autograd in float64.

Kernel and reference add in different orders only in float64, whose sums then differ by 1e-15 of themselves. Rounded to
float32 they are equal, but for one row in some hundred million. None of the rows here is one. The operation rounds eps
to float32, so the reference gets the rounded one.
"""

from typing import Any

import numpy as np
import pytest
import torch
from bits import assert_same, assert_same_numbers, bits, on_gpu
from fused_op_examples import NEAR
from gpu_memory import check_bytes, poison
from norm_oracle import EPS, EPS32, given, gradient_magnitudes, gradients64
from torch import Tensor

from octavo.numerics import Cast, QTensor
from octavo.ops import norm_backward, norm_quantize, norm_quantize_inference
from octavo.ops.norm import norm_quantize_reference

pytestmark = pytest.mark.gpu

REPEATS, MANY = 3, 20
LARGE = (8192, 4096)
SIZES = [(1, 1), (3, 5), (17, 130), (129, 257), (5, 4097)]
LONG = (3, 32768)  # what one program holds
CASES = [(torch.bfloat16, Cast()), (torch.float32, Cast("e5m2", scale="pow2"))]


def reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, cast: Cast, center: bool
) -> tuple:
    total, *rest = norm_quantize_reference(x, residual, weight, bias, EPS32, cast, center)
    return x.new_empty(0) if total is None else total, *rest


def kernel(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, cast: Cast, center: bool) -> tuple:
    return torch.ops.octavo.norm_quantize(x, residual, weight, bias, EPS, cast.spec, center, True)


def check_forward(values: tuple[Any, ...], cast: Cast, center: bool, repeats: int) -> None:
    """Sum, data, scale, mean and rstd."""
    check_bytes(reference(*values, cast, center), kernel, *values, cast, center, repeats=repeats)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("dtype", "cast"), CASES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [*SIZES, (0, 7)], ids=str)
def test_forward(shape, dtype, cast, residual, bias, center):
    check_forward(on_gpu(given(shape, dtype, residual, bias)), cast, center, REPEATS)


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(("shape", "repeats"), [(LARGE, MANY), (LONG, REPEATS)])
def test_large_forward_again_and_again(shape, repeats, layer):
    check_forward(on_gpu(given(shape, torch.bfloat16, residual=True, bias=layer)), Cast(), layer, repeats)


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-12])
def test_eps_decides_in_rows_as_small_as_its_root(eps):
    """Kernel and reference use the same eps to the last bit of rstd: the float64 1e-5 would show."""
    x = torch.randn(2048, 130, device="cuda") * torch.logspace(-8, 0, 2048, device="cuda").unsqueeze(1)
    weight = torch.ones(130, device="cuda")
    expected = norm_quantize_reference(x, None, weight, None, float(np.float32(eps)), Cast(), False)
    actual = torch.ops.octavo.norm_quantize(x, None, weight, None, eps, Cast().spec, False, True)
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_without_statistics(residual, center):
    x, *values = on_gpu(given((17, 130), torch.bfloat16, residual, center))
    expected = norm_quantize(x, *values, EPS, Cast(), center=center)[:2]
    check_bytes(expected, norm_quantize_inference, x, *values, EPS, Cast(), center=center, repeats=1)
    assert (norm_quantize_inference(x, *values, EPS, Cast(), center=center)[0] is x) == (not residual)


@pytest.mark.parametrize("fmt", ["e4m3fnuz", "e5m2fnuz"])
def test_formats_without_kernels_run_the_reference(fmt):
    values = on_gpu(given((17, 130), torch.bfloat16, True, True))
    check_forward(values, Cast(fmt), True, 1)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite(value, center):
    x, residual, weight, bias = on_gpu(given((129, 257), torch.bfloat16, True, True))
    x = x.clone()
    x[4, 70] = value
    total, data, scale, mean, rstd = kernel(x, residual, weight, bias, Cast(), center)
    expected = reference(x, residual, weight, bias, Cast(), center)
    assert torch.equal(scale.isnan().flatten(), torch.arange(129, device="cuda") == 4)
    for one, other in zip((total, data, scale, mean, rstd), expected, strict=True):
        assert_same_numbers(one, other)


def differing(actual: QTensor, expected: QTensor) -> int:
    return int((bits(actual.data).cpu() != bits(expected.data)).sum())


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(("dtype", "cast"), CASES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [*SIZES, (2048, 2048)], ids=str)
def test_a_gpu_gives_the_bytes_of_a_cpu(shape, dtype, cast, center):
    """All but a millionth. If the order of a float64 sum changes the last bit of a mean or rstd, an element of that row
    on the border of two codes may round to the other one."""
    values = given(shape, dtype, True, True)
    actual = norm_quantize(*on_gpu(values), EPS, cast, center=center)
    expected = norm_quantize(*values, EPS, cast, center=center)
    assert torch.equal(bits(actual.total).cpu(), bits(expected.total))
    assert differing(actual.output, expected.output) <= 1e-6 * shape[0] * shape[1]
    statistics = (
        (actual.mean, expected.mean),
        (actual.rstd, expected.rstd),
        (actual.output.scale, expected.output.scale),
    )
    for one, other in statistics:
        assert ((one.cpu() - other).abs() <= 2.0**-22 * other.abs()).all()
        assert (one.cpu() != other).sum() <= 1e-3 * shape[0]


# ---- backward


def test_no_rows():
    x, weight, column = (torch.ones(shape, device="cuda") for shape in ((0, 7), (7,), (0, 1)))
    dx, dweight, dbias = norm_backward(x, x, weight, column, column, x, center=True)
    assert dx.shape == (0, 7)
    assert_same(dweight, torch.zeros_like(weight))
    assert_same(dbias, torch.zeros_like(weight))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SIZES, LARGE, LONG], ids=str)
def test_backward(shape, dtype, residual, center):
    dn = torch.randn(shape, device="cuda").to(dtype)
    x, beside, weight, _ = on_gpu(given(shape, dtype, residual))
    _, _, _, mean, rstd = reference(x, None, weight, None, Cast(), center)
    expected = gradients64(dn, x, weight, beside, center)[: 3 if center else 2]
    dtypes = dtype, weight.dtype, weight.dtype
    bounds = [
        2 * NEAR * size + torch.finfo(rounded).eps / 2 * exact.abs()
        for size, exact, rounded in zip(gradient_magnitudes(dn, x, weight, center), expected, dtypes, strict=False)
    ]
    for _ in range(REPEATS):
        poison()
        actual = norm_backward(dn, x, weight, mean, rstd, beside, center=center)
        assert tuple(t.dtype for t in actual) == dtypes
        assert [t.shape for t in actual] == [shape, shape[1:], (shape[1] if center else 0,)]
        for one, other, bound in zip(actual if center else actual[:2], expected, bounds, strict=False):
            assert ((one - other).abs() <= bound).all()
