"""bench/gpu/pretrain.py, the model small and on the CPU."""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpu import pretrain
from octavo.models.tokenizer import ByteTokenizer
from octavo.text import read_text
from octavo.train.data import build_corpus

CONFIG = pretrain.CONFIGS["300m"].change(
    layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=32, vocabulary=256, batch=2, accumulate=1,
    steps=6, warmup=2, evaluate_batches=2, compile=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "EVALUATIONS", 3)


def tokens_of_this_file(path: Path) -> None:
    reading = read_text([str(Path(__file__))])
    pretrain.save_tokens(build_corpus(reading.texts, ByteTokenizer(), 32, 0.2), path)


def test_runs_are_trained_and_merged(tmp_path: Path) -> None:
    tokens_of_this_file(tmp_path / "tokens.npz")
    data = pretrain.shared_data(CONFIG, tmp_path / "tokens.npz", rank=1)
    assert len(data.corpus.train) > 1000
    plan = [("bf16", 0), ("rowwise", 0)]
    pretrain.train_all("300m", plan, CONFIG, data, tmp_path, math.inf, CONFIG.steps)
    before = (tmp_path / "bf16-0.json").stat().st_mtime_ns
    pretrain.train_all("300m", plan, CONFIG, data, tmp_path, math.inf, CONFIG.steps)
    assert (tmp_path / "bf16-0.json").stat().st_mtime_ns == before  # the run had reached its last step
    result = pretrain.merge(tmp_path)
    assert result["compared_at_step"] == 6
    assert result["compared_tokens"] == 6 * 2 * 32
    assert [run["mode"] for run in result["runs"]] == ["bf16", "rowwise"]
    for run in result["runs"]:
        assert [each["step"] for each in run["evaluations"]] == [2, 4, 6]
        assert run["tokens_per_second"] == pytest.approx(6 * 2 * 32 / run["evaluations"][-1]["seconds"])
        assert run["seconds_to_target"] <= run["evaluations"][-1]["seconds"]
    assert 0 < abs(result["gaps"]["rowwise"]["mean"]) < 0.05
    assert result["bf16_spread"] is None  # of one seed
    assert pretrain.name_of(result) == "pretrain_300m"


def test_a_run_that_is_stopped_has_the_losses_of_a_whole_one(tmp_path: Path) -> None:
    tokens_of_this_file(tmp_path / "tokens.npz")
    data = pretrain.shared_data(CONFIG, tmp_path / "tokens.npz", rank=1)
    runs = {}
    for stop in (4, 4, CONFIG.steps):  # the second time nothing is left to train
        pretrain.train_all("300m", [("bf16", 0)], CONFIG, data, tmp_path, math.inf, stop)
        runs[stop] = json.loads((tmp_path / "bf16-0.json").read_text())
        assert pretrain.last_step(tmp_path / "bf16-0.json") == stop
        assert pretrain.name_of(pretrain.merge(tmp_path)) == ("pretrain_300m_4" if stop == 4 else "pretrain_300m")
    stopped, whole = ([point["loss"] for point in run["evaluations"]] for run in runs.values())
    assert stopped == whole[:2]  # the schedule is that of the whole run
    assert [runs[stop]["whole"] for stop in runs] == [False, True]


def test_a_run_that_does_not_end_is_compared_where_it_got_to(tmp_path: Path) -> None:
    for mode, losses in (("bf16", [3.0, 2.0, 1.0]), ("rowwise", [3.1, 2.1])):
        points = [{"step": 10 * (i + 1), "seconds": float(i + 1), "loss": loss} for i, loss in enumerate(losses)]
        run = {"machine": {}, "model": "1b", "settings": {}, "corpus": {}, "mode": mode, "seed": 0, "whole": False}
        write(tmp_path, run | {"evaluations": points, "tokens": 100 * len(losses)})
    result = pretrain.merge(tmp_path)
    assert (result["compared_at_step"], result["compared_tokens"], result["target"]) == (20, 200, 2.1)
    assert [run["compared_loss"] for run in result["runs"]] == [2.0, 2.1]
    assert [run["seconds_to_target"] for run in result["runs"]] == [pytest.approx(1.9), 2.0]
    write(tmp_path, run | {"seed": 1, "settings": {"steps": 1}, "evaluations": points, "tokens": 1})
    with pytest.raises(ValueError, match="the same settings"):
        pretrain.merge(tmp_path)


def write(folder: Path, run: dict[str, Any]) -> None:
    (folder / f"{run['mode']}-{run['seed']}.json").write_text(json.dumps(run))


def test_the_time_to_a_loss() -> None:
    points = [{"seconds": 1.0, "loss": 4.0}, {"seconds": 3.0, "loss": 2.0}]
    assert pretrain.seconds_to(3.0, points) == 2.0
    assert pretrain.seconds_to(5.0, points) == 1.0
    assert pretrain.seconds_to(1.0, points) is None


def test_nothing_is_trained_after_the_deadline(tmp_path: Path) -> None:
    tokens_of_this_file(tmp_path / "tokens.npz")
    data = pretrain.shared_data(CONFIG, tmp_path / "tokens.npz", rank=0)
    pretrain.train_all("300m", [("bf16", 0)], CONFIG, data, tmp_path, time.monotonic() - 1, CONFIG.steps)
    assert not list(tmp_path.glob("*.json"))
    assert data.corpus.train.dtype in (np.uint16, np.uint32)


@pytest.mark.parametrize("name", pretrain.CONFIGS)
def test_a_run_sees_a_hundred_million_tokens(name: str) -> None:
    config = pretrain.CONFIGS[name]
    assert config.steps * config.batch * config.accumulate * config.context >= 100e6
