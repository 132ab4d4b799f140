"""`cast`, which clamps and then uses torch's conversion, against `encode`; stochastic rounding with given noise."""

import numpy as np
import pytest
import torch
from codec_oracle import ALL_BF16, FP8, all_values, log_uniform, same

from octavo.numerics.codec import cast, decode, encode, widen
from octavo.numerics.formats import FORMATS


@pytest.mark.parametrize("name", FP8)
def test_cast_equals_encode(name):
    torch.manual_seed(4)
    fmt = FORMATS[name]
    log_max, log_min = np.log2(fmt.max), np.log2(fmt.smallest_subnormal)
    x = torch.cat([ALL_BF16[ALL_BF16.isfinite()], log_uniform(1_000_000, log_min - 4, log_max + 2)])
    result = cast(x, fmt)
    assert result.dtype == fmt.dtype
    assert torch.equal(result.view(torch.uint8), encode(x, fmt).to(torch.uint8))
    assert cast(torch.tensor([torch.nan, -torch.nan]), fmt).float().isnan().all()


@pytest.mark.parametrize("name", FP8)
def test_infinity_is_cast_alike_however_it_is_rounded(name):
    """inf saturates, with noise too."""
    fmt, x = FORMATS[name], torch.tensor([torch.inf, -torch.inf])
    nearest = cast(x, fmt)
    assert same(widen(nearest), np.array([fmt.max, -fmt.max]))
    for noise in (0.0, 1 - 2.0**-24):
        assert torch.equal(cast(x, fmt, torch.full((2,), noise)).view(torch.uint8), nearest.view(torch.uint8))


# ---- stochastic rounding, given the noise (the noise itself: test_rounding.py)


@pytest.mark.parametrize("name", FP8)
def test_noise_picks_one_of_the_two_neighbours_by_its_size(name):
    torch.manual_seed(5)
    fmt = FORMATS[name]
    values = all_values(name)[: fmt.max_code + 1].astype(np.float64)
    x = log_uniform(20_000, np.log2(fmt.smallest_subnormal) - 2, np.log2(fmt.max)).double()
    noise = torch.rand(len(x))
    below = np.searchsorted(values, x.abs().numpy(), side="right") - 1
    above = np.minimum(below + 1, fmt.max_code)
    part = (x.abs().numpy() - values[below]) / np.maximum(values[above] - values[below], 1e-30)  # distance in spacings
    expected = np.where(part + noise.double().numpy() >= 1, above, below)
    codes = encode(x, fmt, noise)
    assert np.array_equal((codes & 0x7F).numpy(), expected)
    assert 0.3 < (expected == above).mean() < 0.7


@pytest.mark.parametrize("name", FP8)
def test_exact_values_never_move(name):
    fmt = FORMATS[name]
    codes = torch.arange(256)
    values = decode(codes, fmt)
    finite = values.isfinite()
    for noise in (0.0, 0.5, 1 - 2.0**-24):
        moved = encode(values[finite], fmt, torch.full((int(finite.sum()),), noise))
        assert torch.equal(moved, codes[finite])


@pytest.mark.parametrize("name", FP8)
def test_stochastic_cast_saturates_and_keeps_nan(name):
    fmt = FORMATS[name]
    x = torch.tensor([fmt.max, 1.01 * fmt.max, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, -torch.nan])
    result = widen(cast(x, fmt, torch.full((8,), 1 - 2.0**-24)))
    assert result[:6].tolist() == [fmt.max, fmt.max, fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert result[6:].isnan().all()
