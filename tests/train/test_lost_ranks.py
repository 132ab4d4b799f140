"""A rank that is killed costs the steps since the last checkpoint; a signal to one rank stops all of them."""

import json
import os
import signal
from pathlib import Path

import killed_train
import pytest
import torch
import torch.distributed as dist
from launch import run_elastic
from ranks import run_ranks
from rich.console import Console

from octavo.artifact.run import RunFolder
from octavo.train.config import Config
from octavo.train.ranks import _message_group, gather
from octavo.train.start import resume_run, start_run


def train_undisturbed(rank, settings):
    start_run(Config.from_dict(settings), Console(quiet=True)).run()


def continue_undisturbed(rank, folder):
    resume_run(Path(folder), ("--steps", "10"), Console(quiet=True)).run()


@pytest.mark.slow
def test_torchrun_resumes_a_run_of_which_a_rank_was_killed(settings, go_on, records, tmp_path):
    """Its losses are those of a run without a failure. One process then continues it like two."""
    of_run = {"recipe": "delayed", "save_every": 2, "keep": 2}
    words = [str(tmp_path / "config.json"), "--out", str(tmp_path / "run")]
    (tmp_path / "config.json").write_text(json.dumps(settings(**of_run).to_dict()))
    run_elastic(tmp_path / "logs", killed_train.train, *words, restarts=1)
    (log,) = (tmp_path / "logs").glob("*/attempt_1/0/stdout.log")
    assert f"resumed from {tmp_path}/run/step-00000004" in log.read_text()
    run = RunFolder(tmp_path / "run")
    assert run.checkpoints() == [run.checkpoint(6), run.checkpoint(8)]
    assert list(run.path.glob(".*")) == []

    run_ranks(2, train_undisturbed, settings(**of_run, out=str(tmp_path / "whole")).to_dict())
    for key in ("loss", "evaluation_loss", "gradient_norm", "largest_weight"):
        assert records(run.path, key) == records(tmp_path / "whole", key)
    for name in ("model.safetensors", "optimizer.safetensors", "state.safetensors"):
        assert (run.newest() / name).read_bytes() == (RunFolder(tmp_path / "whole").newest() / name).read_bytes()

    assert go_on(run.path, "--steps", "10").run().step == 10
    run_ranks(2, continue_undisturbed, str(tmp_path / "whole"))
    for step, loss in records(tmp_path / "whole").items():
        assert records(run.path)[step] == pytest.approx(loss, rel=1e-5)


def patience(rank):
    """Seconds that a rank waits for a message of another: rank 0 may tokenize for hours before it sends one."""
    assert gather(rank) == [0, 1]
    return _message_group(dist.group.WORLD)._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_ranks_wait_a_day_for_the_tokens_of_rank_0():
    assert run_ranks(2, patience) == [24 * 3600] * 2


def train_signalled(rank, settings):
    """The step at which a rank stops, when rank 1 gets SIGTERM in step 3."""
    trainer = start_run(Config.from_dict(settings), Console(quiet=True))
    step = trainer.step

    def stepped():
        result = step()
        if rank == 1 and trainer.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    trainer.step = stepped
    result = trainer.run()
    return result.step, result.interrupted


def test_a_signal_to_one_rank_stops_and_saves_all_at_the_same_step(settings, tmp_path):
    assert run_ranks(2, train_signalled, settings(recipe="bf16").to_dict()) == [(4, "SIGTERM")] * 2
    assert RunFolder(tmp_path / "run").newest() == tmp_path / "run" / "step-00000004"
