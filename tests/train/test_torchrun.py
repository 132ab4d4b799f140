"""`torchrun ... -m octavo train`: a run to its end, a rank that fails, and who prints an error."""

import json
import os
import sys

import pytest
from launch import run_elastic, torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import octavo
from octavo.train import processes
from octavo.train.config import ConfigError
from octavo.train.loop import Trainer
from octavo_cli import main

SETTINGS = """
layers = 2
width = 32
heads = 2
context = 32
batch = 4
steps = 4
evaluate_batches = 2
save_every = 2
log_every = 2
sample = 4
device = "cpu"
out = "run"
"""


def fail_in_step_3(*words):
    """`octavo train words`, of which rank 1 fails."""
    step = Trainer.step

    def fail(trainer):
        if os.environ["RANK"] == "1" and trainer.state.step == 3:
            raise RuntimeError("the GPU of rank 1 fell off the bus")
        return step(trainer)

    Trainer.step = fail
    sys.argv = ["octavo", "train", *words]
    main()


@pytest.mark.slow
def test_two_processes_train_log_and_save(tmp_path, text, go_on):
    (tmp_path / "run.toml").write_text(SETTINGS)
    ended = torchrun(tmp_path, "-m", "octavo", "train", "run.toml", "--data", str(text))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith("ranks")] == ["ranks   2, dp_shard 2"]
    assert "FP8 all-gather: 14 weights in eight bits, 0 wide" in lines
    assert sum(line.startswith("step 4/4") for line in lines) == 1
    assert "a GPU)" in next(line for line in lines if line.startswith("step 4/4"))
    assert lines[-1] == "done: 4 steps in run"
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if "loss" in record]
    assert [record["step"] for record in logged] == [2, 4]
    for record in logged:
        assert record["tokens_per_second_per_gpu"] == pytest.approx(record["tokens_per_second"] / 2)
    # one process goes on where two ended
    trainer = go_on(tmp_path / "run", "--steps", "5", "--data", str(text))
    assert trainer.run().step == 5


@pytest.mark.slow
def test_ranks_find_the_packages_of_pythonpath_after_the_source_under_test(tmp_path, monkeypatch):
    for name in ("only_here.py", "octavo.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "script.py").write_text("import only_here, octavo; print(octavo.__file__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = torchrun(tmp_path / "ranks", "script.py", processes=1)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [octavo.__file__]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job_with_its_traceback(tmp_path, text):
    (tmp_path / "run.toml").write_text(SETTINGS)
    words = [str(tmp_path / "run.toml"), "--data", str(text), "--out", str(tmp_path / "run")]
    with pytest.raises(ChildFailedError):
        run_elastic(tmp_path / "logs", fail_in_step_3, *words)
    # Not the message of the agent, which may see rank 0 fail first: that one loses its peer.
    [error] = (tmp_path / "logs").rglob("1/error.json")
    callstack = json.loads(error.read_text())["message"]["extraInfo"]["py_callstack"]
    assert 'raise RuntimeError("the GPU of rank 1 fell off the bus")' in callstack
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000002"]


def test_an_error_that_its_message_explains_has_no_traceback(monkeypatch):
    def refuse():
        raise ConfigError("width must be even")

    monkeypatch.setattr(processes, "attempt_store", lambda: (None, 0, 1))
    monkeypatch.setattr(processes.dist, "init_process_group", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="width must be even") as refused:
        processes._join(refuse)
    assert "refuse" not in [entry.name for entry in refused.traceback]
    assert refused.value.__context__ is None


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_alone_says_what_is_wrong(monkeypatch, rank):
    def refuse(main):
        raise ConfigError("no")

    environment = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in (environment | {"TORCHELASTIC_RUN_ID": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "_join", refuse)
    with pytest.raises(ConfigError if rank == "0" else SystemExit):
        processes.run_in_group(lambda: None)


def test_an_environment_without_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK, .*start several processes with torchrun"):
        processes.run_in_group(lambda: None)
