"""A run that is stopped, killed or moved, and taken up again, is the run that was not."""

import json
import os
import shutil
import signal

import pytest
import torch
from full_disk import files_of_at_most
from ranks import run_ranks
from rich.console import Console
from safetensors.torch import load_file
from saved_checkpoints import contents, differing, everything, make_state
from tiny_models import same_bytes, with_slow
from tiny_runs import after_steps, before_steps
from torch import nn

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import LockedError, RunFolder
from octavo.train import model as models
from octavo.train.config import Config, ConfigError
from octavo.train.saving import disturb_weights
from octavo.train.trainer import branch_settings, start_or_resume, start_run

RUNS = [
    {"recipe": "rowwise", "precision": "fp16"},
    {"recipe": "delayed", "model": "gpt2", "activation_checkpointing": {"mode": "full"}},
    {"recipe": "rowwise", "model": "gpt2", "dropout": 0.2, "bias": False},
    {"tokenizer": "characters", "sampling": "random", "loss": {"logits": "chunked", "chunk": 24}},
    {"width": 256, "layers": 1, "accumulate": 2, "optimizer": {"state": "fp8", "weights": "bf16"}},
    {"width": 256, "layers": 1, "accumulate": 2, "optimizer": {"state": "8bit"}},
    {"recipe": "tensorwise", "accumulate": 2},
    {"recipe": "bf16", "precision": "fp32", "schedule": "wsd", "tokenizer": "bpe", "vocabulary": 300},
    {"recipe": "rowwise", "model": "mixture", "mlp_width": 48, "experts": {"count": 4, "top_k": 2}},
]


def stop_after(trainer, step):
    after_steps(trainer, lambda: trainer.state.step == step and os.kill(os.getpid(), signal.SIGTERM))
    assert trainer.run().step == step


def assert_same_run(found, required, records):
    for key in ("loss", "evaluation_loss", "gradient_norm", "learning_rate", "largest_weight", "sample"):
        assert records(found, key) == records(required, key)
    assert contents(RunFolder(found).newest()) == contents(RunFolder(required).newest())
    assert len(contents(RunFolder(found).newest())) == 5


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("settings_of_run", with_slow(RUNS, RUNS[:5]), ids=lambda s: "-".join(map(str, s.values())))
def test_stopped_and_resumed_is_the_same_bit_for_bit(begin, go_on, records, tmp_path, settings_of_run):
    begin(out=str(tmp_path / "whole"), **settings_of_run).run()
    trainer = begin(out=str(tmp_path / "parts"), **settings_of_run)
    for step in (3, 4):  # between two saves, and at one
        stop_after(trainer, step)
        trainer = go_on(tmp_path / "parts")
        assert trainer.state.step == step
    assert trainer.run().step == 8
    assert_same_run(tmp_path / "parts", tmp_path / "whole", records)


def test_what_a_kill_between_logging_and_saving_leaves(begin, go_on, records, tmp_path):
    """Records of steps that were lost, the last line cut short, and a half-written checkpoint."""
    begin(out=str(tmp_path / "whole")).run()
    begin().run()
    run = RunFolder(tmp_path / "run")
    run.checkpoint(8).rename(run.path / ".step-00000008.partial")
    (run.path / ".step-00000008.partial" / "train.json").unlink()
    (run.path / ".step-00000008.lock").touch()
    os.truncate(run.metrics, run.metrics.stat().st_size - 100)
    go_on(run.path).run()
    assert_same_run(run.path, tmp_path / "whole", records)
    assert list(run.path.glob(".*")) == []


def test_a_finished_run_goes_on_with_more_steps(begin, go_on, records, tmp_path):
    begin(recipe="bf16").run()
    before = contents(tmp_path / "run" / "step-00000008")
    result = go_on(tmp_path / "run", "--seed", "3").run()
    assert (result.step, result.evaluation_loss, result.interrupted) == (8, None, None)
    assert go_on(tmp_path / "run").config.seed == 0  # that of its steps
    assert contents(tmp_path / "run" / "step-00000008") == before
    result = go_on(tmp_path / "run", "--steps", "10", "--keep=1").run()
    assert result.step == 10
    assert list(records(tmp_path / "run")) == list(range(1, 11))
    assert [folder.name for folder in RunFolder(tmp_path / "run").checkpoints()] == ["step-00000010"]
    assert go_on(tmp_path / "run").config.steps == 10  # what was changed is written down
    with pytest.raises(ConfigError, match="steps must be at least the 10 that the run .* has done; got 9"):
        go_on(tmp_path / "run", "--steps", "9")
    with pytest.raises(ConfigError, match=r"bf16_gemms .* requires a recipe with GEMMs in FP8; got recipe bf16"):
        go_on(tmp_path / "run", "--steps", "12", "--bf16-gemms", "dw")
    assert go_on(tmp_path / "run").config.steps == 10


