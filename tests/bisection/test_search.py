"""The search over GEMMs and layers, with effects that are known."""

import math

import numpy as np
import pytest

from octavo.bisection import Part, Search, Trial, half_width

GEMMS = ("y", "dx", "dw")
KINDS = ("q_proj", "k_proj", "up_proj", "down_proj")
LAYERS = tuple(f"layers.{block}.{kind}" for block in range(8) for kind in KINDS)


def search(effect, noise=0.001, least=0.0):
    """A search whose gap is `effect(gemms, layers)`, +- `noise` in three seeds."""
    tried = []

    def measure(part):
        tried.append(part)
        size = effect(set(part.gemms), set(LAYERS if part.layers is None else part.layers))
        return size - noise, size, size + noise

    found = Search(measure, GEMMS, LAYERS, least).run()
    assert len(set(tried)) == len(tried), "nothing is tried twice"
    assert [trial.part for trial in found.trials] == tried
    return found


def causes(found):
    return [trial.part.layers for trial in found.groups]


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[13], LAYERS[-1]])
def test_one_gemm_of_one_layer_is_found(gemm, layer):
    found = search(lambda gemms, layers: 0.1 * (gemm in gemms and layer in layers))
    assert (found.verdict, found.gemms, causes(found)) == ("found", (gemm,), [(layer,)])
    assert len(found.trials) <= 1 + 3 + 2 * math.log2(len(LAYERS)) + 3
    whole, remedies = found.whole, found.trials[-2:]
    assert whole.mean == pytest.approx(0.1)
    assert {trial.part.gemms for trial in remedies} == {tuple(g for g in GEMMS if g != gemm), GEMMS}
    assert all(trial.mean == pytest.approx(0) for trial in remedies)


FAR = {LAYERS[2], LAYERS[29]}
DOWN = [name for name in LAYERS if name.endswith("down_proj")]
GROUPS = [LAYERS[at : at + 8] for at in range(0, 32, 8)]
# What is known -> the gap of GEMMs and layers, the GEMMs and the groups of layers that are found.
FOUND = {
    "two layers far apart, each GEMM of which has the whole effect": (
        lambda gemms, layers: 0.05 * len(FAR & layers), GEMMS, [(LAYERS[2],), (LAYERS[29],)]
    ),
    "two layers each of which has the whole effect: the second is tried among the layers that are left": (
        lambda gemms, layers: 0.1 * bool(FAR & layers), GEMMS, [(LAYERS[2],), (LAYERS[29],)]
    ),
    "two GEMMs that raise the loss together": (
        lambda gemms, layers: 0.1 * ({"dx", "dw"} <= gemms and LAYERS[5] in layers), ("dx", "dw"), [(LAYERS[5],)]
    ),
    "a kind of layer that does it together, of which no half by depth has an effect": (
        lambda gemms, layers: 0.1 * (set(DOWN) <= layers), GEMMS, [tuple(DOWN)]
    ),
    "a gap that is spread evenly ends in groups": (
        lambda gemms, layers: 0.1 * len(layers) / len(LAYERS), GEMMS, GROUPS
    ),
    "a part that diverges": (
        lambda gemms, layers: math.inf if "dw" in gemms and LAYERS[9] in layers else 0.01, ("dw",), [(LAYERS[9],)]
    ),
    "effects within the noise are not followed": (
        lambda gemms, layers: 0.02 * (LAYERS[20] in layers) + 0.0027 * ("y" in gemms), GEMMS, [(LAYERS[20],)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_cause_is_found(name):
    effect, gemms, layers = FOUND[name]
    found = search(effect)
    assert (found.verdict, found.gemms, causes(found)) == ("found", gemms, layers)
    rest = tuple(name for name in LAYERS if not any(name in group for group in layers))
    assert not rest or found.trials[-1].part == Part(GEMMS, rest)  # the remedy


@pytest.mark.parametrize(
    ("gap", "noise", "least", "verdict"),
    [(0.002, 0.01, 0, "unresolved"), (-0.1, 0.001, 0, "lower"), (0.01, 0.001, 0.02, "small")],
)
def test_no_gap_to_search_ends_the_search(gap, noise, least, verdict):
    found = search(lambda gemms, layers: gap, noise, least)
    assert (found.verdict, found.gemms, found.groups) == (verdict, (), ())
    assert [trial.part for trial in found.trials] == [Part(GEMMS)]
    assert search(lambda gemms, layers: 0.03, least=0.02).verdict == "found"


# --- Gaps and their intervals, against numbers from tables and from NumPy


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 10: 2.262}  # two-sided, 95 %, of n - 1 degrees of freedom


def trial(*gap):
    return Trial(Part(GEMMS), gap, half_width([gap]))


@pytest.mark.parametrize("count", STUDENT)
def test_the_interval_is_that_of_students_t(count):
    gaps = np.random.default_rng(count).normal(0.01, 0.002, count)
    found = trial(*gaps.tolist())
    assert found.mean == pytest.approx(gaps.mean())
    assert found.half_width == pytest.approx(STUDENT[count] * gaps.std(ddof=1) / math.sqrt(count), rel=1e-3)


def test_the_seeds_that_resolve_a_gap():
    needed = trial(0.010, -0.002, 0.012).seeds_needed  # the deviation is 1.13 times the mean
    assert needed == 8  # 2.365 * 1.13 < sqrt(8), and 2.447 * 1.13 > sqrt(7)
    assert trial(0.010, 0.011, 0.012).seeds_needed == 3
    assert trial(0.0, 0.0).seeds_needed is None
    assert trial(1.0, -0.999).seeds_needed > 1_000_000


def test_a_run_that_diverged_is_an_infinite_gap():
    gap = trial(0.1, math.inf)
    assert (gap.mean, gap.half_width, gap.resolved) == (math.inf, 0, True)
    assert trial(math.inf, math.inf).share_of(gap) == 1
    assert trial(0.1, 0.2).share_of(gap) == 0
    assert gap.to_dict() == {"mean": None, "half_width": 0.0, "resolved": True, "by_seed": [0.1, None]}
    assert trial(0.1, 0.3).share_of(trial(0.3, 0.5)) == pytest.approx(0.5)
