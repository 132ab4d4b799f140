"""Checkpoints are written while training goes on, and a failure is told at the next step."""

import shutil
import threading

import pytest
import torch
from full_disk import files_of_at_most
from packed_examples import small_shards
from safetensors.torch import load_file
from saved_checkpoints import save_checkpoint
from sharded_states import differing, everything, make_state, take_step

from octavo.artifact.atomic_folder import WriteError
from octavo.artifact.dcp_writer import SafetensorsWriter
from octavo.artifact.run import RunFolder
from octavo.packing import pack
from octavo.train.checkpoint import load_checkpoint
from octavo.train.checkpoint_writer import CheckpointWriter
from octavo.train.finished import open_run


@pytest.fixture
def held(monkeypatch):
    """An event that the writing of every checkpoint waits for."""
    event, write = threading.Event(), SafetensorsWriter.write_data

    def wait_and_write(*args):
        assert event.wait(60)
        return write(*args)

    monkeypatch.setattr(SafetensorsWriter, "write_data", wait_and_write)
    return event


def test_the_state_that_is_written_is_that_of_the_call(tmp_path, held):
    run, state = RunFolder(tmp_path), make_state(steps=2)
    with CheckpointWriter(run, keep=1) as writer:
        required = everything(state)
        writer.save(state)
        for _ in range(3):
            take_step(state)
        assert run.checkpoints() == []
        held.set()
    load_checkpoint(run.checkpoint(2), state)
    assert differing(everything(state), required) == []


def test_checkpoints_come_one_after_the_other(tmp_path, held):
    run, state = RunFolder(tmp_path), make_state(steps=1)
    with CheckpointWriter(run, keep=2) as writer:
        writer.save(state)
        threading.Timer(0.2, held.set).start()
        for _ in range(3):
            take_step(state)
            writer.save(state)
            assert run.checkpoint(state.step - 1) in run.checkpoints()
    assert run.checkpoints() == [run.checkpoint(3), run.checkpoint(4)]


def test_a_run_learns_of_a_failed_write_before_the_next_save(begin):
    """Its error names the checkpoint, and the one before it is whole."""
    trainer = begin(recipe="bf16", steps=100, save_every=4, evaluate_every=100)
    step = trainer.step

    def limited():
        if trainer.state.step == 7:
            limit.__enter__()
        return step()

    trainer.step, limit = limited, files_of_at_most(20_000)
    with pytest.raises(WriteError, match=r"step-00000008.*File too large"):
        trainer.run()
    limit.__exit__(None, None, None)
    run = trainer.run_folder
    assert run.checkpoints() == [run.checkpoint(4)]
    assert list(run.path.glob(".step*")) == []
    assert 9 <= trainer.state.step < 100


def test_large_checkpoints_are_several_files_which_everything_opens(begin, tmp_path):
    trainer = begin()
    with small_shards(20_000):
        folder = save_checkpoint(trainer.run_folder, trainer.state, keep=1)
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors.index.json", "optimizer.safetensors.index.json"} <= names
    assert not {"model.safetensors", "optimizer.safetensors"} & names
    parts = [load_file(path) for path in sorted(folder.glob("model-*"))]
    assert len(parts) > 2

    opened = open_run(trainer.run_folder.path).model
    weights = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in opened.named_parameters())
    other = begin(out=str(tmp_path / "other"), seed=1)
    load_checkpoint(folder, other.state)
    assert all(torch.equal(p, weights[name]) for name, p in other.model.named_parameters())
    pack(trainer.run_folder.path, tmp_path / "packed")
    assert (tmp_path / "packed" / "model.safetensors").is_file()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_waits_for_the_checkpoint_and_a_second_signal_does_not(tmp_path, held, error):
    run, state = RunFolder(tmp_path), make_state(steps=1)
    writer = CheckpointWriter(run, keep=2)

    def save_and_fail():
        with writer:
            writer.save(state)
            if error is RuntimeError:
                threading.Timer(0.2, held.set).start()
            raise error

    with pytest.raises(error):
        save_and_fail()
    assert len(run.checkpoints()) == (error is RuntimeError)
    held.set()
    writer.wait()


def test_a_checkpoint_that_cannot_be_removed_wholly_is_not_there(tmp_path, monkeypatch):
    """As on NFS, where the file that somebody reads cannot be removed."""
    run, state = RunFolder(tmp_path), make_state(steps=1)
    with CheckpointWriter(run, keep=1) as writer:
        monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        for _ in range(2):
            take_step(state)
            writer.save(state)
    assert run.checkpoints() == [run.checkpoint(3)]
    monkeypatch.undo()
    with CheckpointWriter(run, keep=1):
        assert list(run.path.glob(".*")) == []
