"""Scales, the rules of a history, the noise of stochastic rounding, and the Hadamard rotation."""

import math
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
import torch

from octavo.numerics import ROW, TENSOR, Cast, hadamard
from octavo.numerics.formats import FP8_FORMATS, get_format
from octavo.numerics.scaling import (
    RULES,
    SMALLEST_SCALE,
    History,
    ceil_power_of_two,
    new_seed,
    scale_exponent,
    scale_from_amax,
    scale_mantissa,
    scattered_signs,
    uniform_noise,
)
from octavo.ops import quantize

E4M3 = get_format("e4m3")
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e4m3fnuz": 240.0, "e5m2fnuz": 57344.0}


@pytest.mark.parametrize("name", sorted(FP8_FORMATS))
def test_scale_is_amax_over_max_rounded_once_or_up_to_a_power_of_two(name):
    powers = torch.exp2(torch.arange(-100.0, 100.0))
    amax = torch.cat([torch.exp2(torch.empty(10_000).uniform_(-100, 127)), MAX[name] * powers])
    expected = amax.numpy() / np.float32(MAX[name])  # float32 division, correctly rounded
    assert np.array_equal(scale_from_amax(amax, get_format(name)).numpy(), expected)
    fraction, exponent = np.frexp(expected)
    up = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
    assert np.array_equal(scale_from_amax(amax, get_format(name), power_of_two=True).numpy(), up)


def test_powers_of_two_round_up():
    powers = torch.tensor([2.0**e for e in range(-126, 127)])
    assert torch.equal(ceil_power_of_two(powers), powers)
    assert torch.equal(ceil_power_of_two(torch.nextafter(powers, torch.tensor(torch.inf))), 2 * powers)
    assert torch.equal(ceil_power_of_two(torch.nextafter(powers, torch.tensor(0.0))[1:]), powers[1:])


def test_a_scale_splits_into_mantissa_and_exponent():
    """Powers of two, their neighbours, the ends, and anything between, against math.frexp."""
    powers = torch.exp2(torch.arange(-126.0, 128.0))
    ends = torch.tensor([SMALLEST_SCALE, torch.finfo(torch.float32).max])
    below, above = (torch.nextafter(powers, torch.tensor(limit)) for limit in (0.0, torch.inf))
    scale = torch.cat([powers, above, below[1:], torch.exp2(torch.empty(5000).uniform_(-126, 128)), ends])
    m, e = scale_mantissa(scale), scale_exponent(scale)
    assert (m.dtype, e.dtype) == (torch.float32, torch.int32)
    assert (m.shape, e.shape) == (scale.shape, scale.shape)
    expected = [math.frexp(s) for s in scale.tolist()]
    assert m.tolist() == [2 * fraction for fraction, _ in expected]
    assert e.tolist() == [exponent - 1 for _, exponent in expected]
    assert (m[:254] == 1).all()
    assert ((m >= 1) & (m < 2)).all()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_all_zero_blocks_get_zero_bytes_and_the_smallest_scale(power_of_two):
    assert torch.finfo(torch.float32).tiny == SMALLEST_SCALE
    tiny = torch.tensor([0.0, 2.0**-149, 2.0**-130, 1e-38])
    assert scale_from_amax(tiny, E4M3, power_of_two=power_of_two).tolist() == [SMALLEST_SCALE] * 4
    x = torch.zeros(3, 8)
    x[1] = 5.0
    q = quantize(x, Cast(scale="pow2" if power_of_two else "fp32"))
    assert not q.data.view(torch.uint8)[[0, 2]].any()
    assert torch.equal(q.dequantize()[[0, 2]], torch.zeros(2, 8))
    assert (1 / q.scale).isfinite().all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("relative_floor", [0.0, 0.25])
def test_non_finite_amax_gives_nan_scales_and_leaves_the_others(power_of_two, relative_floor):
    amax = torch.tensor([1.0, torch.nan, torch.inf, 448.0])
    scale = scale_from_amax(amax, E4M3, power_of_two=power_of_two, relative_floor=relative_floor)
    finite = scale_from_amax(amax[[0, 3]], E4M3, power_of_two=power_of_two, relative_floor=relative_floor)
    assert scale[1:3].isnan().all()
    assert torch.equal(scale[[0, 3]], finite)


