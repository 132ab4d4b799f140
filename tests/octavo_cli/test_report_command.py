"""octavo report, as it is typed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_examples import make_run, write_metrics

from octavo.report.summary import sparkline


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "rowwise")


def test_the_summary_and_the_page(octavo: Any, run: Path, tmp_path: Path) -> None:
    write_metrics(tmp_path / "bf16", 200, offset=-0.1)
    code, out, err = octavo("report", run, tmp_path / "bf16")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "rowwise"
    curves = [line.split()[1] for line in lines if line.startswith("loss ") and "▁" in line]
    assert [(len(curve), curve[:3], curve[-1]) for curve in curves] == [(32, "█▇▆", "▁")] * 2
    worst = next(line for line in lines if line.startswith("saturated share"))
    assert worst.split()[2:6] == ["model.layers.0.attn.v_proj", "dy", "20", "%"]
    assert "step 200: saturation_spike: model.layers.0.attn.v_proj: 10.0% of dy saturates" in lines
    assert any(line.startswith("The run was not watched") and "octavo.watch" in line for line in lines)
    assert lines[-1] == f"the page: {run / 'report.html'}"
    page = (run / "report.html").read_text()
    for text in ("What ran where", "Settings that differ", "saturation_spike", "cublaslt", "the layer is skipped"):
        assert text in page


def test_json(octavo: Any, run: Path, tmp_path: Path) -> None:
    code, out, err = octavo("report", run, "--json", "--html", tmp_path / "page.html")
    assert (code, err) == (0, "")
    (found,) = json.loads(out, parse_constant=pytest.fail)
    assert found["series"]["loss"]["inf_or_nan_at"] == []
    assert found["watched"]["samples"] == 20
    layer = found["watched"]["layers"][2]
    assert layer["name"] == "model.layers.0.attn.v_proj"
    assert layer["figures"]["dy"]["saturated"] == pytest.approx(0.2)
    assert layer["figures"]["x"]["sqnr"] < 30
    assert layer["figures"]["layer"]["update_ratio"] == pytest.approx(1e-3)
    assert found["watched"]["layers"][-1]["figures"]["x"]["sqnr"] is None  # the head is not quantized
    assert found["events"][0]["rule"] == "saturation_spike"
    assert (tmp_path / "page.html").is_file()


def test_errors_are_one_line(refused: Any, run: Path, tmp_path: Path) -> None:
    for words, message in (
        ((tmp_path / "none",), "none is no folder: give the folder of a run"),
        ((tmp_path,), "is no run: it has no metrics.jsonl"),
        ((run, "--html", tmp_path / "none" / "page.html"), "--html"),
    ):
        assert message in refused("report", *words)


def test_a_sparkline_shows_inf_and_nan() -> None:
    assert sparkline(np.array([0.0, 7.0, np.nan, np.inf])) == "▁█××"
    assert sparkline(np.array([])) == ""
    assert sparkline(np.full(100, 3.0)) == "▁" * 32
    assert len(sparkline(np.arange(1000.0))) == 32
