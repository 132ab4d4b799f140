"""The verdict on two groups of runs, by intervals that hold however often one looks."""

import math
import random
import statistics

import pytest
import scipy.stats

from octavo.train.run_records import RunData, decide, gaps_of, group_runs, half_width, slope_of

MARGIN = 0.0025
NOISE = 0.0005  # the standard deviation of a planted gap
DRAWS, LOOKS = 1000, 12


@pytest.mark.parametrize("gap", [0.0, 0.001, 0.003, 0.01])
def test_planted_gaps_are_judged_wrongly_in_at_most_one_case_of_twenty_by_who_looks_after_every_pair(gap):
    """Wrong is a verdict that the planted gap contradicts, at any look; and an interval without the planted gap."""
    draw = random.Random(int(gap * 1e6))
    wrong = missed = undecided = 0
    for _ in range(DRAWS):
        gaps = [draw.gauss(gap, NOISE) for _ in range(LOOKS)]
        looks = [decide(gaps[:count], MARGIN) for count in range(1, LOOKS + 1)]
        wrong += any(
            (each.verdict == "within" and gap > MARGIN)
            or (each.verdict == "worse" and each.mean - each.half_width > gap)
            or each.verdict == "better"
            for each in looks
        )
        missed += any(each.half_width is not None and abs(each.mean - gap) > each.half_width for each in looks)
        undecided += looks[-1].verdict == "undecided"
    assert wrong <= DRAWS / 20
    assert missed <= DRAWS / 20
    assert gap == 0.003 or not undecided  # 0.3 % is one deviation of a pair away from the margin


def test_the_interval_is_students_with_its_part_of_the_five_percent():
    for count in (3, 4, 10, 50):
        t = scipy.stats.t.ppf(1 - 0.05 / (count * (count - 1)), count - 1)
        assert half_width(count, 0.001) == pytest.approx(t * 0.001 / math.sqrt(count), rel=1e-6)
    assert sum(0.05 * 2 / (n * (n - 1)) for n in range(3, 100_000)) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(
    ("gaps", "verdict", "more"),
    [
        ([0.001], "undecided", 2),
        ([0.0009, 0.0010], "undecided", 1),
        ([0.0009, 0.0010, 0.0011], "within", None),
        ([0.004, 0.0041, 0.0042], "worse", None),
        ([-0.004, -0.0041, -0.0042], "better", None),
        ([0.0, 0.0, 0.0], "within", None),
        ([0.0020, 0.0024, 0.0028, 0.0032], "undecided", None),
    ],
)
def test_verdicts(gaps, verdict, more):
    found = decide(gaps, MARGIN)
    assert (found.verdict, found.more) == (verdict, more)


def test_so_many_more_pairs_with_the_same_spread_decide():
    gaps = [0.0005, 0.0015, 0.0025]
    found = decide(gaps, MARGIN)
    count = 3 + found.more
    spread = statistics.stdev(gaps)
    assert half_width(count, spread) <= MARGIN - found.mean < half_width(count - 1, spread)


# --- Groups ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    def make(*losses, **settings):
        base = {"recipe": "bf16", "seed": 0, "out": "x", "batch": 2, "disturb": 0.0}
        name = "-".join(map(str, settings.values())) or "bf16"
        series = {"evaluation_loss": {10 * number: loss for number, loss in enumerate(losses, 1)}}
        return RunData(tmp_path / name, name, base | settings, series)

    return make


def test_runs_are_grouped_by_settings_and_paired_by_seed_and_branch(run):
    runs = [
        run(5, 4, 3, 2), run(6, 5, 4, 3, seed=1), run(9, 9, 9, 9, seed=2),
        run(5, 4.4, 3.3, 2.2, recipe="rowwise"), run(6, 5, 4, 3.6, recipe="rowwise", seed=1),
        run(5, 4, 3, 2.01, disturb=0.002),
    ]  # fmt: skip
    base, rowwise, twin = group_runs(runs)
    groups = [(group.name, group.twin, len(group.runs)) for group in (base, rowwise, twin)]
    assert groups == [("bf16", False, 3), ("rowwise", False, 2), ("twin", True, 1)]
    assert gaps_of(rowwise, base) == pytest.approx([0.1, 0.05])
    assert gaps_of(twin, base) == pytest.approx([0.01 / 9])
    assert slope_of(base) == pytest.approx(statistics.fmean([2 / 2, 2 / 3, 0]) / 20)


def test_the_groups_of_runs_that_wrote_no_such_setting_and_of_two_with_one_recipe(run):
    older = run(5, 4, 3, 2, seed=1)
    del older.settings["disturb"]
    assert len(group_runs([run(5, 4, 3, 2), older])) == 1
    groups = group_runs([run(5, 4), run(5, 4, recipe="rowwise"), run(5, 4, recipe="rowwise", skip=["a"])])
    assert [group.name for group in groups] == ["bf16", "rowwise", "rowwise-['a']"]


def test_runs_that_cannot_be_compared_are_refused(run):
    base, other = group_runs([run(5, 4), run(5, 4, recipe="rowwise", seed=3)])
    with pytest.raises(ValueError, match="no run of rowwise has the seed and the branch of a run of bf16"):
        gaps_of(other, base)
    base, short = group_runs([run(5, 4, 3), run(5, 4, recipe="rowwise")])
    with pytest.raises(ValueError, match="must have a finite evaluation loss at step 30"):
        gaps_of(short, base)
    with pytest.raises(ValueError, match="would be counted twice"):
        group_runs([run(5, 4), run(5, 4)])
