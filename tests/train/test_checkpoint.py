"""A checkpoint is whole or not there, and fits or changes nothing."""

import json
import math
import re
import shutil
import threading
from concurrent import futures
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch
from full_disk import files_of_at_most
from packed_examples import small_shards
from patience import HANG
from ranks import run_ranks
from rich.console import Console
from safetensors.torch import load_file, save_file
from saved_checkpoints import contents, differing, everything, flip_bit, make_state, one_step, save_checkpoint, snapshot
from tiny_runs import before_steps
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import RunFolder, WriteError
from octavo.packing import pack
from octavo.train import saving as checkpoint
from octavo.train.finished import open_run
from octavo.train.saving import CheckpointWriter, SafetensorsWriter, load_checkpoint

FILES = ["model.safetensors", "optimizer.safetensors", "state.safetensors", "train.json"]
DESCRIBED = ["step", "skipped_steps", "fingerprint", "scaler"]


@pytest.fixture
def saved(begin):
    """A run of `delayed` after four steps, and its checkpoint."""
    trainer = begin(recipe="delayed")
    for _ in range(4):
        trainer.step()
    return trainer, save_checkpoint(trainer.run_folder, trainer.state, keep=3)


@pytest.mark.parametrize("most", [20_000, 280_000])
def test_full_disk_leaves_the_older_checkpoint_whole_and_nothing_partial(saved, most):
    trainer, folder = saved
    content = contents(folder)
    trainer.step()
    before = snapshot(trainer)
    if most == 280_000:
        trainer.state.fingerprint = "0" * 300_000  # train.json is now the largest file, and written last
    said = r"step-00000005.*File too large.*nothing that existed was changed"
    with files_of_at_most(most), pytest.raises(WriteError, match=said):
        save_checkpoint(trainer.run_folder, trainer.state, keep=1)
    assert trainer.run_folder.checkpoints() == [folder]
    assert contents(folder) == content
    assert list(trainer.run_folder.path.glob(".*")) == []
    assert differing(snapshot(trainer), before) == []
    save_checkpoint(trainer.run_folder, trainer.state, keep=1)  # there is space again
    assert trainer.run_folder.checkpoints() == [trainer.run_folder.checkpoint(5)]


# --- What cannot be loaded


@pytest.mark.parametrize("stem", ["model", "optimizer", "state"])
def test_a_flipped_bit_is_named_by_whoever_reads_it(saved, stem):
    trainer, folder = saved
    path = folder / f"{stem}.safetensors"
    name = flip_bit(path)
    for other in (False, True):
        with pytest.raises(ArtifactError, match=re.escape(f"{path} is damaged: the bytes of {name} have the CRC-32")):
            load_checkpoint(folder, trainer.state, other_recipe=other)


def refuses(trainer, folder, *essentials):
    before = snapshot(trainer)
    with pytest.raises(ArtifactError) as caught:
        load_checkpoint(folder, trainer.state)
    for essential in essentials:
        assert str(essential) in str(caught.value)
    assert differing(snapshot(trainer), before) == []


