"""The rotation of a tensor against Sylvester's matrix in float64, and the inputs that it refuses."""

import pytest
import scipy.linalg
import torch
from quantize_oracle import matrix

from octavo.ops import rotate


def exact(x: torch.Tensor, size: int) -> torch.Tensor:
    h = torch.from_numpy(scipy.linalg.hadamard(size) / size**0.5)
    return (x.double().reshape(-1, size) @ h).view(x.shape)


@pytest.mark.parametrize(("n", "size"), [(64, 64), (96, 32), (1024, 1024), (17, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rotation_rounds_to_its_dtype_once(dtype, n, size):
    x = matrix((12, n), dtype).view(3, 4, n)
    y = rotate(x)
    assert (y.dtype, y.shape, y.is_contiguous()) == (dtype, x.shape, True)
    error = (y.double() - exact(x, size)).abs()
    sums = 1e-6 * x.double().abs().amax(-1, keepdim=True) * size**0.5  # the error of float32's sums
    assert (error <= exact(x, size).abs() * torch.finfo(dtype).eps / 2 + sums).all()


def test_it_rotates_empty_tensors_and_vectors():
    x = matrix((96, 12))
    assert rotate(x[:0]).shape == (0, 12)
    assert rotate(x[:, :0]).shape == (96, 0)
    assert rotate(x[0]).shape == (12,)
    odd = matrix((3, 5))  # no rotation
    assert rotate(odd).data_ptr() != odd.data_ptr()
    assert torch.equal(rotate(odd), odd)
