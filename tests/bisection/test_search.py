"""The search over GEMMs and layers, with effects that are known."""

import math

import numpy as np
import pytest

from octavo.bisection.search import Gap, Part, Search

GEMMS = ("y", "dx", "dw")
LAYERS = [f"layers.{block}.{kind}" for block in range(8) for kind in ("q_proj", "k_proj", "up_proj", "down_proj")]


def search(effect, noise=0.001, least=0.0):
    """A search whose gap is `effect(gemms, layers)`, +- `noise` in three seeds."""
    tried = []

    def measure(part):
        tried.append(part)
        size = effect(set(part.gemms), set(LAYERS if part.layers is None else part.layers))
        return Gap((size - noise, size, size + noise))

    found = Search(measure, GEMMS, LAYERS, least).run()
    assert len(set(tried)) == len(tried), "nothing is tried twice"
    assert [trial.part for trial in found.trials] == tried
    return found


def causes(found):
    return [trial.part.layers for trial in found.layers]


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[13], LAYERS[-1]])
def test_one_gemm_of_one_layer_is_found(gemm, layer):
    found = search(lambda gemms, layers: 0.1 * (gemm in gemms and layer in layers))
    assert (found.verdict, found.gemms, causes(found)) == ("found", (gemm,), [(layer,)])
    assert len(found.trials) <= 1 + 3 + 2 * math.log2(len(LAYERS)) + 3
    whole, remedies = found.whole.gap, found.trials[-2:]
    assert whole.mean == pytest.approx(0.1)
    assert {trial.part.gemms for trial in remedies} == {tuple(g for g in GEMMS if g != gemm), GEMMS}
    assert all(trial.gap.mean == pytest.approx(0) for trial in remedies)


def test_two_layers_far_apart_are_both_found():
    bad = {LAYERS[2], LAYERS[29]}
    found = search(lambda gemms, layers: 0.05 * len(bad & layers))
    assert set(causes(found)) == {(LAYERS[2],), (LAYERS[29],)}
    assert found.gemms == GEMMS  # each GEMM alone has the whole effect


def test_two_layers_each_of_which_has_the_whole_effect_are_both_found():
    """The first half explains the gap, so that the second is tried only among the layers that are left."""
    bad = {LAYERS[2], LAYERS[29]}
    found = search(lambda gemms, layers: 0.1 * bool(bad & layers))
    assert set(causes(found)) == {(LAYERS[2],), (LAYERS[29],)}
    assert set(found.trials[-1].part.layers) == set(LAYERS) - bad
    assert found.trials[-1].gap.mean == pytest.approx(0)


def test_two_gemms_that_raise_the_loss_together_are_found():
    found = search(lambda gemms, layers: 0.1 * ({"dx", "dw"} <= gemms and LAYERS[5] in layers))
    assert (found.gemms, causes(found)) == (("dx", "dw"), [(LAYERS[5],)])


def test_a_kind_of_layer_that_must_be_whole_is_found():
    """Neither half by depth has an effect: the layers of the kind do it together."""
    kind = {name for name in LAYERS if name.endswith("down_proj")}
    found = search(lambda gemms, layers: 0.1 * (kind <= layers))
    assert causes(found) == [tuple(name for name in LAYERS if name in kind)]


def test_a_gap_that_is_spread_evenly_ends_in_groups():
    found = search(lambda gemms, layers: 0.1 * len(layers) / len(LAYERS))
    assert [len(group) for group in causes(found)] == [8, 8, 8, 8]
    assert sum(causes(found), ()) == tuple(LAYERS)


def test_a_gap_within_the_noise_ends_the_search():
    found = search(lambda gemms, layers: 0.002, noise=0.01)
    assert (found.verdict, found.gemms, found.layers) == ("unresolved", (), ())
    assert [trial.part for trial in found.trials] == [Part(GEMMS)]


def test_a_lower_loss_is_no_gap():
    found = search(lambda gemms, layers: -0.1)
    assert (found.verdict, len(found.trials)) == ("lower", 1)


def test_a_gap_that_is_too_small_is_not_searched():
    found = search(lambda gemms, layers: 0.01, least=0.02)
    assert (found.verdict, len(found.trials)) == ("small", 1)
    assert search(lambda gemms, layers: 0.03, least=0.02).verdict == "found"


def test_a_part_that_diverges_is_found():
    found = search(lambda gemms, layers: math.inf if "dw" in gemms and LAYERS[9] in layers else 0.01)
    assert (found.gemms, causes(found)) == (("dw",), [(LAYERS[9],)])


def test_effects_within_the_noise_are_not_followed():
    bad = LAYERS[20]
    found = search(lambda gemms, layers: 0.02 * (bad in layers) + 0.004 * ("y" in gemms), noise=0.0015)
    assert (found.gemms, causes(found)) == (GEMMS, [(bad,)])


# --- Gaps and their intervals, against numbers from tables and from NumPy


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