def test_relative_floor():
    amax = torch.tensor([448.0, 112.0, 111.0, 1.0, 0.0])
    assert scale_from_amax(amax, E4M3, relative_floor=0.25).tolist() == [1, 0.25, 0.25, 0.25, 0.25]
    assert scale_from_amax(amax, E4M3, relative_floor=0.3, power_of_two=True).tolist() == [1, 0.5, 0.5, 0.5, 0.5]
    assert scale_from_amax(torch.zeros(3), E4M3, relative_floor=0.25).tolist() == [SMALLEST_SCALE] * 3


def test_one_huge_outlier_swallows_what_is_two_to_the_minus_19_of_it():
    """The amax becomes 448; what becomes half the smallest subnormal, 2^-10, or less is zero: 2^-18.8 of the amax."""
    exponents = [-8, -15, -17, -18, -19, -30]
    x = torch.tensor([[2.0**20, *(2.0 ** (20 + e) for e in exponents)]])
    data = quantize(x, Cast(granularity=ROW)).data.float()[0, 1:]
    with np.errstate(under="ignore"):
        expected = np.array([448 * 2.0**e for e in exponents]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert data.tolist() == expected.tolist()
    assert (data > 0).tolist() == [True] * 4 + [False] * 2
    edge = torch.tensor([[448.0, 2.0**-10, np.nextafter(np.float32(2.0**-10), np.float32(1))]])
    assert quantize(edge, Cast()).data.float()[0, 1:].tolist() == [0.0, 2.0**-9]


# ---- delayed scaling's rules over a history, newest first


@pytest.fixture
def recent():
    return torch.rand(100) * 10


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rule": "max"}, np.max), ({"rule": "most_recent"}, lambda values: values[0]),
        *(({"rule": "ema", "beta": beta}, lambda values, beta=beta: np.average(values, weights=beta ** np.arange(100)))
          for beta in (0.0, 0.5, 0.9, 0.99)),
        *(({"rule": "percentile", "percentile": q}, partial(np.percentile, q=q)) for q in (1, 50, 99, 99.99, 100)),
    ],
)  # fmt: skip
def test_the_rules_of_a_history(recent, fields, expected):
    values = recent.double().numpy()
    assert History(**fields, margin=0.0).amax(recent, 100).item() == pytest.approx(expected(values), rel=1e-5)


def test_history_percentile_lets_a_lone_outlier_saturate(recent):
    recent[50] = 1e6
    assert History(rule="percentile", percentile=95).amax(recent, 100) < 20
    assert History(rule="max").amax(recent, 100) == 2e6


@pytest.mark.parametrize("rule", RULES)
def test_a_history_with_room_is_that_of_the_entries_that_are_there(recent, rule):
    """7 of 100 places are filled in one history, and all in another."""
    history = History(rule=rule, percentile=40)
    both = torch.stack([torch.cat([recent[:7], torch.zeros(93)]), recent])
    expected = torch.stack([history.amax(recent[:7], 7), history.amax(recent, 100)])
    torch.testing.assert_close(history.amax(both, torch.tensor([[7], [100]])), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("margin", [-1.0, 0.5, 2.0])
def test_history_margin_leaves_headroom(recent, rule, margin):
    plain, roomy = (History(rule=rule, margin=m).amax(recent, 100) for m in (0.0, margin))
    assert roomy.item() == pytest.approx(plain.item() * 2**margin, rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "mean"}, "unknown history rule 'mean': choose one of max, most_recent, ema, percentile"),
        ({"length": 0}, "at least 1, got 0 and 1"),
        ({"interval": 0}, "at least 1, got 1024 and 0"),
        ({"length": 2.5}, "integers, at least 1, got 2.5 and 1"),
        *(({"percentile": percentile}, "0 < percentile <= 100") for percentile in (0.0, 101.0)),
        *(({"beta": beta}, "0 <= beta < 1") for beta in (1.0, -0.1)),
    ],
)
def test_history_refuses(fields, message):
    with pytest.raises(ValueError, match=message.replace("<", r"\<")):
        History(**fields)


