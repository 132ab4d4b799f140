"""The index of the largest number of a row against NumPy's; the kernel in Triton's interpreter."""

import numpy as np
import pytest
import torch
from interpreted_triton import run_kernel

from octavo.ops import index_of_largest

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = [(1, 1), (3, 7), (2, 512), (5, 16384), (2, 40000)]


def given(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Many rows have several largest numbers, some NaN, infinities of one sign alone, or zeros of both signs."""
    x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    x[-1] = -torch.inf if shape[1] > 7 else -0.0
    x[0, shape[1] // 2 :] = torch.nan if shape[0] == 5 else 0.0
    return torch.cat((x, -torch.zeros(1, shape[1], dtype=dtype), x[:1].abs().neg()))


@DTYPES
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 128256)], ids=str)
def test_the_first_of_the_largest(shape, device, dtype):
    found = index_of_largest(given(shape, dtype).to(device))
    assert found.dtype == torch.int64
    assert found.tolist() == np.argmax(given(shape, dtype).float().numpy(), 1).tolist()


@pytest.mark.triton
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_finds_it(kernels, shape, dtype):
    found = kernels.submit(run_kernel, "largest", "index_of_largest", given(shape, dtype)).result()
    assert found.tolist() == np.argmax(given(shape, dtype).float().numpy(), 1).tolist()
