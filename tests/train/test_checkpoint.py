"""A checkpoint is whole or not there, and fits or changes nothing."""

import json

import pytest
import torch
from full_disk import files_of_at_most
from safetensors.torch import load_file, save_file
from saved_checkpoints import save_checkpoint
from torch import nn

from octavo import scale_state
from octavo.artifact.atomic_folder import WriteError
from octavo.artifact.files import ArtifactError, model_tensors
from octavo.train.checkpoint import load_checkpoint
from octavo.train.optimizer import optimizer_state

FILES = ["model.safetensors", "optimizer.safetensors", "state.safetensors", "train.json"]


def everything(trainer):
    """All that a checkpoint restores, copied."""
    state = trainer.state
    tensors = model_tensors(state.model) | optimizer_state(state.model, state.optimizer) | scale_state(state.model)
    return {"random": torch.get_rng_state()} | {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_unchanged(trainer, before):
    after = everything(trainer)
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []


@pytest.fixture
def saved(begin):
    """A run of `delayed` after four steps, and its checkpoint."""
    trainer = begin(recipe="delayed")
    for _ in range(4):
        trainer.step()
    return trainer, save_checkpoint(trainer.run_folder, trainer.state, keep=3)


def test_checkpoint_holds_the_unconverted_model_in_float32(saved):
    _, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == FILES
    model = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in model.values()} == {torch.float32}
    assert not any("histor" in name or "lm_head" in name for name in model)  # the head is the embedding's
    assert json.loads((folder / "train.json").read_text())["step"] == 4


def test_newest_are_kept(begin):
    trainer = begin(recipe="bf16", steps=6, save_every=1, keep=2)
    trainer.run()
    run = trainer.run_folder
    assert run.checkpoints() == [run.checkpoint(5), run.checkpoint(6)]
    assert sorted(path.name for path in run.path.iterdir() if "step" in path.name) == ["step-00000005", "step-00000006"]


def test_full_disk_leaves_the_older_checkpoint_whole_and_nothing_partial(saved):
    trainer, folder = saved
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    trainer.step()
    before = everything(trainer)
    with files_of_at_most(20_000), pytest.raises(WriteError, match=r"step-00000005.*File too large") as caught:
        save_checkpoint(trainer.run_folder, trainer.state, keep=1)
    assert "nothing that existed was changed" in str(caught.value)
    assert trainer.run_folder.checkpoints() == [folder]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == content
    assert list(trainer.run_folder.path.glob(".*")) == []
    assert_unchanged(trainer, before)
    save_checkpoint(trainer.run_folder, trainer.state, keep=1)  # there is space again
    assert trainer.run_folder.checkpoints() == [trainer.run_folder.checkpoint(5)]


def test_disk_that_fills_in_the_last_file_is_no_different(saved, monkeypatch):
    trainer, folder = saved
    trainer.step()
    trainer.state.fingerprint = "0" * 300_000  # train.json is now the largest file, and written last
    with files_of_at_most(280_000), pytest.raises(WriteError, match="File too large"):
        save_checkpoint(trainer.run_folder, trainer.state, keep=1)
    assert trainer.run_folder.checkpoints() == [folder]
    assert list(trainer.run_folder.path.glob(".*")) == []


def test_leftovers_of_a_kill_are_ignored_and_cleared(saved):
    """Also those of a step that the resumed run will not save at."""
    trainer, folder = saved
    for step in (3, 7):
        leftover = trainer.run_folder.path / f".step-{step:08d}.partial"
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half")
    assert trainer.run_folder.newest() == folder
    trainer.step()
    save_checkpoint(trainer.run_folder, trainer.state, keep=3)
    assert sorted(path.name for path in trainer.run_folder.path.glob("*step*")) == ["step-00000004", "step-00000005"]
    assert list(trainer.run_folder.path.glob(".*")) == []


# --- What cannot be loaded


def refuses(trainer, folder, *essentials):
    """Loading `folder` raises an ArtifactError with these essentials, and changes nothing."""
    before = everything(trainer)
    with pytest.raises(ArtifactError) as caught:
        load_checkpoint(folder, trainer.state)
    for essential in essentials:
        assert str(essential) in str(caught.value)
    assert_unchanged(trainer, before)


@pytest.mark.parametrize("name", FILES)
def test_missing_file(saved, name):
    trainer, folder = saved
    (folder / name).unlink()
    trainer.step()
    refuses(trainer, folder, folder / name, "is missing", "Remove that folder to resume from the one before it")


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(saved, name):
    trainer, folder = saved
    content = (folder / name).read_bytes()
    trainer.step()
    for share in (0, 0.1, 0.5, 0.9):
        (folder / name).write_bytes(content[: int(len(content) * share)])
        refuses(trainer, folder, folder / name)


