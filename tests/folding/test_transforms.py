"""The steps of folding as matrices: scipy's Hadamard matrices, and diagonal ones."""

import numpy as np
import pytest
import scipy.linalg
import torch

from octavo.folding.transforms import Change, block_of, random_signs, rotated, scaled, smoothing_factors


def matrix(size: int, runs: int) -> np.ndarray:
    """What one run of `size` after the other, each in blocks of the largest power of two, is multiplied by."""
    order = size & -size
    return scipy.linalg.block_diag(*[scipy.linalg.hadamard(order) / np.sqrt(order)] * (runs * size // order))


@pytest.mark.parametrize(("size", "runs"), [(1, 3), (2, 1), (8, 1), (8, 5), (32, 2), (96, 1), (6, 4), (512, 1)])
def test_rotated_is_hadamards_matrix(size: int, runs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, runs * size, dtype=torch.float64)
    assert np.allclose(rotated(size)(x).numpy(), x.numpy() @ matrix(size, runs), rtol=0, atol=1e-13)
    signs = random_signs(size, 3)
    turned = rotated(size, signs)(x).numpy()
    expected = x.numpy() * np.tile(signs.numpy(), runs) @ matrix(size, runs)
    assert np.allclose(turned, expected, rtol=0, atol=1e-13)
    assert block_of(size) == size & -size


def test_signs_are_of_both_kinds_and_of_the_seed() -> None:
    signs = random_signs(4096, 0)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.06
    assert torch.equal(signs, random_signs(4096, 0))
    assert not torch.equal(signs, random_signs(4096, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_changes_along_both_sides(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a few rows, the last of them short."""
    monkeypatch.setattr("octavo.folding.transforms._PART", 100)
    torch.manual_seed(1)
    w, s = torch.randn(24, 32), torch.rand(32) + 0.5
    change = Change([scaled(s), rotated(32)], [rotated(8)])
    expected = matrix(8, 3).T @ (w.double().numpy() * s.double().numpy() @ matrix(32, 1))
    found = change.apply(w, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    error = np.abs(found.double().numpy() - expected) / np.abs(expected).max()
    assert error.max() < (1e-6 if dtype == torch.float32 else 2**-8)
    bias = torch.randn(24)
    assert np.allclose(change.apply(bias, torch.float32).numpy(), bias.numpy() @ matrix(8, 3), rtol=0, atol=1e-6)


def test_factors() -> None:
    """SmoothQuant's, to the nearest power of two; 1 where a channel is dead."""
    x, w = torch.tensor([100.0, 1.0, 0.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert smoothing_factors(x, w, 0.5).tolist() == [8.0, 1.0, 1.0, 1.0]  # sqrt(100) = 10
    assert smoothing_factors(x, w, 1.0).tolist() == [128.0, 1.0, 1.0, 1.0]
    assert smoothing_factors(x, w * 100, 0.0).tolist() == [2**-7, 2**-7, 1.0, 1.0]
