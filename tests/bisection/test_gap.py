"""Gaps and their intervals, against numbers from tables and from NumPy."""

import math

import numpy as np
import pytest

from octavo.bisection.gap import Gap

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 10: 2.262}  # two-sided, 95 %, of n - 1 degrees of freedom


@pytest.mark.parametrize("count", STUDENT)
def test_the_interval_is_that_of_students_t(count):
    gaps = np.random.default_rng(count).normal(0.01, 0.002, count)
    gap = Gap(tuple(gaps.tolist()))
    assert gap.mean == pytest.approx(gaps.mean())
    assert gap.half_width == pytest.approx(STUDENT[count] * gaps.std(ddof=1) / math.sqrt(count), rel=1e-3)


def test_a_gap_is_resolved_if_its_interval_excludes_zero():
    assert Gap((0.010, 0.011, 0.012)).resolved
    assert Gap((-0.010, -0.011, -0.012)).resolved
    assert not Gap((0.010, -0.002, 0.012)).resolved
    assert not Gap((0.0, 0.0)).resolved


def test_the_seeds_that_resolve_a_gap():
    gap = Gap((0.010, -0.002, 0.012))  # the deviation is 1.13 times the mean
    needed = gap.seeds_needed
    assert needed == 8  # 2.365 * 1.13 < sqrt(8), and 2.447 * 1.13 > sqrt(7)
    assert Gap((0.010, 0.011, 0.012)).seeds_needed == 3
    assert Gap((0.0, 0.0)).seeds_needed is None
    assert Gap((1.0, -0.999)).seeds_needed > 1_000_000


def test_a_run_that_diverged_is_an_infinite_gap():
    gap = Gap((0.1, math.inf))
    assert (gap.mean, gap.half_width, gap.resolved) == (math.inf, 0, True)
    assert Gap((math.inf, math.inf)).share_of(gap) == 1
    assert Gap((0.1, 0.2)).share_of(gap) == 0
    assert gap.to_dict() == {"mean": None, "half_width": 0.0, "resolved": True, "by_seed": [0.1, None]}
    assert Gap((0.1, 0.3)).share_of(Gap((0.3, 0.5))) == pytest.approx(0.5)
