"""The records of single tensors against numpy float64 and ml_dtypes."""

import numpy as np
import pytest
import torch
from activation_oracle import given, gradient64, gradient_magnitude, h64, h_magnitude
from watch_examples import BY_OPERAND, binades, check, describe, matrix

from octavo.numerics import TENSOR, Cast
from octavo.observation.operand_statistics import WIDTH, clear, combine_all, sampled_rows
from octavo.observation.operands import Sampling, numbers_of_rows, observe
from octavo.ops import quantize, quantize_scaled
from octavo.ops.activation import WIDTHS
from octavo.watching.records import operand_records
from octavo.watching.storage import FULL_SHARE, UNQUANTIZED

WATCH = object()


@pytest.fixture(autouse=True)
def _sampling():
    Sampling.request(WATCH, 1000)
    yield
    Sampling.request(WATCH, 0)


def empty():
    return clear(torch.empty(1, WIDTH, dtype=torch.float64))


def record(stats):
    return operand_records(7, np.zeros(1, int), np.zeros(1, int), stats.numpy())[0]


def observed(x, cast=None):
    stats = empty()
    q = None if cast is None else quantize(x, cast)
    of_q = () if q is None else (q.data, q.scale, cast.spec)
    observe(stats, 0, "x", [x], [], *of_q)
    return record(stats)


def test_a_tensor_that_is_not_quantized():
    for x in (matrix(spread=0) * 1e-30, matrix()):  # the moments of small gradients stay
        found = observed(x)
        check(found, describe(x.numpy()))
    assert found["flags"] == UNQUANTIZED
    assert all(np.isnan(found[name]) for name in ("scale", "smallest_scale", "saturated", "flushed", "sqnr", "gap"))


@pytest.mark.parametrize(("known", "saturates"), [(0.01, True), (50.0, False)])
def test_a_scale_known_before(known, saturates):
    x, cast = matrix(), Cast(granularity=TENSOR)
    scale = torch.full((1, 1), known)
    q, amax = quantize_scaled(x, scale, cast)
    stats = empty()
    observe(stats, 0, "x", [x], [], q.data, q.scale, cast.spec, amax)
    found = record(stats)
    expected = describe(x.numpy(), cast, scale.numpy())
    check(found, {name: expected[name] for name in BY_OPERAND})
    assert (found["saturated"] > 0) == saturates
    assert found["gap"] == pytest.approx(np.log2(known * 448 / float(x.abs().max())), rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_counted_and_left_out(bad):
    x = matrix()
    x[5] = 1
    finite = x.clone()
    finite[5, 7] = 0
    x[5, 7] = bad
    found = observed(x, Cast())
    check(found, describe(finite.numpy()))
    assert found["nonfinite"] == pytest.approx(1 / 48)  # one row of 48 has the scale NaN: all of it is lost
    assert np.isfinite(found["scale"])
    assert found["sqnr"] > 20
    assert observed(x)["nonfinite"] == pytest.approx(1 / x.numel())
    found = observed(x, Cast(granularity=TENSOR))  # its only scale is NaN
    assert (found["nonfinite"], found["flushed"]) == (1, 0)
    assert all(np.isnan(found[name]) for name in ("scale", "smallest_scale", "sqnr"))


def test_a_tensor_of_zeros_and_one_of_equal_numbers_which_has_no_kurtosis():
    found = observed(torch.zeros(8, 8), Cast())
    assert (found["amax"], found["rms"], found["zero_rows"], found["flushed"], found["saturated"]) == (0, 0, 1, 0, 0)
    assert found["binades"].sum() == 0
    assert found["scale"] == np.float32(2.0**-126)
    assert np.isnan(observed(torch.full((48, 80), -0.1))["kurtosis"])


def test_samples_combine():
    a, b = matrix(seed=1, spread=12), matrix(seed=2) * 9
    both = empty()
    for x in (a, b):
        observe(both, 0, "x", [x], [])
    apart = [empty() for _ in range(2)]
    for stats, x in zip(apart, (a, b), strict=True):
        observe(stats, 0, "x", [x], [])
    whole = record(both)
    check(whole, describe(torch.cat([a, b]).numpy()))
    assert record(combine_all(torch.stack(apart, 1))).tobytes() == whole.tobytes()
    assert whole["binades"] / FULL_SHARE == pytest.approx(binades(torch.cat([a, b]).numpy()), abs=1 / FULL_SHARE)


def test_rows_are_sampled_one_out_of_each_part():
    rows = sampled_rows(8192, 64, torch.device("cpu"))
    assert (rows // 128).tolist() == list(range(64))
    assert len(set((rows % 128).tolist())) > 48  # the places within the parts differ
    assert sampled_rows(40, 64, torch.device("cpu")).tolist() == list(range(40))
    assert sampled_rows(65, 64, torch.device("cpu")).unique().numel() == 64


def test_only_the_sampled_rows_count():
    Sampling.request(WATCH, 16)
    x = matrix(96)
    index = sampled_rows(96, 16, x.device)
    expected = describe(x[index].numpy(), Cast(), quantize(x, Cast()).scale[index].numpy())
    found = observed(x, Cast())
    check(found, {name: expected[name] for name in ("rms", "flushed", "saturated", "sqnr", "kurtosis")})
    assert found["amax"] == pytest.approx(float(x.abs().max()))  # the scales know it
    assert observed(x)["amax"] == float(x[index].abs().max())


def test_nothing_is_recorded_in_other_steps():
    Sampling.request(WATCH, 0)
    stats = empty()
    observe(stats, 0, "x", [matrix()], [])
    torch.ops.octavo.observe(stats, 0, "x", [matrix()], [], None, None, "", None, None, None)
    assert torch.equal(stats, empty())


def test_rows_of_a_transposed_matrix():
    """As `Conv1D` stores its weight."""
    x = matrix()
    check(observed(x.t().contiguous().t(), Cast()), describe(x.numpy(), Cast()))


# ---- The numbers of an operand that a kernel quantizes and does not store are computed again from its source


@pytest.mark.parametrize("kind", WIDTHS)
def test_activations_and_their_gradients(kind: str) -> None:
    u, dh, _, _ = given(kind, (17, 130), torch.float32)
    activation = numbers_of_rows(kind, [u]), h64(u.double(), kind), h_magnitude(u, kind)
    gradient = numbers_of_rows(f"{kind}_gradient", [dh, u]), gradient64(dh, u, kind), gradient_magnitude(dh, u, kind)
    for found, exact, magnitude in (activation, gradient):
        assert found.dtype == torch.float32
        assert ((found - exact).abs() <= 1e-6 * magnitude + 1e-30).all()
