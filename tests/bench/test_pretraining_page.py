"""docs/pretraining.md from results that are made up."""

import math
import statistics
from typing import Any

import pytest
import scipy.stats

from bench.report import pages, pretraining
from bench.report.tables import load


def run(mode: str, seed: int, losses: list[float], speed: float) -> dict[str, Any]:
    points = [{"step": 100 * (i + 1), "seconds": 10.0 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    return {
        "mode": mode, "seed": seed, "evaluations": points, "compared_loss": losses[1], "tokens_per_second": speed,
        "peak_bytes": 2 << 30, "seconds_to_target": 20.0 / speed, "parameters": 308_577_280,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    runs = [
        run("bf16", 0, [4.0, 3.0], 10.0),
        run("bf16", 1, [4.2, 3.2], 10.0),
        run("rowwise", 0, [4.1, 3.1, 2.0], 12.5),
    ]
    gaps = {"rowwise": {"seeds": [0, 1], "mean": 0.001, "interval": [-0.002, 0.004]}}
    gaps["torchao"] = {"seeds": [0, 1], "mean": 0.003, "interval": [0.002, 0.004]}
    result = {
        "machine": {"gpu": "NVIDIA H200"}, "model": "300m",
        "settings": {"layers": 24, "width": 1024, "context": 2048, "steps": 200},
        "corpus": {"train_tokens": 100_000_000}, "compared_at_step": 200, "compared_tokens": 50_000_000, "target": 3.2,
        "gaps": gaps, "bf16_spread": 0.0645, "runs": runs,
    }  # fmt: skip
    return {"pretrain_300m": result}


def test_the_page_holds_every_figure(results: dict[str, Any]) -> None:
    text = pages.page("pretraining", load() | results)
    assert "{" not in text
    assert "nan" not in text
    assert "| 300m | rowwise | 2 | +0.100% | -0.200% to +0.400% | 6.450% | no: these runs cannot" in text
    assert "| 300m | torchao | 2 | +0.300% | +0.200% to +0.400% | 6.450% | yes |" in text
    assert "| 300m | rowwise | 12 | 1.250x | 1.000x | 0.800x |" in text
    assert "309 M parameters in 24 layers, 1024 wide" in text
    assert "0.50 epochs of 100 M tokens. NVIDIA H200." in text


def test_curves_end_where_the_runs_are_compared(results: dict[str, Any]) -> None:
    rows = list(pretraining.pretraining_curves(results))
    assert rows[1] == {"model": "300m", "tokens": "50.0 M", "bf16": "3.1000", "rowwise": "3.1000"}
    assert [row["tokens"] for row in rows] == ["25.0 M", "50.0 M"]


def test_gaps_are_pooled_over_the_results_of_a_model(results: dict[str, Any]) -> None:
    whole = results["pretrain_300m"]
    whole["runs"].append(run("rowwise", 1, [4.2, 3.2], 12.5))
    short = whole | {"compared_at_step": 100, "compared_tokens": 25_000_000, "corpus": {"train_tokens": 30_000_000}}
    short["runs"] = [run("bf16", 0, [5.0, 9.0], 10.0), run("rowwise", 0, [5.2, 9.0], 12.5)]
    for each in short["runs"]:
        each["evaluations"].pop()
    results["pretrain_300m_100"] = short
    first, second, last = pretraining.pretraining_pooled(results)
    by_seed = [4.1 / 4.0 - 1, 0.0, 5.2 / 5.0 - 1]
    low, high = scipy.stats.t.interval(0.95, 2, statistics.mean(by_seed), statistics.stdev(by_seed) / math.sqrt(3))
    text = f"{statistics.mean(by_seed):+.2%} ({low:+.1%} to {high:+.1%}), 3 seeds"
    assert first == {"model": "300m", "tokens": "25.0 M", "rowwise": text}
    assert second["rowwise"].endswith("2 seeds")
    assert last == {"model": "300m", "tokens": "75.0 M"}  # no run of BF16 has come so far
    labels = {row["model"] for row in pretraining.pretraining_runs(results)}
    assert labels == {"300m", "300m, first 25.0 M tokens"}


def test_one_seed_has_no_interval(results: dict[str, Any]) -> None:
    results["pretrain_300m"]["gaps"] = {"rowwise": {"seeds": [0], "mean": -0.005, "interval": None}}
    results["pretrain_300m"]["bf16_spread"] = None
    (row,) = pretraining.pretraining_gaps(results)
    assert row["95 % interval"] == "– (one seed)"
    assert row["BF16's seeds apart"] == "–"
    assert row["resolved"].startswith("no")


def test_there_is_no_page_without_results(results: dict[str, Any]) -> None:
    others = {name: result for name, result in load().items() if not name.startswith("pretrain_")}
    assert "pretraining" not in pages.pages(others)
    assert "pretraining" in pages.pages(others | results)
