"""octavo train, bisect, compare and report: settings, signals, bad input, and what they say of runs."""

import inspect
import json
import json.decoder
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from report_examples import make_run, write_metrics
from tiny_runs import SMALLEST
from verify_examples import change_json

from octavo.bisection import Part, ShortRuns, Trial
from octavo.checkpoint.folder import RunFolder
from octavo.report.training_page import sparkline
from octavo.train.config import Config, settings_of
from octavo.train.run_records import ONE_SEED
from octavo.train.settings import load_config
from octavo.train.trainer import Trainer
from octavo_cli.train import _advice

QUICK = ("train", "tiny.toml", "--data=text.txt", "--recipe=bf16", "--out=run")


# --- train


def test_a_run_and_its_continuation(printed, here):
    out = printed("train", "tiny.toml", "--data", "text.txt", "other.txt", "--recipe=delayed", "--out", "run")
    steps = [line for line in out.splitlines() if line.startswith("step ") and "/4" in line]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert all(part in steps[0] for part in ("loss", "lr", "grad norm", "tokens/s", "ETA"))
    assert "delayed: 7 linear layers converted, 1 skipped" in out
    assert out.splitlines()[-1] == "done: 4 steps in run"
    assert load_config(here / "run" / "config.json").data == (f"{here}/text.txt", f"{here}/other.txt")
    out = printed("train", "--resume", "run", "--steps", "6", "--log-every", "2")
    assert "resumed from run/step-00000004" in out
    assert out.splitlines()[-1] == "done: 6 steps in run"
    assert sorted(path.name for path in (here / "run").glob("step-*")) == [f"step-0000000{n}" for n in (2, 4, 6)]


def test_settings_may_come_first_and_without_a_file(printed, here):
    tiny = [f"--{name}={value}" for name, value in SMALLEST.items() if name != "steps"]
    out = printed("train", "--steps", "3", *tiny, "--no-tied", *QUICK[2:])
    assert out.splitlines()[-1] == "done: 3 steps in run"
    assert load_config(here / "run" / "config.json").tied is False


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_with_the_way_on_and_a_second_one_at_once(octavo, here, monkeypatch, signals):
    step = Trainer.step

    def stepped(trainer):
        result = step(trainer)
        for _ in range(signals if trainer.state.step == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(Trainer, "step", stepped)
    code, out, err = octavo(*QUICK)
    assert "Traceback" not in out + err
    if signals == 1:
        assert (code, err) == (0, "")
        assert out.splitlines()[-1] == "SIGINT: saved step 2; continue with: octavo train --resume run"
    else:
        assert code not in (0, None)
        assert not list((here / "run").glob("*step*"))


def test_settings_lists_every_one_with_its_default(printed):
    out = printed("train", "--settings")
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("--")}
    assert rows.keys() == {f"--{name.replace('_', '-')}" for name in settings_of(Config)}
    assert " ".join(rows["--heads"].split()) == "--heads an integer 4 query heads of an attention"
    assert "1e-3; to fine-tune 2e-5" in rows["--learning-rate"]
    assert "rowwise" in rows["--recipe"]


# --- bisect

BISECT = ("bisect", "tiny.toml", "--data", "text.txt", "--width=16", "--steps=3")


@pytest.fixture
def text(here):
    (here / "text.txt").write_text(inspect.getsource(json.decoder))
    return here


def test_a_gap_that_is_not_resolved_is_said_with_the_seeds_that_would_do(octavo, text):
    code, out, err = octavo(*BISECT, "--seeds", "3")
    assert code == 0
    assert "y, dx, dw  all 7" in out
    assert "No gap can be resolved" in out
    assert "longer runs (--run-steps) may show a larger" in out
    assert err.count("short run ") == 6
    assert "short run 1: y, dx, dw in FP8, 7 layers, seed 0: loss " in err
    _, out, err = octavo(*BISECT, "--seeds", "3", "--json")
    assert err == ""  # every run is remembered
    answer = json.loads(out)
    assert (answer["verdict"], answer["steps"], answer["runs"]) == ("unresolved", 3, 6)
    assert answer["seeds_needed"] > 3
    assert [trial["gemms"] for trial in answer["trials"]] == [["y", "dx", "dw"]]


def test_a_cause_is_named_with_the_settings_that_avoid_it(octavo, text, monkeypatch):
    bad = "model.layers.0.mlp.up_proj"

    def gap(runs, part, seeds):
        size = 0.1 * ("dw" in part.gemms and (part.layers is None or bad in part.layers))
        return size, size + 0.001

    monkeypatch.setattr(ShortRuns, "gap", gap)
    out = octavo(*BISECT, "--seeds", "2")[1]
    assert "FP8 raises the loss: +10.05%" in out
    assert "GEMM: dw\n" in out
    assert f"layers: {bad}, 100% of the gap" in out
    assert "--bf16-gemms dw keeps dw in BF16 in all layers" in out
    assert f"--skip {bad} keeps these layers in BF16" in out


