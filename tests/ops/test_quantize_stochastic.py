"""Stochastic rounding byte for byte: the documented hash, and a walk over the format's values, in numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from quantize_oracle import KINDS, check, inverse, matrix, name_of, oracle_scale

from octavo.numerics import TENSOR, Cast, group
from octavo.ops import quantize, quantize_transposed


def noise(seed: int, n: int) -> np.ndarray:
    """The documented hash, in numpy's own 32-bit integers."""

    def mix(h: np.ndarray) -> np.ndarray:
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
        return h ^ (h >> np.uint32(16))

    low, high = np.array([seed & 0xFFFFFFFF], np.uint32), np.array([seed >> 32], np.uint32)
    return (mix(np.arange(n, dtype=np.uint32) ^ mix(low ^ mix(high))) >> np.uint32(8)).astype(np.float64) / 2**24


def round_by(v: np.ndarray, dice: np.ndarray, cast: Cast) -> np.ndarray:
    """Codes of `v`, rounded up if dice plus the distance from the lower neighbour is at least one spacing."""
    kind = KINDS[cast.format]
    codes = np.arange(128, dtype=np.uint8)
    values = codes.view(kind).astype(np.float64)
    values = values[np.isfinite(values)]
    magnitude = np.minimum(np.abs(v.astype(np.float64)), values[-1])
    low = np.searchsorted(values, magnitude, side="right") - 1
    high = np.minimum(low + 1, len(values) - 1)
    part = (magnitude - values[low]) / np.maximum(values[high] - values[low], 1e-300)
    code = np.where(part + dice >= 1, high, low)
    sign = np.signbit(v) & ((code != 0) | (not cast.format.endswith("fnuz")))
    return (code | np.where(sign, 128, 0)).astype(np.uint8)


@pytest.mark.parametrize(
    "cast", [Cast(), Cast("e5m2", group(32), "e8m0"), Cast("e4m3fnuz", TENSOR, "pow2")], ids=name_of
)
def test_stochastic_rounding_equals_numpy(cast):
    cast = replace(cast, rounding="stochastic")
    x = matrix((17, 130))
    for transposed in (False, True):
        torch.manual_seed(21)
        q = quantize_transposed(x, cast) if transposed else quantize(x, cast)
        torch.manual_seed(21)
        seed = int(torch.randint(2**62, ()))
        expected = np.ascontiguousarray(x.numpy().T) if transposed else x.numpy()
        scale = oracle_scale(expected, cast)
        dice = noise(seed, expected.size).reshape(expected.shape)
        check(q, round_by(expected * inverse(scale, cast, expected.shape), dice, cast), scale, cast)