def test_description_that_is_none(saved):
    trainer, folder = saved
    path = folder / "train.json"
    described = json.loads(path.read_text())
    trainer.step()
    for content in (b"not json", b"[]", b"3", b"null", b"{}", b"\xff\xfe"):
        path.write_bytes(content)
        refuses(trainer, folder, path)
    for key in ("step", "skipped_steps", "fingerprint", "scaler"):
        for broken in ({name: value for name, value in described.items() if name != key}, described | {key: None}):
            path.write_text(json.dumps(broken))
            refuses(trainer, folder, path, key)


def test_random_state_that_is_none(saved):
    trainer, folder = saved
    path = folder / "state.safetensors"
    tensors = load_file(path)
    del tensors["random.cpu"]
    trainer.step()
    for random in ({}, {"random.cpu": torch.zeros(3, dtype=torch.uint8)}):
        save_file(tensors | random, path)
        refuses(trainer, folder, path, "random.cpu")


@pytest.mark.parametrize(
    ("other", "essentials"),
    [
        ({"width": 64}, ["model.safetensors", "another model", "must have shape [256, 64], the file has [256, 32]"]),
        ({"layers": 1}, ["model.safetensors", "another model", "model.layers.1."]),
        ({"layers": 3}, ["model.safetensors", "another model", "model.layers.2.", "missing"]),
        ({"model": "gpt2"}, ["model.safetensors", "another model"]),
        ({"tied": False}, ["model.safetensors", "lm_head.weight", "missing"]),
        ({"recipe": "rowwise"}, ["state.safetensors", "another recipe"]),
        ({"recipe": "bf16"}, ["state.safetensors", "another recipe"]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_checkpoint_of_another_run(saved, begin, tmp_path, other, essentials):
    _, folder = saved
    trainer = begin(**({"recipe": "delayed", "out": str(tmp_path / "other")} | other))
    trainer.step()
    refuses(trainer, folder, folder, *essentials)


def test_checkpoint_without_histories_is_of_another_recipe(begin, tmp_path):
    trainer = begin(recipe="rowwise")
    trainer.step()
    folder = save_checkpoint(trainer.run_folder, trainer.state, keep=3)
    refuses(begin(recipe="delayed", out=str(tmp_path / "delayed")), folder, "state.safetensors", "another recipe")


def test_other_data(saved, begin, tmp_path):
    _, folder = saved
    (tmp_path / "other.txt").write_text("another text altogether, " * 40)
    trainer = begin(recipe="delayed", data=(str(tmp_path / "other.txt"),), out=str(tmp_path / "other"))
    refuses(trainer, folder, folder, "the data", "--data")


def test_optimizer_of_another_model(saved):
    trainer, folder = saved
    moments = load_file(folder / "optimizer.safetensors")
    del moments["model.norm.weight.exp_avg"]
    save_file(moments, folder / "optimizer.safetensors")
    trainer.step()
    refuses(trainer, folder, folder / "optimizer.safetensors", "model.norm.weight.exp_avg")


# --- What is loaded


def test_loading_restores_everything(saved, begin, tmp_path):
    trainer, folder = saved
    before = everything(trainer)
    other = begin(recipe="delayed", out=str(tmp_path / "other"))
    torch.manual_seed(99)
    other.step()
    load_checkpoint(folder, other.state)
    assert_unchanged(other, before)
    assert (other.state.step, other.state.skipped_steps) == (4, 0)


def test_files_of_the_safetensors_library_are_loaded(saved, begin, tmp_path):
    """Former versions wrote checkpoints with it."""
    trainer, folder = saved
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        path.unlink()
        save_file(tensors, path)
    other = begin(recipe="delayed", out=str(tmp_path / "other"))
    before = everything(trainer)
    load_checkpoint(folder, other.state)
    assert_unchanged(other, before)


def test_a_run_that_has_made_no_step_is_saved_and_loaded(begin, tmp_path):
    trainer = begin(recipe="delayed")
    folder = save_checkpoint(trainer.run_folder, trainer.state, keep=3)
    other = begin(recipe="delayed", out=str(tmp_path / "other"))
    other.step()
    load_checkpoint(folder, other.state)
    for _ in range(2):
        trainer.step()
        other.step()
    assert_unchanged(other, everything(trainer))


def test_persistent_buffers_are_saved_and_others_are_not():
    model = nn.BatchNorm1d(3)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert list(model_tensors(model)) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
