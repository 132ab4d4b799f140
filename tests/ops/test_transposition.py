"""The byte transpose against ml_dtypes, the scales of the backward GEMMs against float64, and rotations of rows."""

from functools import partial

import numpy as np
import pytest
import scipy.linalg
import torch
from codec_oracle import FP8, ML_DTYPES, same
from fold_scales_oracle import folded, folded_by_group, scales
from grouped_examples import offsets_of
from interpreted_triton import run_kernel
from quantize_oracle import matrix

from octavo.numerics import FORMATS
from octavo.ops import fold_scales, rotate, transpose

KINDS = {FORMATS[name].dtype: ML_DTYPES[name] for name in FP8}


def random_bytes(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(256, shape, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (8, 1), (3, 5), (17, 130), (129, 257), (0, 7), (7, 0)], ids=str)
def test_bytes_are_transposed_as_they_are(dtype, shape):
    data = random_bytes(shape, dtype)
    result = transpose(data)
    assert (result.dtype, result.is_contiguous()) == (dtype, True)
    assert np.array_equal(result.view(torch.uint8).numpy(), data.view(torch.uint8).numpy().T)
    result.view(torch.uint8).fill_(7)
    assert torch.equal(data.view(torch.uint8), random_bytes(shape, dtype).view(torch.uint8))  # memory of its own


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_shift_divides_each_row_by_a_power_of_two_and_rounds_once(dtype):
    """Every byte under every shift, against exact float64 arithmetic and one cast by ml_dtypes.

    NaN and the infinities of E5M2 stay what they are: their bytes never become those of a number.
    """
    shifts = torch.tensor([0, 1, 2, 3, 4, 7, 10, 17, 18, 31, 32, 40, 126, 127, 200, 2**31 - 1], dtype=torch.int32)
    data = torch.arange(256, dtype=torch.uint8).repeat(len(shifts), 1).view(dtype)
    with np.errstate(invalid="ignore", under="ignore"):
        wide = data.view(torch.uint8).numpy().view(KINDS[dtype]).astype(np.float64)
        expected = np.ldexp(wide, -np.minimum(shifts.numpy(), 500)[:, None]).astype(KINDS[dtype])
        assert same(transpose(data, shifts).t().float(), expected)


# ---- The scales of the backward GEMMs


@pytest.mark.parametrize(("t", "n", "spread"), [(1, 1, 3), (257, 5, 20), (300, 96, 60)])
@pytest.mark.parametrize("with_w", [True, False])
def test_they_are_rounded_once(t, n, spread, with_w):
    s_x, s_g, s_w = scales(t, n, spread)
    given = s_x, s_g, s_w if with_w else None
    for actual, expected in zip(fold_scales(*given), folded(*given), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


SIZES = [[5, 0, 300, 1], [0, 0], [40]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_group_has_a_largest_of_its_own(sizes):
    s_x, s_g, s_w = grouped_scales(sizes)
    found = fold_scales(s_x, s_g, s_w, offsets_of(sizes))
    for actual, expected in zip(found, folded_by_group(s_x, s_g, s_w, sizes), strict=True):
        assert torch.equal(actual, expected)


def grouped_scales(sizes: list[int], n: int = 7) -> tuple[torch.Tensor, ...]:
    s_x, s_g, s_w = scales(sum(sizes), n * len(sizes))
    return s_x, s_g, s_w.view(len(sizes), n, 1)


@pytest.mark.triton
@pytest.mark.parametrize("sizes", SIZES[:1] + SIZES[2:], ids=str)
def test_the_kernel_folds_the_scales_of_groups(kernels, sizes):
    *given, s_w = grouped_scales([*sizes, 1200], 1030)
    given = *given, s_w[:-1].contiguous(), offsets_of(sizes)  # the last rows are of no group
    fold = partial(kernels.submit, run_kernel, "transposition", "fold_scales")
    for actual, expected in zip(fold(*given).result(), fold_scales(*given), strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(fold(*given[:2], s_w[0], None).result()[2], fold_scales(*given[:2], s_w[0]).dw)


# ---- The rotation of a tensor against Sylvester's matrix in float64


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
