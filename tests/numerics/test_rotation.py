import math

import numpy as np
import pytest
import scipy.linalg
import torch

from octavo.numerics import TENSOR, Cast, hadamard
from octavo.numerics.rotation import scattered_signs
from octavo.ops import quantize


def matrix(n: int) -> np.ndarray:
    """The rotation as a matrix: the rotated rows of the identity."""
    return hadamard(torch.eye(n, dtype=torch.float64)).numpy()


@pytest.mark.parametrize("n", [1, 2, 4, 64, 512])
def test_powers_of_two_take_sylvesters_matrix(n):
    assert np.allclose(matrix(n), scipy.linalg.hadamard(n) / math.sqrt(n), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("n", "size"), [(192, 64), (96, 32), (6, 2), (12, 4)])
def test_other_even_sizes_are_block_diagonal(n, size):
    expected = scipy.linalg.block_diag(*[scipy.linalg.hadamard(size) / math.sqrt(size)] * (n // size))
    assert np.allclose(matrix(n), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [1, 3, 17, 129])
def test_odd_sizes_are_left_alone(n):
    assert np.array_equal(matrix(n), np.eye(n))


@pytest.mark.parametrize("n", [2, 96, 192, 256])
def test_orthogonal_symmetric_and_its_own_inverse(n):
    h = matrix(n)
    assert np.allclose(h @ h.T, np.eye(n), rtol=0, atol=1e-13)
    assert np.array_equal(h, h.T)
    torch.manual_seed(0)
    x = torch.randn(3, 5, n, dtype=torch.float64)
    assert torch.allclose(hadamard(hadamard(x)), x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_and_dtype_are_kept(dtype):
    x = torch.ones(2, 3, 8, dtype=dtype)
    y = hadamard(x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert y[0, 0, 0].item() == pytest.approx(math.sqrt(8), rel=torch.finfo(dtype).eps)
    assert not y[..., 1:].any()
    assert hadamard(x[:0]).shape == (0, 3, 8)


def test_a_transposed_view_is_rotated_along_its_own_last_dimension():
    torch.manual_seed(1)
    x = torch.randn(8, 12, dtype=torch.float64)
    assert np.allclose(hadamard(x.t()).numpy(), x.t().numpy() @ matrix(8), rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [64, 96])
def test_the_gradient_is_the_rotation_of_the_gradient(n):
    torch.manual_seed(3)
    x, dy = torch.randn(4, n, dtype=torch.float64, requires_grad=True), torch.randn(4, n, dtype=torch.float64)
    hadamard(x).backward(dy)
    assert np.allclose(x.grad.numpy(), dy.numpy() @ matrix(n), rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [64, 1024, 8192])
def test_scattered_signs_have_no_pattern(n):
    """Their largest Walsh coefficient is that of random signs, about sqrt(2 ln n); a pattern would have sqrt(n)."""
    signs = scattered_signs(n, torch.device("cpu"))
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert hadamard(signs[None]).abs().max() < 1.5 * math.sqrt(2 * math.log(n))
    assert torch.equal(scattered_signs(n // 2, torch.device("cpu")), signs[: n // 2])


def test_it_saves_the_other_rows_from_an_outlier_under_one_scale():
    """An outlier of 2^20 drives the other rows out of E4M3; spread over 4096 columns it is 2^14, and they come back.

    (With row scales, rotation does not lower the error of an FP8 format, whose precision is relative. Rotation helps
    if the range is too small.)
    """
    torch.manual_seed(4)
    x = torch.randn(16, 4096)
    x[5, 7] = 2.0**20
    others = torch.arange(16) != 5

    def error(rotate: bool) -> float:
        back = quantize(hadamard(x) if rotate else x, Cast(granularity=TENSOR)).dequantize()
        back = hadamard(back) if rotate else back
        return float((back - x)[others].norm() / x[others].norm())

    assert error(rotate=False) > 0.9
    assert error(rotate=True) < 0.04
