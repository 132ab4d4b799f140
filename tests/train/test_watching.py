"""The watch of a run: on by default, drawn on boards, and without effect on the numbers."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.telemetry import read_watch


def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def steps_of(run):
    return np.unique(read_watch(run).operands["step"]).tolist()


def test_a_run_is_watched_and_a_resumed_one_goes_on(begin, go_on):
    trainer = begin(recipe="rowwise", steps=6, save_every=4, log_every=1, watch={"interval": 2})
    trainer.run()
    run = trainer.run_folder.path
    assert steps_of(run) == [1, 2, 4, 6]
    assert trainer.watch is None
    watched = read_watch(run)
    layer = next(layer for layer in watched.layers if layer.recipe)
    assert {name: gemm.precision for name, gemm in layer.gemms.items()} == dict.fromkeys(("y", "dx", "dw"), "fp8")
    go_on(run, "--steps", "8").run()
    assert steps_of(run) == [1, 2, 4, 6, 7, 8]


def test_the_losses_of_a_watched_run_are_those_of_another(begin, tmp_path):
    found = []
    for interval in (0, 1):
        trainer = begin(
            recipe="rowwise", steps=4, log_every=1, watch={"interval": interval}, out=str(tmp_path / f"{interval}")
        )
        trainer.run()
        found.append(losses(trainer.run_folder.path))
        assert (trainer.run_folder.path / "watch").exists() == bool(interval)
    assert len(found[0]) == 4
    assert found[0] == found[1]


class Histogram(SimpleNamespace):
    pass


class Wandb:
    """The part of wandb that a run calls, which records the calls."""

    def __init__(self):
        self.runs = []

    def init(self, **options):
        run = SimpleNamespace(options=options, logged=[], finished=False, defined=[])
        run.log = run.logged.append
        run.define_metric = lambda name, **more: run.defined.append((name, more))
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run

    def Histogram(self, np_histogram):
        return Histogram(counts=np_histogram[0], edges=np_histogram[1])


@pytest.fixture
def wandb(monkeypatch):
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_weights_and_biases_gets_the_numbers_and_the_histograms(begin, go_on, wandb):
    trainer = begin(recipe="rowwise", steps=3, log_every=1, wandb=True, watch={"interval": 2})
    trainer.run()
    run = trainer.run_folder.path
    go_on(run, "--steps", "4").run()
    first, second = wandb.runs
    assert first.options["id"] == second.options["id"]
    assert (first.options["name"], Path(first.options["dir"])) == (run.name, run)
    assert first.options["config"]["recipe"] == "rowwise"
    assert first.defined == [("step", {}), ("*", {"step_metric": "step"})]
    assert first.finished
    logged = {name: (line["step"], value) for line in first.logged for name, value in line.items()}
    assert logged["loss"] == (3, losses(run)[2])
    name = "watch/model.layers.0.mlp.down_proj/dy"
    watched = read_watch(run)
    of_name = np.array([watched.layers[r["layer"]].name in name for r in watched.operands])
    (record,) = watched.operands[of_name & (watched.operands["step"] == 2) & (watched.operands["operand"] == 2)]
    assert logged[f"{name}/sqnr"] == (2, record["sqnr"])
    step, histogram = logged[f"{name}/log2"]
    assert step == 2
    assert histogram.counts.sum() == pytest.approx(1, abs=0.01)
    assert 2.0 ** (histogram.edges[-1] - 1) <= record["amax"] < 2.0 ** histogram.edges[-1]
    assert histogram.counts[-1] == pytest.approx(record["binades"][0] / 65535)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_gets_the_numbers_and_the_histograms(begin):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = begin(recipe="rowwise", steps=3, log_every=1, tensorboard=True, watch={"interval": 2})
    trainer.run()
    found = events.EventAccumulator(str(trainer.run_folder.path / "tensorboard"))
    found.Reload()
    name = "watch/model.layers.0.mlp.down_proj"
    assert [event.step for event in found.Scalars(f"{name}/x/sqnr")] == [1, 2]
    assert found.Scalars(f"{name}/gradient_norm")[0].value > 0
    histogram = found.Histograms(f"{name}/gradient/log2")[0].histogram_value
    assert histogram.num == pytest.approx(1, abs=0.01)


def test_without_wandb_the_error_names_the_extra_and_nothing_is_written(begin, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[wandb\]"'):
        begin(wandb=True)
    assert not list(tmp_path.glob("*/config.json"))