def test_a_run_that_was_moved_goes_on_where_it_is_from_any_directory(begin, go_on, tmp_path, text, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(text.read_text())
    monkeypatch.chdir(tmp_path)
    begin(recipe="bf16", data=("texts", "texts/*.txt"), out="run", steps=4).run()
    data = [f"{tmp_path}/texts", f"{tmp_path}/texts/*.txt"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == data
    moved = shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    monkeypatch.chdir("/")
    trainer = go_on(moved, "--steps", "6")
    assert trainer.state.step == 4
    trainer.run()
    assert (moved / "step-00000006").is_dir()
    assert not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)
    assert go_on(moved, "--data", "texts").config.data == (data[0],)
    assert json.loads((moved / "config.json").read_text())["data"] == data[:1]


def test_fp16_may_be_taken_up_from_another_precision_and_left_again(begin, go_on, tmp_path):
    begin(recipe="bf16", steps=4).run()
    assert go_on(tmp_path / "run", "--precision", "fp16", "--steps", "6").run().step == 6
    assert go_on(tmp_path / "run", "--precision", "bf16", "--steps", "8").run().step == 8


# --- What cannot be resumed


def all_contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuses(folder, go_on, error, *essentials, overrides=()):
    before = all_contents(folder)
    with pytest.raises(error) as caught:
        go_on(folder, *overrides)
    for essential in essentials:
        assert str(essential) in str(caught.value)
    assert all_contents(folder) == before


def test_a_run_that_cannot_go_on_is_refused_and_stays_as_it_is(begin, go_on, tmp_path, monkeypatch):
    data, run = tmp_path / "data.txt", tmp_path / "run"
    data.write_text("a text to begin with, " * 50)
    begin(recipe="bf16", steps=4, data=(str(data),)).run()
    with files_of_at_most(100):
        refuses(run, go_on, OSError, "File too large")
    for *essentials, words in (
        ("state.safetensors", "another recipe; ", "step-00000004 --recipe NAME)", "--recipe delayed"),
        ("elsewhere", "stays in its folder", "--out elsewhere"),
        ("unknown recipe", "rowwise", "--recipe row"),
        ("tokenizer characters requires a new run; got one that began with 'bytes'", "--tokenizer characters"),
        ("disturb 0.1 requires a new run", "--disturb 0.1"),
    ):
        refuses(run, go_on, ValueError, *essentials, overrides=words.split())
    monkeypatch.setattr(nn.Module, "to", lambda *args: pytest.fail("the model is on its device"))
    monkeypatch.setattr(models, "make_trained_model", lambda *args: pytest.fail("the model is made"))
    refuses(run, go_on, ArtifactError, "another model", overrides=["--layers", "3"])
    settings = json.loads((run / "config.json").read_text())
    for path, text, error, *essentials in (
        *((run / "config.json", text, ArtifactError) for text in ("", "{", "[1]", '"text"')),
        (run / "config.json", json.dumps(settings | {"recipee": "bf16"}), ConfigError, "did you mean 'recipe'?"),
        (run / "step-00000004" / "model.safetensors", "short", ArtifactError, "start it again in another folder"),
        (run / "step-00000004" / "optimizer.safetensors", "short", ArtifactError, "start it again in another folder"),
        (data, "a text that was edited, " * 50, ArtifactError, "the data is not what", "pass the same --data"),
    ):
        whole = path.read_bytes()
        path.write_text(text)
        refuses(run, go_on, error, *(essentials or [path]))
        path.write_bytes(whole)
    data.unlink()
    refuses(run, go_on, ValueError, data, "give its place by --data")


# --- What cannot be started


@pytest.mark.parametrize("leftover", ["config.json", "model/config.json", "notes.txt"])
def test_a_run_killed_before_its_first_checkpoint_is_not_to_be_resumed(begin, again, tmp_path, leftover):
    path = tmp_path / "run" / leftover
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    for start_anew in (begin, again) if leftover == "notes.txt" else (begin,):
        with pytest.raises(FileExistsError, match="is not empty: it has no checkpoint, so choose another --out"):
            start_anew()
    assert path.read_text() == "{}"


def test_an_empty_folder_will_do_a_file_not_and_a_start_that_fails_gives_the_folder_back(begin, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "a file").write_text("mine")
    with pytest.raises(FileExistsError, match="a file is a file: --out must name the folder"):
        begin(out=str(tmp_path / "a file"))
    assert (tmp_path / "a file").read_text() == "mine"
    with pytest.raises(ConfigError, match="a local folder with a config.json, got './nowhere'"):
        begin(model="./nowhere")
    assert begin(recipe="bf16", steps=3).run().step == 3
    written = Config.from_dict(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert (written.steps, written.out) == (3, str(tmp_path / "run"))


# --- A job that is started again with the same command continues its run


@pytest.fixture
def again(settings):
    """again(**overrides): the `Trainer` of a job that is started with these settings, for the first time or again."""
    return lambda **overrides: start_or_resume(settings(**overrides), Console(quiet=True))


def test_a_run_is_begun_and_then_continued_with_its_settings_alone(again, tmp_path, text, monkeypatch):
    assert again(recipe="bf16", steps=4, warmup=0).run().step == 4
    monkeypatch.chdir(text.parent)
    assert again(recipe="bf16", steps=4, warmup=0, data=(text.name,)).state.step == 4  # the same path in other words
    with pytest.raises(ConfigError, match="settings: seed is 0 there, and 1 here. Continue that run with --resume"):
        again(recipe="bf16", steps=4, warmup=0, seed=1)
    assert RunFolder(tmp_path / "run").checkpoints() == [tmp_path / "run" / "step-00000004"]


def test_what_was_left_before_the_first_checkpoint_is_begun_anew(again, begin, records, tmp_path):
    begin(recipe="bf16", steps=2, warmup=0).lock.close()
    notes = tmp_path / "run" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(FileExistsError, match=r"has no checkpoint, and notes\.txt is not of a run: move it"):
        again(recipe="bf16", steps=2, warmup=0)
    notes.unlink()
    trainer = again(recipe="bf16", steps=2, warmup=0)
    assert trainer.state.step == 0
    trainer.run()
    assert list(records(trainer.run_folder.path)) == [1, 2]


# --- A run's folder belongs to one program: a second one is refused at once and the first one finishes unharmed


def test_a_second_start_and_a_resume_of_a_live_run_are_refused(begin, go_on, records, tmp_path):
    trainer = begin(recipe="bf16")

    (tmp_path / "link").symlink_to("run")

    def disturb():
        with pytest.raises(LockedError, match=f"{tmp_path}/run is in use: process"):
            begin(recipe="bf16")
        for name in ("run", "link") if trainer.state.step > 4 else ():
            with pytest.raises(LockedError, match="is in use"):
                go_on(tmp_path / name)

    before_steps(trainer, disturb)
    assert trainer.run().step == 8
    assert list(records(tmp_path / "run")) == list(range(1, 9))
    assert not list(tmp_path.glob(".*"))
    first = go_on(tmp_path / "run", "--steps", "10")
    with pytest.raises(LockedError):
        go_on(tmp_path / "run", "--steps", "12")
    assert first.run().step == 10


# ---- octavo train --branch: a run of its own from a checkpoint of another


@pytest.fixture
def trunk(begin):
    trainer = begin(recipe="bf16")
    trainer.run()
    return trainer.run_folder


@pytest.fixture
def branch(trunk, tmp_path):
    """branch(*overrides): the `Trainer` of a branch of the trunk at step 4."""

    def make(*overrides):
        checkpoint = str(trunk.checkpoint(4))
        settings = branch_settings(trunk.checkpoint(4), ["--branch", checkpoint, *overrides])
        return start_run(settings, Console(quiet=True))

    return make


def test_a_branch_without_a_change_goes_on_as_its_trunk_did_and_resumes(branch, trunk, go_on, tmp_path, records):
    branch("--out", str(tmp_path / "branch")).run()
    for key in ("loss", "evaluation_loss", "gradient_norm", "learning_rate"):
        whole, own = records(trunk.path, key), records(tmp_path / "branch", key)
        assert own == {step: value for step, value in whole.items() if step > 4}
    assert same_bytes(trunk.newest(), RunFolder(tmp_path / "branch").newest())
    trainer = go_on(tmp_path / "branch", "--steps", "9", "--batch", "4")
    assert trainer.state.step == 8
    trainer.run()
    assert records(tmp_path / "branch", "tokens") == {5: 320, 6: 384, 7: 448, 8: 512, 9: 640}


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_branch_in_another_recipe_starts_with_the_state_of_the_trunk(branch, trunk, records, tmp_path, recipe):
    trainer = branch("--out", str(tmp_path / "branch"), "--recipe", recipe)
    assert trainer.state.step == 4
    assert trainer.config.recipe == recipe
    saved = load_file(trunk.checkpoint(4) / "model.safetensors")
    moments = load_file(trunk.checkpoint(4) / "optimizer.safetensors")
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, saved[name])
        assert torch.equal(trainer.state.optimizer.state[p]["exp_avg"], moments[f"{name}.exp_avg"])
    trainer.run()
    assert list(records(tmp_path / "branch", "learning_rate")) == [5, 6, 7, 8]


def test_a_twin_has_weights_disturbed_once_by_the_given_share(branch, trunk, tmp_path):
    saved = load_file(trunk.checkpoint(4) / "model.safetensors")
    twins = [branch("--out", str(tmp_path / str(i)), "--disturb", "0.002", "--seed", str(i)) for i in (0, 1)]
    named = [twin.model.named_parameters() for twin in twins]
    ratios = [torch.cat([(p.detach() / saved[name] - 1).flatten() for name, p in each]) for each in named]
    for ratio in ratios:
        ratio = ratio[ratio.isfinite()]
        assert 0.0019 < float(ratio.std()) < 0.0021
        assert abs(float(ratio.mean())) < 1e-4
    assert not torch.equal(*ratios)
    twins[0].run()
    newest = twins[0].run_folder.newest()
    assert branch_settings(newest, ["--branch", str(newest)]).disturb == 0  # the branch of a twin is no twin


def disturbed_by_two(rank):
    """The weights that differ from a disturbed model of one process, where FSDP2 divides the model over 2 ranks."""
    states = [make_state(layout) for layout in ("fsdp", "plain")]
    for state in states:
        disturb_weights(state.model, 0.01, seed=3)
    found, required = map(everything, states)
    assert differing(required, everything(make_state("plain")))
    return differing(found, required)


@pytest.mark.slow
def test_the_twin_is_the_same_on_any_number_of_ranks():
    assert run_ranks(2, disturbed_by_two) == [[], []]


def test_branches_that_cannot_be_are_refused(branch, trunk, tmp_path):
    before, run = all_contents(trunk.path), trunk.path
    with pytest.raises(FileExistsError, match=f"{run} is not empty: resume it with --resume {run}, or choose another"):
        branch()  # in the trunk's folder
    assert all_contents(run) == before
    with pytest.raises(ConfigError, match="steps must be above the 4 of .*step-00000004; got 4"):
        branch("--out", str(tmp_path / "short"), "--steps", "4")
    assert not (tmp_path / "short").exists()
    with pytest.raises(ArtifactError, match="has no checkpoint step-00000005: it keeps step-00000004, step-00000008"):
        branch_settings(trunk.checkpoint(5), [])
    with pytest.raises(ArtifactError, match="run has no checkpoint run: it keeps step-00000004, step-00000008"):
        branch_settings(trunk.path, [])
    with pytest.raises(ArtifactError, match="give the folder that octavo train wrote"):
        branch_settings(tmp_path / "nothing/step-00000001", [])
    with pytest.raises(ArtifactError, match="is of another model"):
        branch("--out", str(tmp_path / "wide"), "--width", "64")
