"""The page of runs: long lines, many events, and what several runs share."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from report_examples import make_run, watched_of, write_metrics

from octavo.report.runs import RunData, Series, read_runs
from octavo.report.training_page import page_of_runs, thin
from octavo.telemetry.schema import Event


def data_of(html: str) -> Any:
    """The values that the page's code reads."""
    (text,) = re.findall('<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(text)


def test_a_long_line_keeps_its_extremes_and_gaps() -> None:
    values = np.sin(np.arange(100_000.0))
    values[12_345], values[70_001], values[50_000] = 99.0, -99.0, np.nan
    steps, thinned = thin(Series(np.arange(100_000), values))
    assert len(steps) == len(thinned) <= 4000
    assert steps == sorted(set(steps))
    assert [thinned[steps.index(step)] for step in (12_345, 70_001, 50_000)] == [99.0, -99.0, None]


def test_a_short_line_is_whole() -> None:
    assert thin(Series(np.array([1, 5]), np.array([2e9, np.nan])), 1e-9) == ([1, 5], [2.0, None])


def test_the_lines_of_runs(tmp_path: Path) -> None:
    write_metrics(tmp_path / "a", 10)
    write_metrics(tmp_path / "b", 20, offset=1.0)
    page = page_of_runs(read_runs([tmp_path / "a", tmp_path / "b"])).html()
    charts = {chart["id"]: chart for chart in data_of(page)["charts"]}
    loss = [(line["name"], line["colour"], line["dashed"], len(line["x"])) for line in charts["loss"]["lines"]]
    assert loss == [
        ("a", 0, False, 10), ("a evaluation", 0, True, 1), ("b", 1, False, 20), ("b evaluation", 1, True, 2),
    ]  # fmt: skip
    assert charts["memory"]["lines"][0]["y"][0] == 41.0
    assert "<h2>Events" not in page
    assert 'id="heat"' not in page


def test_many_events_are_cut_and_counted(tmp_path: Path) -> None:
    events = [
        Event(step, "loss_spike", None, None, 9.0, 1.0, f"<i>the loss of {step}", "rollback") for step in range(1500)
    ]
    watched = watched_of(4, np.arange(3))
    watched.events.extend(events)
    page = page_of_runs([RunData(tmp_path, "run", {}, {}, watched=watched)]).html()
    assert "The last 1000 of 1500 events." in page
    assert page.count("&lt;i&gt;the loss of") == 1000
    assert "<i>" not in page


def test_runs_share_the_bytes_of_a_page(tmp_path: Path) -> None:
    run = RunData(tmp_path, "run", {}, {}, watched=watched_of(200, np.arange(300)))
    one, four = (page_of_runs([run] * count).html() for count in (1, 4))
    assert len(four) < 20e6
    (single,), several = data_of(one)["watched"], data_of(four)["watched"]
    assert len(several) == 4
    assert len(single["columns"]) == 300
    assert len(several[0]["columns"]) < 300
    assert single["columns"][-1] == [299, 299]


def test_a_format_has_its_numbers_and_bf16_has_none(tmp_path: Path) -> None:
    data = data_of(page_of_runs(read_runs([make_run(tmp_path / "run")])).html())
    assert data["formats"].keys() == {"e4m3", "e5m2"}
    assert data["formats"]["e4m3"][-1] == 448.0
