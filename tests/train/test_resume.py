"""A run that is stopped, killed or moved, and taken up again, is the run that was not."""

import json
import os
import random
import shutil
import signal

import pytest
import torch
from full_disk import files_of_at_most
from torch import nn

from octavo.artifact.files import ArtifactError
from octavo.artifact.run import RunFolder
from octavo.train import start
from octavo.train.config import Config, ConfigError

RUNS = [
    {"recipe": "delayed"},
    {"recipe": "tensorwise", "accumulate": 2},
    {"recipe": "rowwise", "precision": "fp16"},
    {"recipe": "delayed", "model": "gpt2", "checkpoint_activations": True},
    {"recipe": "rowwise", "model": "gpt2", "dropout": 0.2, "bias": False},
    {"recipe": "bf16", "precision": "fp32", "schedule": "wsd", "tokenizer": "bpe", "vocabulary": 300},
]


def stop_after(trainer, step):
    """Run up to `step`, end with a signal."""
    original = trainer.step

    def stepped():
        result = original()
        if trainer.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    trainer.step = stepped
    assert trainer.run().step == step


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_run(found, required, records):
    """Every number of every step, and every byte of the last checkpoint."""
    for key in ("loss", "evaluation_loss", "gradient_norm", "learning_rate", "largest_weight", "sample"):
        assert records(found, key) == records(required, key)
    assert files(RunFolder(found).newest()) == files(RunFolder(required).newest())
    assert len(files(RunFolder(found).newest())) == 4


@pytest.mark.parametrize("settings_of_run", RUNS, ids=lambda s: "-".join(map(str, s.values())))
def test_stopped_and_resumed_is_the_same_bit_for_bit(begin, go_on, records, tmp_path, settings_of_run):
    begin(out=str(tmp_path / "whole"), **settings_of_run).run()
    trainer = begin(out=str(tmp_path / "parts"), **settings_of_run)
    for step in (3, 4):  # between two saves, and at one
        stop_after(trainer, step)
        trainer = go_on(tmp_path / "parts")
        assert trainer.state.step == step
    assert trainer.run().step == 8
    assert_same_run(tmp_path / "parts", tmp_path / "whole", records)


@pytest.mark.slow
def test_killed_anywhere_and_resumed_is_the_same(begin, go_on, records, spawn, wait_for, tmp_path):
    run = RunFolder(tmp_path / "run")
    process = spawn(steps=200, save_every=3, evaluate_every=5, keep=2)
    wait_for(process, run.checkpoints)
    target = run.metrics.stat().st_size + random.randrange(6_000)
    wait_for(process, lambda: run.metrics.stat().st_size > target)
    process.kill()
    process.communicate()
    killed_at = run.metrics.read_bytes().count(b'"learning_rate"')
    trainer = go_on(run.path)
    assert 3 <= trainer.state.step <= killed_at < 190
    stop_after(trainer, killed_at + 4)
    whole = begin(steps=200, save_every=200, evaluate_every=5, out=str(tmp_path / "whole"))
    stop_after(whole, killed_at + 4)
    assert_same_run(run.path, tmp_path / "whole", records)
    assert list(records(run.path)) == list(range(1, killed_at + 5))


def test_what_a_kill_between_logging_and_saving_leaves(begin, go_on, records, tmp_path):
    """Records of steps that were lost, the last line cut short, and a half-written checkpoint."""
    begin(out=str(tmp_path / "whole")).run()
    begin().run()
    run = RunFolder(tmp_path / "run")
    run.checkpoint(8).rename(run.path / ".step-00000008.partial")
    (run.path / ".step-00000008.partial" / "train.json").unlink()
    os.truncate(run.metrics, run.metrics.stat().st_size - 100)
    go_on(run.path).run()
    assert_same_run(run.path, tmp_path / "whole", records)
    assert list(run.path.glob(".*")) == []


def test_a_finished_run_goes_on_with_more_steps(begin, go_on, records, tmp_path):
    begin(recipe="bf16").run()
    before = files(tmp_path / "run" / "step-00000008")
    result = go_on(tmp_path / "run").run()
    assert (result.step, result.evaluation_loss, result.interrupted) == (8, None, None)
    assert files(tmp_path / "run" / "step-00000008") == before
    result = go_on(tmp_path / "run", "--steps", "10", "--keep=1").run()
    assert result.step == 10
    assert list(records(tmp_path / "run")) == list(range(1, 11))
    assert [folder.name for folder in RunFolder(tmp_path / "run").checkpoints()] == ["step-00000010"]
    assert go_on(tmp_path / "run").config.steps == 10  # what was changed is written down
    with pytest.raises(ConfigError, match="steps must be at least the 10 that the run .* has done; got 9"):
        go_on(tmp_path / "run", "--steps", "9")
    assert go_on(tmp_path / "run").config.steps == 10


def test_a_run_that_was_moved_goes_on_where_it_is(begin, go_on, tmp_path, monkeypatch):
    begin(recipe="bf16", steps=4).run()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    trainer = go_on(tmp_path / "elsewhere", "--steps", "5")
    trainer.run()
    assert (tmp_path / "elsewhere" / "step-00000005").is_dir()
    assert not (tmp_path / "run").exists()


