"""The rotation on CUDA against the CPU's, bit for bit, over poisoned memory, and its memory."""

import pytest
import torch
from bits import assert_same
from gpu_memory import poison
from quantize_oracle import matrix

from octavo.ops import rotate

pytestmark = pytest.mark.gpu

SHAPES = [(1, 2), (5, 6), (130, 96), (0, 8), (3, 17), (9, 1024), (700, 4096), (33, 14336), (5, 8192), (3, 3 * 16384)]
SHAPES += [(2, 32768), (2, 65536)]  # in registers on some GPUs, and on none


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotate(shape, dtype):
    x = matrix(shape, torch.float32).mul(2**-6).to(dtype)
    expected, on_gpu = rotate(x), x.cuda()
    for _ in range(3):
        poison()
        assert_same(rotate(on_gpu), expected)


def test_strided_rows_and_more_dimensions():
    x = matrix((128, 48), torch.bfloat16)
    assert_same(rotate(x.cuda().t()), rotate(x.t()))
    assert_same(rotate(x.cuda().view(4, 8, 4, 48)), rotate(x.view(4, 8, 4, 48)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_in_its_block(value):
    x = torch.ones(3, 192, device="cuda")
    x[1, 70] = value
    finite = rotate(x).isfinite().view(3, 3, 64).all(-1).cpu()
    assert finite.tolist() == [[True] * 3, [True, False, True], [True] * 3]


def test_it_takes_the_memory_of_its_result():
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    rotate(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rotate(x)
    assert torch.cuda.max_memory_allocated() - before <= 2 * x.numel() + 2**20
