"""octavo train: settings from a file and the command line, and what it says of bad ones."""

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest

from octavo import PRESETS
from octavo.train.config import Config, describe
from octavo.train.loop import Trainer
from octavo_cli.train import _resume_command

TINY = """
layers = 1
width = 32
heads = 2
kv_heads = 1
mlp_width = 64
context = 16
batch = 2
steps = 4
warmup = 1
device = "cpu"
log_every = 1
evaluate_every = 4
evaluate_batches = 1
save_every = 2
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to stand in, with text.txt, other.txt and tiny.toml."""
    draw = random.Random(0)
    for name in ("text.txt", "other.txt"):
        (tmp_path / name).write_text(" ".join(draw.choices(["folio", "quarto", "octavo", "duodecimo"], k=200)))
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def unwritten(refused, here):
    """The message of a command that must fail without writing anything."""

    def call(*words):
        before = tree(here)
        err = refused("train", *words)
        assert tree(here) == before
        return err

    return call


def settings_of(run):
    return Config.from_dict(json.loads((run / "config.json").read_text()))


def test_a_run_and_its_continuation(octavo, here):
    code, out, err = octavo("train", "tiny.toml", "--data", "text.txt", "other.txt", "--recipe=delayed", "--out", "run")
    assert (code, err) == (0, "")
    steps = [line for line in out.splitlines() if line.startswith("step ") and "/4" in line]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert all(part in steps[0] for part in ("loss", "lr", "grad norm", "tokens/s", "ETA"))
    assert "delayed: 7 linear layers converted, 1 skipped" in out
    assert out.splitlines()[-1] == "done: 4 steps in run"
    assert settings_of(here / "run").data == (f"{here}/text.txt", f"{here}/other.txt")
    assert settings_of(here / "run").recipe == "delayed"
    code, out, err = octavo("train", "--resume", "run", "--steps", "6", "--log-every", "2")
    assert (code, err) == (0, "")
    assert "resumed from run/step-00000004" in out
    assert out.splitlines()[-1] == "done: 6 steps in run"
    assert sorted(path.name for path in (here / "run").glob("step-*")) == [f"step-0000000{n}" for n in (2, 4, 6)]


@pytest.mark.parametrize("words", [["--steps", "3"], ["--steps=3"]])
def test_settings_may_come_first_and_without_a_file(octavo, here, words):
    tiny = [f"--{key}={value}" for key, value in re.findall(r"(\w+) = \"?(\w+)", TINY) if key != "steps"]
    code, out, err = octavo("train", *words, *tiny, "--data", "text.txt", "--recipe", "bf16", "--out", "run")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "done: 3 steps in run"


def test_a_flag_is_turned_off_by_no(octavo, here):
    code, _, err = octavo("train", "tiny.toml", "--no-tied", "--out", "run")
    assert (code, err) == (0, "")
    assert settings_of(here / "run").tied is False
    code, _, err = octavo("train", "tiny.toml", "--no-steps", "--out", "other")
    assert code == 2
    assert "No such option: --no-steps" in err


def test_long_and_odd_names_are_printed_as_they_are(octavo, here, monkeypatch):
    name = "a folder of [red]many[/red] words " * 7
    code, out, _ = octavo("train", "tiny.toml", "--data", "text.txt", "--recipe=bf16", "--out", name.strip())
    assert code == 0
    assert out.splitlines()[-1] == f"done: 4 steps in {name.strip()}"
    out = octavo("train", "--resume", name.strip(), "--steps", "5")[1]
    assert f"resumed from {name.strip()}/step-00000004" in out.splitlines()


def signalled(monkeypatch, *numbers):
    """Signals that come in the second step."""
    step = Trainer.step

    def stepped(trainer):
        result = step(trainer)
        if trainer.state.step == 2:
            for number in numbers:
                os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(Trainer, "step", stepped)


@pytest.mark.usefixtures("default_signals")
def test_a_signal_ends_with_success_and_the_way_on(octavo, here, monkeypatch):
    signalled(monkeypatch, signal.SIGINT)
    code, out, err = octavo("train", "tiny.toml", "--data", "text.txt", "--recipe=bf16", "--out", "run")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "SIGINT: saved step 2; continue with: octavo train --resume run"