def edited(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def described(change):
    return edited("train.json", lambda content: json.dumps(change(json.loads(content))).encode())


def stored(name, change):
    return lambda folder: save_file(change(load_file(folder / name)), folder / name)


def cast(dtype):
    def change(tensors):
        name = next(name for name in tensors if "norm" in name and "step" not in name)
        return tensors | {name: tensors[name].to(dtype)}

    return change


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


TENSORS, RANDOM, MOMENT = FILES[:2], "random.cpu", "model.norm.weight.exp_avg"
NO_OBJECTS, ADVICE = (b"not json", b"[]", b"3", b"null", b"{}", b"\xff\xfe"), "start it again in another folder"
DAMAGES = [  # what is done to the folder, and what the error must contain
    *((lambda folder, name=name: (folder / name).unlink(), [name, "is missing", ADVICE]) for name in FILES),
    *((edited(name, lambda b, n=n: b[: n * len(b) // 10]), [name]) for name in FILES for n in (0, 1, 5, 9)),
    *((edited("train.json", lambda _, text=text: text), ["train.json"]) for text in NO_OBJECTS),
    *((described(lambda v, key=key: without(v, key)), ["train.json", key]) for key in DESCRIBED),
    *((described(lambda v, key=key: v | {key: None}), ["train.json", key]) for key in DESCRIBED),
    *((described(lambda v, n=n: v | {"step": n}), [f"is of step {n}, whose folder is step-{n:08d}"]) for n in (0, 30)),
    *(
        (stored(name, cast(dtype)), [name, "another model", f"must be torch.float32, the file has {dtype}"])
        for name in TENSORS
        for dtype in (torch.int32, torch.float8_e5m2, torch.int8)
    ),
    (stored(FILES[2], lambda tensors: without(tensors, RANDOM)), [FILES[2], RANDOM]),
    (stored(FILES[2], lambda tensors: tensors | {RANDOM: torch.zeros(3, dtype=torch.uint8)}), [FILES[2], RANDOM]),
    (stored(FILES[1], lambda tensors: without(tensors, MOMENT)), [FILES[1], MOMENT]),
]


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(saved):
    trainer, folder = saved
    trainer.step()
    whole = contents(folder)
    for damage, essentials in DAMAGES:
        damage(folder)
        refuses(trainer, folder, folder, *essentials)
        for name, content in whole.items():
            (folder / name).write_bytes(content)
    load_checkpoint(folder, trainer.state)


@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_one_number_that_is_not_finite(saved, file):
    trainer, folder = saved
    tensors = load_file(folder / f"{file}.safetensors")
    name = next(name for name in tensors if "down_proj" in name and "step" not in name)
    said = rf"{folder.name}: {name} holds inf or NaN: the run had diverged by th"
    for value in (math.inf, -math.inf, math.nan):
        tensors[name][-1, -1] = value
        save_file(tensors, folder / f"{file}.safetensors")
        for other in (False, True):
            with pytest.raises(ArtifactError, match=said):
                load_checkpoint(folder, trainer.state, other_recipe=other)


@pytest.mark.parametrize(
    ("other", "essentials"),
    [
        ({"width": 64}, ["model.safetensors", "another model", "must have shape [256, 64], the file has [256, 32]"]),
        ({"layers": 1}, ["model.safetensors", "another model", "model.layers.1."]),
        ({"layers": 3}, ["model.safetensors", "another model", "model.layers.2.", "missing"]),
        ({"tied": False}, ["model.safetensors", "lm_head.weight", "missing"]),
        ({"recipe": "rowwise"}, ["state.safetensors", "another recipe"]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_checkpoint_of_another_run(saved, begin, tmp_path, other, essentials):
    _, folder = saved
    trainer = begin(**({"recipe": "delayed", "out": str(tmp_path / "other")} | other))
    trainer.step()
    refuses(trainer, folder, folder, *essentials)


# --- What is loaded


def test_the_files_of_a_checkpoint_hold_the_unconverted_model(saved):
    """Runs that are resumed show that all of a state comes back."""
    _, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", *FILES]
    model = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in model.values()} == {torch.float32}
    assert not any("histor" in name or "lm_head" in name for name in model)  # the head is the embedding's


# ---- Checkpoints are written while training goes on, and a failure is told at the next step


@pytest.fixture
def held(monkeypatch):
    """An event that the writing of every checkpoint waits for."""
    event, write = threading.Event(), SafetensorsWriter.write_data

    def wait_and_write(*args):
        assert event.wait(HANG)
        return write(*args)

    monkeypatch.setattr(SafetensorsWriter, "write_data", wait_and_write)
    return event


def test_checkpoints_come_one_after_the_other_and_hold_the_state_of_their_call(tmp_path, held, monkeypatch):
    run, state = RunFolder(tmp_path), make_state(steps=2)
    required = everything(state)
    with CheckpointWriter(run, keep=3) as writer:
        writer.save(state)
        one_step(state)
        assert run.checkpoints() == []
        monkeypatch.setattr(writer, "wait", lambda: held.set() or CheckpointWriter.wait(writer))
        for _ in range(2):
            writer.save(state)
            assert run.checkpoint(state.step - 1) in run.checkpoints()
            one_step(state)
    assert run.checkpoints() == [run.checkpoint(step) for step in (2, 3, 4)]
    load_checkpoint(run.checkpoint(2), state)
    assert differing(everything(state), required) == []


def test_a_run_says_how_long_it_waits_for_the_disk(begin, capsys, monkeypatch):
    trainer, ticks = begin(recipe="bf16"), count()
    trainer.console = Console(width=200)
    monkeypatch.setattr("octavo.train.trainer.time.perf_counter", lambda: float(next(ticks)))
    trainer.run()
    assert capsys.readouterr().out.count("waited 1 s for the disk to take the checkpoint before: raise save_every") == 2


def test_a_run_learns_of_a_failed_write_before_the_next_save(begin):
    """Its error names the checkpoint, and the one before it is whole."""
    trainer = begin(recipe="bf16", steps=100, save_every=4, evaluate_every=100)
    with ExitStack() as limit:
        before_steps(trainer, lambda: trainer.state.step == 7 and limit.enter_context(files_of_at_most(20_000)))
        with pytest.raises(WriteError, match=r"step-00000008.*File too large"):
            trainer.run()
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
    assert len([load_file(path) for path in sorted(folder.glob("model-*"))]) > 2

    opened = open_run(trainer.run_folder.path).model
    weights = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in opened.named_parameters())
    other = begin(out=str(tmp_path / "other"), seed=1)
    load_checkpoint(folder, other.state)
    assert all(torch.equal(p, weights[name]) for name, p in other.model.named_parameters())
    pack(trainer.run_folder.path, tmp_path / "packed")
    assert (tmp_path / "packed" / "model.safetensors").is_file()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_waits_for_the_checkpoint_and_a_second_signal_does_not(tmp_path, held, monkeypatch, error):
    run, state = RunFolder(tmp_path), make_state(steps=1)
    writer = CheckpointWriter(run, keep=2)

    def save_and_fail():
        with writer:
            writer.save(state)
            monkeypatch.setattr(futures, "wait", lambda *given, wait=futures.wait: held.set() or wait(*given))
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
            one_step(state)
            writer.save(state)
    assert run.checkpoints() == [run.checkpoint(3)]
    monkeypatch.undo()
    with CheckpointWriter(run, keep=1):
        assert list(run.path.glob(".*")) == []


# --- Checkpoints of several ranks: the files of one process, loaded by any number of ranks, written by all or by none


def save(run, layout, step, seed):
    state = make_state(layout, recipe="bf16" if layout == "2d" else "delayed", steps=2)
    state.step = step
    torch.manual_seed(seed)
    save_checkpoint(run, state, keep=9)


def saved_by_four(rank, folder):
    """Save the same state as FSDP2 over 4 ranks, as 2 replicas of 2 shards, and with tensor parallel over 2."""
    for step, layout in enumerate(("fsdp", "hsdp", "2d")):
        save(RunFolder(Path(folder)), layout, step, rank)


def loaded_by_two(rank, folder):
    """For each checkpoint, what differs from the state of one process when 2 ranks have loaded it and a step later, and
    a number that each rank then draws, which had a seed of its own; also what differs when DCP's own reader reads."""
    run, results = RunFolder(Path(folder)), []
    for path in run.checkpoints():
        recipe = "bf16" if path == run.checkpoint(2) else "delayed"
        state, required = make_state("fsdp", recipe=recipe, steps=1), make_state("plain", recipe=recipe, steps=2)
        torch.manual_seed(rank)
        load_checkpoint(path, state)
        drawn, wrong = torch.rand(1).item(), differing(everything(state), everything(required))
        one_step(state)
        one_step(required)
        results.append((wrong + differing(everything(state), everything(required)), drawn))
    parameters = dict(make_state("fsdp").model.named_parameters())
    load(parameters, storage_reader=HuggingFaceStorageReader(str(run.checkpoint(0))))
    whole = {name: p.full_tensor().detach() for name, p in parameters.items()}
    results.append((differing(whole, dict(make_state("plain", steps=2).model.named_parameters())), None))
    return results


def test_files_do_not_depend_on_the_ranks_and_any_number_of_ranks_loads_them(tmp_path):
    run = RunFolder(tmp_path)
    run_ranks(4, saved_by_four, str(tmp_path))
    save(run, "plain", 3, 9)

    files = [contents(folder) for folder in run.checkpoints()]
    for found in files:
        assert found.keys() == files[-1].keys()
        assert all(found[name] == files[-1][name] for name in ("model.safetensors", "optimizer.safetensors"))
    states = [load_file(folder / "state.safetensors") for folder in run.checkpoints()]
    assert sum(name.startswith("random.") for name in states[0]) == 4
    of_four, of_one = ({n: t for n, t in states[step].items() if not n.startswith("random.")} for step in (0, 3))
    assert differing(of_four, of_one) == []

    required = make_state("plain", recipe="delayed", steps=2)
    for folder in (run.checkpoint(0), run.checkpoint(1), run.checkpoint(3)):
        state = make_state("plain", recipe="delayed")
        load_checkpoint(folder, state)
        assert differing(everything(state), everything(required)) == []

    first, second = run_ranks(2, loaded_by_two, str(tmp_path))
    assert [wrong for wrong, _ in first + second] == 10 * [[]]
    drawn = [[number for _, number in results if number is not None] for results in (first, second)]
    assert len(set(drawn[0] + drawn[1])) == 8  # each rank has random numbers of its own, and others at each step


def failures_of_two(rank, folder):
    """What each rank raises when one of them fails, and what is in the folder after it."""
    run, raised = RunFolder(Path(folder)), []
    state = make_state("fsdp", recipe="delayed", steps=1, width=500)
    save_checkpoint(run, state, keep=1)
    for refused in (0, 1):  # the rank whose disk is full: the coordinator, or the other
        state.step = 2
        with pytest.raises(WriteError) as caught, files_of_at_most(2_000 if rank == refused else 10**6):
            save_checkpoint(run, state, keep=1)
        raised.append(str(caught.value))
    before = everything(state)
    other = make_state("fsdp", recipe="delayed", steps=1, width=501)
    for model, damaged in ((other, None), (state, 1)):
        with pytest.MonkeyPatch.context() as patch:
            if rank == damaged:
                patch.setattr(checkpoint, "optimizer_state", lambda model, optimizer: {})
            with pytest.raises(ArtifactError) as caught:
                load_checkpoint(run.checkpoint(1), model)
        raised.append(str(caught.value))
    assert differing(everything(state), before) == []
    torch.manual_seed(rank)
    save_checkpoint(run, state, keep=1)  # there is space again
    drawn = torch.rand(1)
    load_checkpoint(run.checkpoint(2), state)
    assert torch.equal(torch.rand(1), drawn)
    with pytest.raises(WriteError) as caught:  # rank 1 cannot write in the folder of the run
        CheckpointWriter(RunFolder(Path("/dev/null/run")) if rank else run, keep=1)
    raised.append(str(caught.value))
    return raised, sorted(path.name for path in run.path.iterdir())


def test_a_failure_of_one_rank_is_the_same_failure_of_all_and_leaves_the_checkpoint_before(tmp_path):
    (first, folders), (second, _) = run_ranks(2, failures_of_two, str(tmp_path))
    assert first == second
    for message in first[:2]:
        assert "step-00000002: " in message
        assert "File too large" in message
        assert "nothing that existed was changed" in message
    assert "another model: up.weight must have shape [501, 9], the file has [500, 9]" in first[2]
    assert "has no place in the model" in first[3]
    assert "could not write /dev/null/run" in first[4]
    assert folders == ["step-00000002"]