# ---- Stochastic rounding's noise, against an independent implementation in integers


SEED = 0x0123456789ABCDEF
SEEDS = [0, 1, 2, 3, 5, 17, 2**31, 2**32 - 1, 2**32, 5 + 2**31, 5 + 2**32, SEED, SEED + 1, 2**62 - 1]


def lowbias32(h):
    """Wellons' 32-bit mix, of a Python integer or of NumPy's uint64."""
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15) * 0x846CA68B % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_hash_of_its_index(seed):
    """If the numbers change, old runs cannot be repeated."""
    found = uniform_noise((2, 100_000), torch.tensor(seed))
    key = lowbias32(seed % 2**32 ^ lowbias32(seed // 2**32))
    expected = lowbias32(np.arange(200_000, dtype=np.uint64) ^ np.uint64(key)) // 256 / 2**24
    assert found.dtype == torch.float32
    assert np.array_equal(found.double().numpy(), expected.reshape(2, -1))  # of the index alone, and not of the shape


def test_seeds_follow_torch_manual_seed():
    torch.manual_seed(11)
    first, second = new_seed(torch.device("cpu")), new_seed(torch.device("cpu"))
    torch.manual_seed(11)
    assert int(new_seed(torch.device("cpu"))) == int(first) != int(second)
    assert (first.dtype, first.shape) == (torch.int64, ())


def matrix(n: int) -> np.ndarray:
    """The rotation as a matrix: the rotated rows of the identity."""
    return hadamard(torch.eye(n, dtype=torch.float64)).numpy()


@pytest.mark.parametrize(
    ("n", "size"), [*((n, n) for n in (1, 2, 4, 64, 512, 1024)), (192, 64), (96, 32), (6, 2), (12, 4), (3, 1), (17, 1)]
)
def test_a_rotation_is_block_diagonal_with_sylvesters_matrices(n, size):
    expected = scipy.linalg.block_diag(*[scipy.linalg.hadamard(size) / math.sqrt(size)] * (n // size))
    assert np.allclose(matrix(n), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_and_dtype_are_kept(dtype):
    x = torch.ones(2, 3, 8, dtype=dtype)
    y = hadamard(x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert y[0, 0, 0].item() == pytest.approx(math.sqrt(8), rel=torch.finfo(dtype).eps)
    assert not y[..., 1:].any()
    assert hadamard(x[:0]).shape == (0, 3, 8)


@pytest.mark.parametrize("n", [64, 96])
def test_the_gradient_is_the_rotation_of_the_gradient(n):
    x, dy = torch.randn(4, n, dtype=torch.float64, requires_grad=True), torch.randn(4, n, dtype=torch.float64)
    hadamard(x).backward(dy)
    assert np.allclose(x.grad.numpy(), dy.numpy() @ matrix(n), rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [64, 1024, 8192])
def test_scattered_signs_have_no_pattern(n):
    """Their largest Walsh coefficient is that of random signs, about sqrt(2 ln n); a pattern would have sqrt(n)."""
    signs = scattered_signs(n, torch.device("cpu"))
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert hadamard(signs[None]).abs().max() < 1.5 * math.sqrt(2 * math.log(n))
    assert torch.equal(scattered_signs(n // 2, torch.device("cpu")), signs[: n // 2])


def test_it_saves_the_other_rows_from_an_outlier_under_one_scale():
    """An outlier of 2^20 drives the other rows out of E4M3; spread over 4096 columns it is 2^14, and they come back.

    (With row scales, rotation does not lower the error of an FP8 format, whose precision is relative. Rotation helps
    if the range is too small.)
    """
    x = torch.randn(16, 4096)
    x[5, 7] = 2.0**20
    others = torch.arange(16) != 5

    def error(rotate: bool) -> float:
        back = quantize(hadamard(x) if rotate else x, Cast(granularity=TENSOR)).dequantize()
        back = hadamard(back) if rotate else back
        return float((back - x)[others].norm() / x[others].norm())

    assert error(rotate=False) > 0.9
    assert error(rotate=True) < 0.04
