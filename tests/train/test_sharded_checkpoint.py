"""Checkpoints of several ranks: the files of one process, loaded by any number of ranks, written by all or by none."""

from pathlib import Path

import pytest
import torch
from full_disk import files_of_at_most
from ranks import run_ranks
from safetensors.torch import load_file
from saved_checkpoints import save_checkpoint
from sharded_states import differing, everything, make_state, take_step
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from octavo.artifact.atomic_folder import WriteError
from octavo.artifact.files import ArtifactError
from octavo.artifact.run import RunFolder
from octavo.train import checkpoint
from octavo.train.checkpoint import load_checkpoint
from octavo.train.ranks import Agreement


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
        take_step(state)
        take_step(required)
        results.append((wrong + differing(everything(state), everything(required)), drawn))
    parameters = dict(make_state("fsdp").model.named_parameters())
    load(parameters, storage_reader=HuggingFaceStorageReader(str(run.checkpoint(0))))
    whole = {name: p.full_tensor().detach() for name, p in parameters.items()}
    results.append((differing(whole, dict(make_state("plain", steps=2).model.named_parameters())), None))
    return results


def test_files_do_not_depend_on_the_ranks_and_any_number_of_ranks_loads_them(tmp_path):
    """4 ranks to 2 and to 1, and 1 to 2."""
    run = RunFolder(tmp_path)
    run_ranks(4, saved_by_four, str(tmp_path))
    save(run, "plain", 3, 9)

    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in run.checkpoints()]
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
    assert folders == ["step-00000002"]


def agreed_by_two(rank):
    agreement = Agreement()
    return [list(agreement.reach(signal, 0)) for signal in ((0, 15, 0), (0, 0, 2))[rank]]


def test_ranks_agree_on_a_signal_one_step_later():
    assert run_ranks(2, agreed_by_two) == [[[0, 0], [0, 0], [15, 0]]] * 2
    assert list(Agreement().reach(15, 0)) == [15, 0]
