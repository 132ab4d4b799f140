"""The rotation, and the scales of the backward GEMMs, on CUDA against the CPU's, bit for bit, over poisoned memory."""

import pytest
import torch
from bits import assert_same, on_gpu
from fold_scales_oracle import folded, scales
from gpu_memory import check_bytes
from quantize_oracle import matrix

from octavo.ops import fold_scales, rotate

pytestmark = pytest.mark.gpu

SHAPES = [(1, 2), (5, 6), (130, 96), (0, 8), (3, 17), (9, 1024), (700, 4096), (33, 14336), (5, 8192), (3, 3 * 16384)]
SHAPES += [(2, 32768), (2, 65536)]  # in registers on some GPUs, and on none


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotate(shape, dtype):
    x = matrix(shape, torch.float32).mul(2**-6).to(dtype)
    check_bytes(rotate(x), rotate, x.cuda())


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


# ---- The scales of the backward GEMMs, against float64's too


SIZES = [(1, 1), (257, 5), (8192, 8193), (8193, 16), (32896, 5120), (131072, 3), (5, 20000)]


@pytest.mark.parametrize(("t", "n"), SIZES)
@pytest.mark.parametrize("with_w", [True, False])
def test_fold_scales(t, n, with_w):
    check(fold_scales, t, n, with_w)


@pytest.mark.parametrize("with_w", [True, False])
def test_compiled(with_w):
    torch._dynamo.reset()
    check(torch.compile(fold_scales, fullgraph=True), 8193, 16, with_w)


def check(fold, t, n, with_w):
    s_x, s_g, s_w = scales(t, n)
    given = (s_x, s_g, s_w) if with_w else (s_x, s_g, None)
    for expected in (fold_scales(*given), folded(*given)):
        check_bytes(expected, fold, *on_gpu(given))


@pytest.mark.parametrize("exponents", [(-126, -126), (-100, -49), (127, 127), (127, 0), (-75, -75)])
def test_powers_beyond_those_of_float32(exponents):
    s_x, s_g = (torch.full((9, 1), 2.0**e) for e in exponents)
    for s_w in (None, torch.tensor([[2.0**-126], [1.5], [2.0**127]])):
        check_bytes(fold_scales(s_x, s_g, s_w), fold_scales, *on_gpu((s_x, s_g, s_w)), repeats=1)


@pytest.mark.parametrize("row", [0, 8200])
def test_a_scale_that_is_not_finite_stays_in_its_row(row):
    s_x, s_g, _ = scales(9000, 4)
    s_g[row] = torch.nan
    dx = fold_scales(s_x.cuda(), s_g.cuda(), None).dx.cpu()
    assert dx.isnan().nonzero()[:, 0].tolist() == [row]
