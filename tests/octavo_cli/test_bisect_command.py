"""octavo bisect on the command line."""

import inspect
import json
import json.decoder

import pytest
from typer.testing import CliRunner

from octavo.artifact.run import RunFolder
from octavo_cli.app import app

TINY = """
layers = 1
width = 16
heads = 2
kv_heads = 1
mlp_width = 32
context = 16
steps = 3
evaluate_batches = 1
device = "cpu"
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with tiny.toml and a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text(inspect.getsource(json.decoder))
    return tmp_path


def call(*words, code=0):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output or result.exception
    return result


def test_a_gap_that_is_not_resolved_is_said_with_the_seeds_that_would_do(here):
    found = call("bisect", "tiny.toml", "--data", "text.txt", "--seeds", "3")
    assert "y, dx, dw  all 7" in found.stdout
    assert "No gap can be resolved" in found.stdout
    assert "longer runs (--run-steps) may show a larger" in found.stdout
    assert found.stderr.count("short run ") == 6
    assert "short run 1: y, dx, dw in FP8, 7 layers, seed 0: loss " in found.stderr
    again = call("bisect", "tiny.toml", "--data", "text.txt", "--seeds", "3", "--json")
    assert again.stderr == ""  # every run is remembered
    answer = json.loads(again.stdout)
    assert (answer["verdict"], answer["steps"], answer["runs"]) == ("unresolved", 3, 6)
    assert answer["seeds_needed"] > 3
    assert [trial["gemms"] for trial in answer["trials"]] == [["y", "dx", "dw"]]


def test_a_cause_is_named_with_the_settings_that_avoid_it(here, monkeypatch):
    from octavo.bisection.gap import Gap
    from octavo.bisection.short_runs import ShortRuns

    bad = "model.layers.0.mlp.up_proj"

    def gap(runs, part, seeds):
        size = 0.1 * ("dw" in part.gemms and (part.layers is None or bad in part.layers))
        return Gap((size, size + 0.001))

    monkeypatch.setattr(ShortRuns, "gap", gap)
    output = call("bisect", "tiny.toml", "--data", "text.txt", "--seeds", "2").stdout
    assert "FP8 raises the loss: +10.05%" in output
    assert "GEMM: dw\n" in output
    assert f"layers: {bad}, 100% of the gap" in output
    assert "--bf16-gemms dw keeps dw in BF16 in all layers" in output
    assert f"--skip {bad} keeps these layers in BF16" in output


def test_more_seeds_are_advised_only_for_a_gap_that_is_searched():
    from octavo.bisection.gap import Gap
    from octavo_cli.bisect import _advice

    gap = Gap((0.0001, 0.0003))  # 0.02 %
    assert "--seeds" in _advice(gap, 0.0001)
    assert _advice(gap, 0.0005) == (
        "It is smaller than --least, so more seeds find nothing; longer runs (--run-steps) may show a larger gap."
    )


def test_a_command_without_a_run_starts_none(here):
    for options in ((), ("--seeds", "2")):
        result = CliRunner().invoke(app, ["bisect", *options])
        assert result.exit_code == 1
        assert "give its settings as CONFIG, --from a run, or settings of octavo train" in str(result.exception)
    assert not (here / "runs").exists()


def test_from_takes_the_settings_of_the_run(here):
    call("train", "tiny.toml", "--data", "text.txt", "--recipe", "delayed", "--out", "run")
    for source in ("run", str(RunFolder(here / "run").newest())):
        found = call("bisect", "--from", source, "--seeds", "2", "--run-steps", "2", "--out", "why", "--json")
        assert json.loads(found.stdout)["runs"] == 4
    described = json.loads((here / "why" / "bisect.json").read_text())
    assert described["settings"]["recipe"] == "delayed"


def test_an_interrupt_says_how_to_continue(here, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.bisection.bisect", interrupt)
    result = call("bisect", "tiny.toml", "--data", "text.txt", code=130)
    assert "interrupted: the short runs that ended are in runs/bisect; the same command continues" in result.stderr