def test_more_seeds_are_advised_only_for_a_gap_that_is_searched():
    gap = Trial(Part(("y",)), (0.0001, 0.0003), 0.0013)  # 0.02 %
    assert "--seeds" in _advice(gap, 0.0001)
    assert "more seeds find nothing" in _advice(gap, 0.0005)


def test_from_takes_the_settings_of_the_run(octavo, printed, text):
    printed(*QUICK[:3], "--recipe", "delayed", "--out", "run")
    for source in ("run", RunFolder(text / "run").newest()):
        out = octavo("bisect", "--from", source, "--seeds", "2", "--run-steps", "2", "--out", "why", "--json")[1]
        assert json.loads(out)["runs"] == 4
    assert json.loads((text / "why" / "bisect.json").read_text())["settings"]["recipe"] == "delayed"


# --- compare


def test_runs_are_compared_step_by_step(printed, trained, records):
    out = printed("compare", trained / "bf16", trained / "fp8")
    bf16, fp8 = records(trained / "bf16", "evaluation_loss"), records(trained / "fp8", "evaluation_loss")
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["step", "bf16", "fp8", "gap"]
    for step, line in zip((2, 4), lines[2:4], strict=True):
        assert line == [str(step), f"{bf16[step]:.4f}", f"{fp8[step]:.4f}", f"{fp8[step] / bf16[step] - 1:+.2%}"]
    assert lines[5] == ["run", "steps", "final", "loss", "gap", "tokens/s", "peak", "memory,", "GB"]
    assert lines[6][:3] == ["bf16", "4", f"{bf16[4]:.4f}"]
    assert float(lines[7][-1]) > 0.1
    assert " ".join(lines[8]) == ONE_SEED
    assert lines[9:] == [["recipe:", "bf16,", "delayed"]]
    found = json.loads(printed("compare", trained / "bf16", trained / "fp8", "--json"))
    assert found["different_settings"] == {"recipe": ["bf16", "delayed"]}
    assert found["remark"] == ONE_SEED
    assert found["runs"][1]["gaps"]["4"] == pytest.approx(fp8[4] / bf16[4] - 1)
    assert found["runs"][1]["evaluations"] == {str(step): loss for step, loss in fp8.items()}


def test_runs_without_memory_or_with_other_steps_are_compared_too(printed, trained, tmp_path):
    """An older run has no peak_memory; a run that goes on has fewer steps, and may be writing a line."""
    other = shutil.copytree(trained / "fp8", tmp_path / "bf16")
    change_json(other / "config.json", lambda config: config.update(min_learning_rate=1e-6))
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != "peak_memory"} for line in lines if line["step"] < 4]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"step": 4, "evalu')
    out = printed("compare", trained / "bf16", other, trained / "fp8")
    assert str(other) in out  # two folders are called bf16
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["4"])
    assert len(row) == 4  # the step, two losses, and one gap
    assert out.splitlines()[-1] == "min-learning-rate: 0.001, 1e-06, 0.001"
    log = "".join(json.dumps(line) + "\n" for line in lines if "evaluation_loss" not in line)
    (other / "metrics.jsonl").write_text(log)
    (other / "config.json").unlink()  # as of another loop, which has no settings to compare
    out = printed("compare", trained / "bf16", other)  # without a common evaluation there is no gap and no remark
    assert [part for part in ("%", ONE_SEED, "recipe") if part in out] == []


