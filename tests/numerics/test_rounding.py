"""Stochastic rounding's noise: known bytes, an independent implementation in plain integers, and its statistics."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from octavo.numerics.codec import decode, encode
from octavo.numerics.formats import FORMATS
from octavo.numerics.rounding import new_seed, uniform_noise

SEED = 0x0123456789ABCDEF


def lowbias32(h: int) -> int:
    """Wellons' 32-bit mix, in Python's integers."""
    h ^= h >> 16
    h = h * 0x7FEB352D % 2**32
    h ^= h >> 15
    h = h * 0x846CA68B % 2**32
    return h ^ h >> 16


def slow_noise(seed: int, index: int) -> float:
    low, high = seed % 2**32, seed // 2**32
    return (lowbias32(index ^ lowbias32(low ^ lowbias32(high))) // 256) / 2**24


def noise(n: int, seed: int) -> np.ndarray:
    return uniform_noise((n,), torch.tensor(seed)).double().numpy()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, SEED, 2**62 - 1])
def test_noise_equals_the_hash_in_plain_integers(seed):
    index = [*range(100), 65_535, 65_536, 99_999]
    actual = noise(100_000, seed)
    assert [actual[i] for i in index] == [slow_noise(seed, i) for i in index]


GOLDEN = [[24078, 16189798, 14740406, 12732512], [13469529, 12781995, 8076455, 1616510]]


def test_known_values_for_one_seed():
    """Fixed values, in units of 2^-24: if they change, old runs cannot be repeated."""
    actual = uniform_noise((2, 4), torch.tensor(SEED))
    assert actual.dtype == torch.float32
    assert (actual.double() * 2**24).long().tolist() == GOLDEN


def test_noise_depends_on_the_index_alone_not_the_shape():
    seed = torch.tensor(7)
    assert torch.equal(uniform_noise((6, 35), seed).view(-1), uniform_noise((210,), seed))
    assert torch.equal(uniform_noise((300,), seed)[:210], uniform_noise((210,), seed))
    assert uniform_noise((0, 5), seed).shape == (0, 5)


@pytest.mark.parametrize("seed", [0, 1, SEED])
def test_noise_is_uniform(seed):
    values = noise(200_000, seed)
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    low_bits = (values * 2**24).astype(np.int64) % 256  # the low bits as much as the high
    assert stats.chisquare(np.bincount(low_bits, minlength=256)).pvalue > 1e-3


@pytest.mark.parametrize("lag", [1, 2, 64, 4096])
def test_neighbouring_indices_are_uncorrelated(lag):
    values = noise(200_000, 3)
    assert stats.pearsonr(values[:-lag], values[lag:]).pvalue > 1e-3
    table = np.histogram2d(values[:-lag], values[lag:], bins=8)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (SEED, SEED + 1), (5, 5 + 2**32), (5, 5 + 2**31)])
def test_neighbouring_seeds_are_uncorrelated(one, other):
    a, b = noise(100_000, one), noise(100_000, other)
    assert stats.pearsonr(a, b).pvalue > 1e-3
    assert stats.chi2_contingency(np.histogram2d(a, b, bins=8)[0]).pvalue > 1e-3
    assert stats.pearsonr(a[1:], b[:-1]).pvalue > 1e-3  # nor is one the other, shifted


def test_seeds_follow_torch_manual_seed():
    torch.manual_seed(11)
    first, second = new_seed(torch.device("cpu")), new_seed(torch.device("cpu"))
    torch.manual_seed(11)
    assert int(new_seed(torch.device("cpu"))) == int(first) != int(second)
    assert (first.dtype, first.shape) == (torch.int64, ())


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize("x", [1.03, -0.9, 3.3e-3, 200.1, -1.1e-5])
def test_rounding_is_unbiased_and_between_neighbours(name, x):
    fmt, draws = FORMATS[name], 100_000
    value = float(torch.tensor(x).double())
    result = decode(encode(torch.full((draws,), x), fmt, uniform_noise((draws,), torch.tensor(17))), fmt).double()
    table = decode(torch.arange(256), fmt).double()
    table = table[table.isfinite()].unique()
    low, high = table[table <= value].max().item(), table[table >= value].min().item()
    assert set(result.tolist()) <= {low, high}
    p = (value - low) / (high - low)
    standard_error = (high - low) * math.sqrt(p * (1 - p) / draws)
    assert abs(result.mean().item() - value) < 4 * standard_error


def test_one_seed_gives_the_same_codes_and_another_does_not():
    torch.manual_seed(0)
    x = torch.randn(1000)
    codes = [encode(x, FORMATS["e4m3"], uniform_noise(x.shape, torch.tensor(seed))) for seed in (4, 4, 5)]
    assert torch.equal(codes[0], codes[1])
    assert (codes[0] != codes[2]).float().mean() > 0.1
