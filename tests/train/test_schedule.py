import itertools
import math

import pytest

from octavo.train.config import Config
from octavo.train.schedule import learning_rate

COSINE = Config(steps=110, warmup=10, learning_rate=1.0, min_learning_rate=0.1)
WSD = Config(steps=100, warmup=10, learning_rate=1.0, min_learning_rate=0.1, schedule="wsd", decay=0.2)


@pytest.mark.parametrize("config", [COSINE, WSD])
def test_warmup_is_linear_and_learns_from_the_first_step(config):
    assert [learning_rate(step, config) for step in range(10)] == pytest.approx([n / 10 for n in range(1, 11)])


@pytest.mark.parametrize(("step", "expected"), [(10, 1.0), (60, 0.55), (110, 0.1), (10_000, 0.1)])
def test_cosine_corners(step, expected):
    assert learning_rate(step, COSINE) == pytest.approx(expected)


def test_cosine_at_a_third_falls_by_a_quarter():
    config = Config(steps=300, warmup=0, learning_rate=2.0, min_learning_rate=1.0)
    assert learning_rate(100, config) == pytest.approx(1.75)  # (1 + cos 60°) / 2 = 3/4


@pytest.mark.parametrize(("step", "expected"), [(10, 1.0), (79, 1.0), (80, 1.0), (90, 0.55), (99, 0.145), (100, 0.1)])
def test_wsd_corners(step, expected):
    assert learning_rate(step, WSD) == pytest.approx(expected)


def test_wsd_without_decay_is_constant_and_with_all_decay_falls_from_the_start():
    flat = Config(steps=50, warmup=0, schedule="wsd", decay=0.0)
    assert {learning_rate(step, flat) for step in range(50)} == {1e-3}
    ramp = Config(steps=50, warmup=0, schedule="wsd", decay=1.0, learning_rate=1.0, min_learning_rate=0.0)
    assert [learning_rate(step, ramp) for step in (0, 25, 49)] == pytest.approx([1.0, 0.5, 0.02])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_never_rises_after_warmup_nor_leaves_its_bounds(schedule):
    config = Config(steps=97, warmup=7, schedule=schedule, decay=0.33)
    rates = [learning_rate(step, config) for step in range(7, 98)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
    assert rates[0] == config.learning_rate
    assert math.isclose(rates[-1], config.min_learning_rate)


def test_no_warmup_starts_at_the_peak():
    assert learning_rate(0, Config(warmup=0)) == 1e-3


def test_negative_step():
    with pytest.raises(ValueError, match="0 or more; got -1"):
        learning_rate(-1, Config())
