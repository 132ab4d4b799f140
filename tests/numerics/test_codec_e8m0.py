"""E8M0, the format of the MX scales, against ml_dtypes and, below its range, exact arithmetic."""

from fractions import Fraction

import numpy as np
import torch
from codec_oracle import ALL_BF16, ML_DTYPES, code_of

from octavo.numerics.codec import encode
from octavo.numerics.formats import FORMATS

E8M0 = FORMATS["e8m0"]


def test_every_bf16_input_encodes_as_in_ml_dtypes():
    """From 2^-126 up; below, ml_dtypes rounds subnormal float32 inputs in its own way: see the next test.

    1.5 * 2^e goes up, there as here. Only what rounds beyond 2^127, NaN there, saturates here.
    """
    x = ALL_BF16[(ALL_BF16 >= 2.0**-126) & ALL_BF16.isfinite()]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = torch.from_numpy(x.numpy().astype(ML_DTYPES["e8m0"]).view(np.uint8).astype(np.int64))
    fits, codes = expected != 0xFF, encode(x, E8M0)
    assert len(x) == 254 << 7
    assert torch.equal(codes[fits], expected[fits])
    tie = torch.frexp(x).mantissa == 0.75
    assert (fits & tie).sum() == 253
    assert torch.equal(x[~fits], ALL_BF16[(ALL_BF16 >= 1.5 * 2.0**127) & ALL_BF16.isfinite()])
    assert (codes[~fits] == 0xFE).all()


def test_what_is_no_positive_number_is_nan():
    nothing = ALL_BF16[~((ALL_BF16 > 0) & ALL_BF16.isfinite())]
    assert len(nothing) > 32_768
    assert (encode(nothing, E8M0) == 0xFF).all()


def test_subnormal_float32_inputs_round_to_the_nearest_power_of_two():
    subnormal = ALL_BF16[(ALL_BF16 > 0) & (ALL_BF16 < 2.0**-126)]
    assert len(subnormal) == 127
    # Codes 0 and 1 are 2^-127 and 2^-126: the middle, 1.5 * 2^-127, is a tie and goes up.
    expected = [int(Fraction(v) >= Fraction(3, 2) / 2**127) for v in subnormal.double().tolist()]
    assert set(expected) == {0, 1}
    assert encode(subnormal, E8M0).tolist() == expected


def test_ties_go_up_and_their_neighbours_to_the_nearest():
    ties = np.array([1.5 * 2.0 ** (c - 127) for c in range(254)])
    assert code_of(ties.tolist(), "e8m0") == list(range(1, 255))
    assert code_of(np.nextafter(ties, 0).tolist(), "e8m0") == list(range(254))
    assert code_of(np.nextafter(ties, np.inf).tolist(), "e8m0") == list(range(1, 255))


def test_ends():
    assert code_of([0.0, -0.0, -1.0, np.nan, np.inf, -np.inf], "e8m0") == [0xFF] * 6
    assert code_of([2.0**-140, 2.0**-1000, 2.0**127, 2.0**128, 1e300], "e8m0") == [0, 0, 0xFE, 0xFE, 0xFE]
