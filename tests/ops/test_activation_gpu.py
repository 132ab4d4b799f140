"""The activations' kernels against their reference on one GPU: every bit of data, scales and gradient."""

import pytest
import torch
from activation_oracle import KINDS, given, on_the_border
from bits import assert_same, assert_same_numbers, on_gpu
from gpu_memory import check_bytes, poison
from torch import Tensor

from octavo.numerics import Cast
from octavo.ops import activation_quantize_scaled, activation_scales
from octavo.ops.activation import (
    activation_backward_reference,
    activation_gradient,
    activation_quantize_reference,
    activation_quantize_scaled_reference,
)

pytestmark = pytest.mark.gpu

REPEATS, MANY = 3, 20
LARGE = (2048, 14336)
SIZES = [(1, 1), (3, 5), (17, 130), (129, 257), (5, 4097), (3, 16384), (3, 20000), (2, 32768), (0, 7)]
CASES = [(torch.bfloat16, Cast(), True), (torch.float32, Cast("e5m2", scale="pow2"), False)]


def forward_kernel(u: Tensor, kind: str, cast: Cast) -> tuple[Tensor, ...]:
    return torch.ops.octavo.activation_quantize(u, kind, cast.spec)


def backward_kernel(
    u: Tensor, dh: Tensor, column_scale: Tensor, row_scale: Tensor, kind: str, cast: Cast, h_scale: Tensor, biased: bool
) -> tuple[Tensor, ...]:
    return torch.ops.octavo.activation_backward(
        dh, u, kind, cast.spec, column_scale, row_scale, cast.spec, h_scale, biased, None
    )


def backward_reference(
    u: Tensor, dh: Tensor, column_scale: Tensor, row_scale: Tensor, kind: str, cast: Cast, h_scale: Tensor
) -> tuple[Tensor, ...]:
    """Data and scale of the gradient, and data of h."""
    return activation_backward_reference(dh, u, kind, cast, column_scale, row_scale, cast, h_scale, False)[:3]