def test_the_way_on_of_several_processes_is_torchrun():
    assert _resume_command(Path("run"), 2) == "torchrun ... -m octavo train --resume run"


@pytest.mark.usefixtures("default_signals")
def test_a_second_signal_ends_with_failure_and_no_traceback(octavo, here, monkeypatch):
    signalled(monkeypatch, signal.SIGINT, signal.SIGINT)
    code, out, err = octavo("train", "tiny.toml", "--data", "text.txt", "--recipe=bf16", "--out", "run")
    assert code not in (0, None)
    assert "Traceback" not in out + err
    assert not list((here / "run").glob("*step*"))


# --- Bad input


@pytest.mark.parametrize(
    ("words", "essentials"),
    [
        (["--recipe", "fp8"], ["'fp8'", *PRESETS]),
        (["--steps", "many"], ["steps", "an integer", "'many'"]),
        (["--steps"], ["--steps", "needs a value"]),
        (["--skip", "nothing.*"], ["nothing.*", "matches no linear layer"]),
        (["--model", "./nowhere"], ["nowhere"]),
        (["--data", "nowhere.txt"], ["nowhere.txt", "no such file"]),
        (["--data", "short.txt"], ["17 tokens"]),
        (["--out="], ["out", "not empty"]),
        (["--out", "full"], ["full is not empty"]),
        (["stray"], ["stray"]),
    ],
    ids=" ".join,
)
def test_a_bad_setting_is_one_line_and_writes_nothing(unwritten, here, words, essentials):
    (here / "short.txt").write_text("short")
    (here / "full").mkdir()
    (here / "full" / "notes.txt").write_text("mine")
    usual = [word for word in ("--data=text.txt", "--out=run") if not words[0].startswith(word.split("=")[0])]
    message = unwritten("tiny.toml", *usual, *words)
    for essential in essentials:
        assert essential in message


def test_a_bad_file_is_named(unwritten, here):
    (here / "config.toml").write_text("step = 3")
    message = unwritten("config.toml", "--data=text.txt", "--out=run")
    assert all(part in message for part in ("'step'", "config.toml", "did you mean 'steps'"))


def test_a_file_that_is_not_there(unwritten):
    assert "nowhere.toml" in unwritten("nowhere.toml")


@pytest.fixture
def run(octavo, here):
    assert octavo("train", "tiny.toml", "--data=text.txt", "--recipe=bf16", "--out=run")[0] == 0
    return here / "run"


def test_a_resumed_run_takes_no_file(unwritten, run):
    assert "tiny.toml" in unwritten("--resume", "run", "tiny.toml")


def test_a_broken_checkpoint_is_named(octavo, unwritten, run):
    (run / "step-00000004" / "model.safetensors").write_bytes(b"")
    message = unwritten("--resume", "run")
    assert "run/step-00000004/model.safetensors is truncated or not a safetensors file" in message
    assert "Remove that folder" in message
    shutil.rmtree(run / "step-00000004")
    assert octavo("train", "--resume", "run")[0] == 0


def test_a_run_that_breaks_says_where_it_can_go_on(octavo, here):
    code, out, err = octavo(
        "train", "tiny.toml", "--data=text.txt", "--recipe=bf16", "--out=run", "--learning-rate=1e30"
    )
    assert code == 1
    assert re.fullmatch(
        r"error: step \d: the loss is [^\n]* norm nan[^\n]*(no checkpoint was saved yet|step-0000000\d)\n", err
    )
    assert "Traceback" not in out


# --- Help


def test_help_shows_the_essentials(octavo):
    code, out, _ = octavo("train", "--help")
    assert code == 0
    essentials = ("TOML", "--settings", "--data", "--recipe", "--steps", "--out", "SIGINT", "octavo train --resume")
    assert [part for part in essentials if part not in out] == []


def test_settings_lists_every_one_with_its_default(octavo):
    code, out, _ = octavo("train", "--settings")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("--")}
    assert rows.keys() == {f"--{name.replace('_', '-')}" for name, *_ in describe()}
    assert "1e-3; to fine-tune 2e-5" in rows["--learning-rate"]
    assert "learning_rate / 10" in rows["--min-learning-rate"]
    assert "peak learning rate" in rows["--learning-rate"]
    assert "rowwise" in rows["--recipe"]
