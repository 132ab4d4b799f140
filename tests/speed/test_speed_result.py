"""The figures of a comparison of speed."""

import pytest

from octavo.speed import Grid, SpeedReport
from octavo.speed.result import Check, Row


def row(way: str, first: list[float], whole: list[float], *, baseline: bool = False, batch: int = 4) -> Row:
    return Row(way, baseline, batch, 128, 11, prompt_seconds=first, whole_seconds=whole)


def report(*rows: Row) -> SpeedReport:
    return SpeedReport({}, Grid([4], [128], 11), "cpu", rows=list(rows))


def test_tokens_per_second_are_of_decoding_alone() -> None:
    found = row("a", [1.0, 9.0, 2.0], [4.0, 3.0, 99.0])
    assert found.first_token_seconds == 2.0
    assert found.tokens_per_second == 4 * 10 / (4.0 - 2.0)


def test_the_first_token_alone_has_no_rate() -> None:
    assert Row("a", False, 1, 8, 1, prompt_seconds=[1.0]).tokens_per_second is None


def test_times_that_are_noise_have_no_rate() -> None:
    assert row("a", [2.0], [2.0]).tokens_per_second is None


def test_a_speedup_is_over_the_best_bf16_way_of_the_same_size() -> None:
    ours = row("octavo", [1.0], [2.0])
    eager = row("eager", [2.0], [7.0], baseline=True)
    static = row("static", [3.0], [5.0], baseline=True)
    other = row("eager", [0.1], [0.2], baseline=True, batch=1)
    found = report(ours, eager, static, other)
    assert found.speedups(ours) == (2.0, 2.0)  # of the first token over eager, of decoding over static
    assert found.speedups(static) == (pytest.approx(2 / 3), 1.0)
    assert found.to_dict()["rows"][0]["tokens_per_second_speedup"] == 2.0


def test_without_bf16_there_is_no_speedup() -> None:
    ours = row("octavo", [1.0], [2.0])
    assert report(ours).speedups(ours) == (None, None)
    failed = Row("BF16, eager", True, 4, 128, problem="does not fit: no memory")
    assert report(ours, failed).speedups(ours) == (None, None)
    assert report(ours, failed).speedups(failed) == (None, None)


def test_a_check_is_passed_by_equal_tokens_of_every_prompt() -> None:
    assert Check("a", "b", 8, [8, 8]).ok
    assert not Check("a", "b", 8, [8, 7]).ok
