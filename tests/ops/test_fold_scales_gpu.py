"""The scales of the backward GEMMs on CUDA against the CPU's and float64's, bit for bit, over poisoned memory."""

import pytest
import torch
from bits import assert_same
from fold_scales_oracle import folded, scales
from gpu_memory import poison

from octavo.ops import fold_scales

pytestmark = pytest.mark.gpu

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
    for _ in range(3):
        poison()
        actual = fold(*(None if s is None else s.cuda() for s in given))
        for a, from_cpu, expected in zip(actual, fold_scales(*given), folded(*given), strict=True):
            assert_same(a, from_cpu)
            assert_same(a, expected)


@pytest.mark.parametrize("exponents", [(-126, -126), (-100, -49), (127, 127), (127, 0), (-75, -75)])
def test_powers_beyond_those_of_float32(exponents):
    s_x, s_g = (torch.full((9, 1), 2.0**e) for e in exponents)
    for s_w in (None, torch.tensor([[2.0**-126], [1.5], [2.0**127]])):
        for a, expected in zip(fold_scales(s_x.cuda(), s_g.cuda(), None if s_w is None else s_w.cuda()),
                               fold_scales(s_x, s_g, s_w), strict=True):  # fmt: skip
            assert_same(a, expected)


@pytest.mark.parametrize("row", [0, 8200])
def test_a_scale_that_is_not_finite_stays_in_its_row(row):
    s_x, s_g, _ = scales(9000, 4)
    s_g[row] = torch.nan
    dx = fold_scales(s_x.cuda(), s_g.cuda(), None).dx.cpu()
    assert dx.isnan().nonzero()[:, 0].tolist() == [row]