def sums(u: Tensor, dh: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The sums of the columns of the gradient and of its magnitudes, added in float64."""
    du = activation_gradient(dh, u, kind)[0].double()
    return du.sum(0), du.abs().sum(0)


def check_dbias(dbias: Tensor, total: Tensor, magnitude: Tensor) -> None:
    assert (dbias.dtype, dbias.device.type) == (torch.float32, "cuda")
    torch.testing.assert_close(dbias.double() / magnitude, total / magnitude, rtol=0, atol=1e-6, equal_nan=True)


def check_forward(u: Tensor, kind: str, cast: Cast, repeats: int) -> None:
    """Data and scale, the scale alone, and the data by twice the scale."""
    expected = activation_quantize_reference(u, kind, cast)
    larger = activation_quantize_scaled_reference(u, kind, 2 * expected[1], cast)
    check_bytes(expected, forward_kernel, u, kind, cast, repeats=repeats)
    check_bytes(expected[1], activation_scales, u, kind, cast, repeats=repeats)
    scale = 2 * expected[1]
    check_bytes((larger, scale), activation_quantize_scaled, u, kind, scale, cast, repeats=repeats)


def check_backward(values: tuple[Tensor, ...], kind: str, cast: Cast, biased: bool, repeats: int) -> None:
    """Data and scale of the gradient, data of h (equal to forward's), and the sum of the gradient's rows."""
    h_data, h_scale = activation_quantize_reference(values[0], kind, cast)
    expected = backward_reference(*values, kind, cast, h_scale)
    assert_same(expected[2], h_data)
    first: list[Tensor] = []
    for _ in range(repeats):
        poison()
        *actual, dbias = backward_kernel(*values, kind, cast, h_scale, biased)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
        first.append(dbias)
        assert_same(dbias, first[0])
    if biased:
        check_dbias(first[0], *sums(*values[:2], kind))
    else:
        assert first[0].shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "cast", "biased"), CASES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_forward_and_backward(shape, dtype, cast, biased, kind):
    values = on_gpu(given(kind, shape, dtype))
    check_forward(values[0], kind, cast, REPEATS)
    check_backward(values, kind, cast, biased, REPEATS)


def large(kind: str) -> tuple[Tensor, ...]:
    """u, dh, column_scale and row_scale in BF16 and float32; gates up to some hundred."""
    m, f = LARGE
    sizes = torch.exp2(torch.randint(-6, 7, (m, 1), device="cuda"))
    u = (torch.randn(m, f * KINDS[kind], device="cuda") * sizes).bfloat16()
    dh = (torch.randn(m, f, device="cuda") / sizes).bfloat16()
    return u, dh, torch.rand(1, u.shape[1], device="cuda") + 0.01, 1 + torch.rand(m, 1, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_large_ones_again_and_again(kind):
    values = large(kind)
    check_forward(values[0], kind, Cast(), MANY)
    check_backward(values, kind, Cast(), True, MANY)


@pytest.mark.parametrize("kind", KINDS)
def test_the_border_of_two_codes(kind):
    """Rounding in another order than the reference would give another code here."""
    u = on_the_border(kind).cuda()
    m, f = u.shape[0], u.shape[1] // KINDS[kind]
    check_forward(u, kind, Cast(), 1)
    ones = torch.ones(m, f, device="cuda"), torch.ones(1, u.shape[1], device="cuda"), torch.ones(m, 1, device="cuda")
    check_backward((u, *ones), kind, Cast(), True, 1)


def constant_rows(values: list[float], kind: str) -> tuple[Tensor, ...]:
    """u (or its gate) with a row of 130 for each of `values`, dh, and factors of one, which keep small numbers."""
    column = torch.tensor(values, device="cuda").unsqueeze(1)
    u, dh = column.expand(-1, 130), 1 + torch.rand(len(values), 130, device="cuda")
    if kind != "gelu":
        u = torch.cat((u, torch.randn_like(dh)) if kind == "swiglu" else (torch.randn_like(dh), u), 1)
    return u.contiguous(), dh, torch.ones(1, u.shape[1], device="cuda"), torch.ones_like(column)


FAR = [200.0, -200.0, 79.9, -79.9, 80.1, -80.1, 88.8, -88.8, 104.0, 1e30, -1e30, 0.0, -0.0]
# exp(-u^2 / 2) is a subnormal float32 below -13.2, and zero below -14.4. Triton links libdevice so that it may flush
# subnormals, torch does not. Kernel and reference both return zero.
OF_GELU = [-13.0, -13.1, -13.2, -13.3, -13.5, -14.0, -14.3, -14.5]


@pytest.mark.parametrize("kind", KINDS)
def test_values_far_from_zero(kind):
    values = constant_rows(FAR + OF_GELU * (kind == "gelu"), kind)
    check_forward(values[0], kind, Cast(), 1)
    check_backward(values, kind, Cast(), True, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_formats_without_kernels_run_the_reference(kind):
    values = on_gpu(given(kind, (17, 130), torch.bfloat16))
    check_forward(values[0], kind, Cast("e4m3fnuz"), 1)
    check_backward(values, kind, Cast("e5m2fnuz"), True, 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kind", "half"), [("gelu", 0), ("swiglu", 0), ("swiglu", 1), ("geglu", 0), ("geglu", 1)])
@pytest.mark.parametrize("f", [130, 20000])
def test_a_row_that_is_not_finite(f, kind, half, value):
    """In the last column, which is in the second block of a long row."""
    u, dh, column_scale, row_scale = on_gpu(given(kind, (9, f), torch.bfloat16))
    u = u.clone()
    u[4, half * f + f - 1] = value
    broken = torch.arange(9, device="cuda") == 4
    data, h_scale = forward_kernel(u, kind, Cast())
    assert torch.equal(h_scale.isnan().flatten(), broken)
    for one, other in zip((data, h_scale), activation_quantize_reference(u, kind, Cast()), strict=True):
        assert_same_numbers(one, other)
    values = u, dh, column_scale, row_scale, kind, Cast(), h_scale
    *actual, dbias = backward_kernel(*values, True)
    assert torch.equal(actual[1].isnan().flatten(), broken)
    for one, other in zip(actual, backward_reference(*values), strict=True):
        assert_same_numbers(one, other)
    check_dbias(dbias, *sums(u, dh, kind))
