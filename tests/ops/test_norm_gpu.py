"""The norms of a GPU against those of a CPU, and their gradients against autograd in float64.

Kernel and reference add in different orders only in float64, whose sums then differ by 1e-15 of themselves. Rounded to
float32 they are equal, but for one row in some hundred million. None of the rows here is one.
"""

import pytest
import torch
from bits import assert_same, bits, on_gpu
from fused_op_examples import NEAR
from gpu_memory import poison
from norm_oracle import EPS, given, gradient_magnitudes, gradients64

from octavo.numerics import Cast, QTensor
from octavo.ops import norm_backward, norm_quantize

pytestmark = pytest.mark.gpu

LARGE, LONG = (8192, 4096), (3, 32768)  # the second is what one program holds
SIZES = [(1, 1), (3, 5), (17, 130), (129, 257), (5, 4097)]
CASES = [(torch.bfloat16, Cast()), (torch.float32, Cast("e5m2", scale="pow2"))]


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
    _, _, mean, rstd = norm_quantize(x, None, weight, None, EPS, Cast(), center=center)
    expected = gradients64(dn, x, weight, beside, center)[: 3 if center else 2]
    dtypes = dtype, weight.dtype, weight.dtype
    bounds = [
        2 * NEAR * size + torch.finfo(rounded).eps / 2 * exact.abs()
        for size, exact, rounded in zip(gradient_magnitudes(dn, x, weight, center), expected, dtypes, strict=False)
    ]
    for _ in range(3):
        poison()
        actual = norm_backward(dn, x, weight, mean, rstd, beside, center=center)
        assert tuple(t.dtype for t in actual) == dtypes
        assert [t.shape for t in actual] == [shape, shape[1:], (shape[1] if center else 0,)]
        for one, other, bound in zip(actual if center else actual[:2], expected, bounds, strict=False):
            assert ((one - other).abs() <= bound).all()