def test_fp16_may_be_taken_up_from_another_precision_and_left_again(begin, go_on, tmp_path):
    begin(recipe="bf16", steps=4).run()
    assert go_on(tmp_path / "run", "--precision", "fp16", "--steps", "6").run().step == 6
    assert go_on(tmp_path / "run", "--precision", "bf16", "--steps", "8").run().step == 8


# --- What cannot be resumed


@pytest.fixture
def stopped(begin, tmp_path):
    begin(recipe="bf16", steps=4).run()
    return tmp_path / "run"


def refuses(folder, go_on, error, *essentials, overrides=()):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(error) as caught:
        go_on(folder, *overrides)
    for essential in essentials:
        assert str(essential) in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_garbage_settings_are_named(stopped, go_on, content):
    (stopped / "config.json").write_text(content)
    refuses(stopped, go_on, ArtifactError, stopped / "config.json")


def test_settings_of_another_version_are_named(stopped, go_on):
    settings = json.loads((stopped / "config.json").read_text())
    (stopped / "config.json").write_text(json.dumps(settings | {"recipee": "bf16"}))
    refuses(stopped, go_on, ConfigError, "recipee", "did you mean 'recipe'?")


def test_folder_that_is_no_run(tmp_path, go_on):
    refuses(tmp_path, go_on, ArtifactError, tmp_path, "no run")
    refuses(tmp_path / "nowhere", go_on, ArtifactError, tmp_path / "nowhere", "there is no folder")


def test_broken_checkpoint_changes_nothing_and_the_one_before_it_serves(begin, go_on, tmp_path):
    begin(recipe="bf16").run()
    run = RunFolder(tmp_path / "run")
    (run.checkpoint(8) / "model.safetensors").write_bytes(b"short")
    refuses(run.path, go_on, ArtifactError, run.checkpoint(8) / "model.safetensors", "Remove that folder")
    shutil.rmtree(run.checkpoint(8))
    assert go_on(run.path).state.step == 4


@pytest.mark.parametrize(
    ("overrides", "essentials"),
    [
        (["--width", "64"], ["model.safetensors", "another model"]),
        (["--recipe", "delayed"], ["state.safetensors", "another recipe"]),
        (["--out", "elsewhere"], ["elsewhere", "stays in its folder"]),
        (["--recipe", "row"], ["unknown recipe", "rowwise"]),
    ],
    ids=lambda value: value[0].strip("-") if value[0].startswith("--") else "",
)
def test_settings_that_the_checkpoint_does_not_fit(stopped, go_on, overrides, essentials):
    refuses(stopped, go_on, ValueError, *essentials, overrides=overrides)


def test_a_checkpoint_of_another_model_is_refused_before_memory_is_taken(stopped, go_on, monkeypatch):
    monkeypatch.setattr(nn.Module, "to", lambda *args: pytest.fail("the model is on its device"))
    monkeypatch.setattr(start, "make_trained_model", lambda *args: pytest.fail("the model is made"))
    refuses(stopped, go_on, ArtifactError, "another model", overrides=["--layers", "3"])
    (stopped / "step-00000004" / "optimizer.safetensors").write_bytes(b"short")
    refuses(stopped, go_on, ArtifactError, "optimizer.safetensors", "Remove that folder")


def test_data_that_changed(begin, go_on, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("a text to begin with, " * 50)
    begin(recipe="bf16", steps=4, data=(str(data),)).run()
    data.write_text("a text that was edited, " * 50)
    refuses(tmp_path / "run", go_on, ArtifactError, "the data is not what", "--data")
    data.unlink()
    refuses(tmp_path / "run", go_on, ValueError, data)


def test_full_disk_costs_no_settings(stopped, go_on):
    with files_of_at_most(100):
        refuses(stopped, go_on, OSError, "File too large")
    assert go_on(stopped).state.step == 4


# --- What cannot be started


def test_a_run_is_not_started_over_another(stopped, begin, tmp_path):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match=f"{stopped} is not empty: resume it with --resume {stopped}, or choose"):
        begin()
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("leftover", ["config.json", "model/config.json", "notes.txt"])
def test_a_run_killed_before_its_first_checkpoint_is_not_to_be_resumed(begin, tmp_path, leftover):
    path = tmp_path / "run" / leftover
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(FileExistsError, match="is not empty: it has no checkpoint: remove it, or choose another --out"):
        begin()
    assert path.read_text() == "{}"


def test_an_empty_folder_will_do(begin, tmp_path):
    (tmp_path / "run").mkdir()
    assert begin(recipe="bf16", steps=3).run().step == 3
    written = Config.from_dict(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert (written.steps, written.out) == (3, str(tmp_path / "run"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_gpu_that_is_not_there_is_refused(begin, tmp_path):
    with pytest.raises(ValueError, match=r"cuda:1.*sees no GPU: use cpu"):
        begin(device="cuda:1")
    assert list(tmp_path.iterdir()) == []