def test_a_run_that_ends_without_a_loss_has_no_gap(printed, refused, trained, tmp_path):
    good, bad = trained / "bf16", shutil.copytree(trained / "fp8", tmp_path / "bad")
    lines = [json.dumps({"step": step, "evaluation_loss": loss}) for step, loss in ((2, 5.0), (4, None))]
    (bad / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "bad       4  inf or NaN at step 4, 5.0000 at step 2\n" in printed("compare", good, bad)
    for runs in ((good, bad), (bad, good)):
        assert "must have a finite evaluation loss at step 4" in refused("compare", *runs, "--decide", "1%")


def test_groups_of_runs_are_decided(printed, trained, tmp_path):
    """Four runs of BF16 with seeds, four in FP8 that end 0.1 % higher with some spread, and two twins."""
    changes = {"bf16": {}, "fp8": {"recipe": "rowwise"}, "twin": {"disturb": 0.1}}
    for name, settings in changes.items():
        factor = 1.001 if name == "fp8" else 1
        for seed in range(2 if name == "twin" else 4):
            run = shutil.copytree(trained / "bf16", tmp_path / f"{name}-{seed}")
            change_json(run / "config.json", lambda config, new={"seed": seed} | settings: config.update(new))
            losses = {s: (4.0 - s / 10 + seed / 10) * (factor + seed * 1e-5 * (factor > 1)) for s in (2, 4, 6)}
            lines = [json.dumps({"step": s, "evaluation_loss": loss, "tokens": 8 * s}) for s, loss in losses.items()]
            (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    groups = sorted(tmp_path.iterdir())
    lines = printed("compare", *groups, "--decide", "0.25%").splitlines()
    assert lines[0].split() == ["group", "pairs", "gap", "to", "bf16", "+-", "in", "steps", "verdict"]
    assert lines[1].split()[:3] == ["rowwise", "4", "+0.101%"]
    assert lines[1].endswith("within 0.25%")
    assert lines[2].split()[:3] == ["twin", "2", "+0.000%"]
    assert lines[2].endswith("cannot decide: 1 more pair like these, or a longer run")
    assert lines[3].startswith("slope of bf16 at the end: 2.")
    found = json.loads(printed("compare", *groups, "--decide", "0.05%", "--json"))
    assert found["margin"] == pytest.approx(0.0005)
    assert found["groups"]["rowwise"]["verdict"] == "worse"
    assert found["tokens_per_parameter"] > 0
    out = printed("compare", *groups[:8], "--decide", "0.01%")
    assert "worse by at least 0.0" in out
    assert "--disturb" in out.splitlines()[-1]  # how to make a twin


# --- report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "rowwise")


def test_the_summary_and_the_page(printed, run, tmp_path):
    write_metrics(tmp_path / "bf16", 200, offset=-0.1)
    lines = printed("report", run, tmp_path / "bf16").splitlines()
    assert lines[0] == "rowwise"
    curves = [line.split()[1] for line in lines if line.startswith("loss ") and "▁" in line]
    assert [(len(curve), curve[:3], curve[-1]) for curve in curves] == [(32, "█▇▆", "▁")] * 2
    worst = next(line for line in lines if line.startswith("saturated share"))
    assert worst.split()[2:6] == ["model.layers.0.attn.v_proj", "dy", "20", "%"]
    assert "step 200: saturation_spike: model.layers.0.attn.v_proj: 10.0% of dy saturates" in lines
    assert any(line.startswith("The run was not watched") and "octavo.watch" in line for line in lines)
    assert lines[-2:] == [ONE_SEED, f"the page: {run / 'report.html'}"]
    page = (run / "report.html").read_text()
    assert all(text in page for text in (ONE_SEED, "What ran where", "Settings that differ", "saturation_spike"))


def test_the_report_as_json(printed, run, tmp_path):
    out = printed("report", run, "--json", "--html", tmp_path / "page.html")
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
    assert ONE_SEED not in (tmp_path / "page.html").read_text()  # of one run there is no gap


def test_a_sparkline_shows_inf_and_nan():
    assert sparkline(np.array([0.0, 7.0, np.nan, np.inf])) == "▁█××"
    assert sparkline(np.array([])) == ""
    assert sparkline(np.full(100, 3.0)) == "▁" * 32
    assert len(sparkline(np.arange(1000.0))) == 32


def test_a_page_of_octavo_is_replaced_and_no_other_file(octavo, printed, refused, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    for _ in range(2):  # the second page replaces the first
        printed("report", copy)
    (tmp_path / "mine.html").write_text("<!doctype html>\n<html><body>mine</body></html>")
    (tmp_path / "binary.html").write_bytes(bytes(range(256)))
    (tmp_path / "link.html").symlink_to("mine.html")
    for path in (copy / "metrics.jsonl", *(tmp_path / f"{name}.html" for name in ("mine", "binary", "link"))):
        before = path.read_bytes()
        message = f"--html {path} exists, and is not a page that Octavo wrote: give another name. Nothing was run"
        assert message in refused("report", copy, "--html", path)
        assert path.read_bytes() == before
    (tmp_path / "empty.html").touch()
    (tmp_path / "way.html").symlink_to("empty.html")
    printed("report", copy, "--html", tmp_path / "way.html")
    assert (tmp_path / "empty.html").read_text() == (copy / "report.html").read_text()
    assert (tmp_path / "way.html").is_symlink()
    code, out, _ = octavo("report", run, "--json", "--html", "/dev/null")  # a pipe
    assert (code, Path("/dev/null").is_char_device(), bool(json.loads(out))) == (0, True, True)
