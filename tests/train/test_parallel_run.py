"""Runs of several processes: against one process, under torchrun, with lost ranks, and offloaded."""

import json
import math
import os
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import run_elastic, torchrun
from patience import HANG
from ranks import run_ranks
from rich.console import Console
from saved_checkpoints import whole
from tiny_runs import TINY, after_steps, tiny
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.tensor import DTensor

from octavo.checkpoint.files import model_tensors
from octavo.checkpoint.folder import RunFolder
from octavo.train import processes
from octavo.train.config import Config, ConfigError, OptimizerSettings, Parallel
from octavo.train.model import parallelize
from octavo.train.optimizer import optimizer_state
from octavo.train.processes import Degrees, agree_on_name, check_parallel, find_degrees, gather, mean_of_ranks
from octavo.train.saving import SafetensorsWriter
from octavo.train.trainer import Trainer, resume_run, start_run
from octavo_cli import main

THREE = TINY | {"steps": 3, "warmup": 1, "clip": 0}


def train(rank, folder, text, settings):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    config = Config.from_dict(tiny(THREE, {"data": [text], "out": f"{folder}/run"} | settings))
    trainer = start_run(config, Console(quiet=True))
    with trainer.lock:
        initial = arrays(trainer.model)
        losses = [float(mean_of_ranks(trainer.step()[0])) for _ in range(3)]
        return initial, losses, arrays(trainer.model), trainer.evaluate()


def arrays(model):
    return {name: whole(t.float()).numpy() for name, t in model_tensors(model).items()}


TWO = {"batch": 4, "evaluate_batches": 1}  # a batch of two ranks holds two of one process


def same(actual, expected):
    """The losses and weights are equal bit for bit, and the mean over other batches is within rounding."""
    assert actual[1] == expected[1]
    for index in (0, 2):
        for name, weight in expected[index].items():
            np.testing.assert_array_equal(actual[index][name], weight, name)
    np.testing.assert_allclose(actual[3], expected[3], rtol=1e-6)


RECOMPUTED = {"activation_checkpointing": {"mode": "selective"}, "layers": 1, "recipe": "delayed"}
COMPILED = {"compile": {"blocks": True, "backend": "aot_eager"}}


@pytest.mark.parametrize(
    ("settings", "of_two"),
    [
        ({}, {}),
        ({"model": "qwen2", "tokenizer": "bytes"}, {}),
        pytest.param(RECOMPUTED, COMPILED, marks=pytest.mark.slow),
    ],
    ids=["plain", "hugging face", "compiled blocks that recompute"],
)
def test_two_ranks_train_as_one(tmp_path, text, made, settings, of_two):
    settings = settings | {name: str(made(model)) for name, model in settings.items() if name == "model"}
    one = train(0, tmp_path / "one", str(text), settings | {"accumulate": 2})
    for rank in run_ranks(2, train, tmp_path / "two", str(text), settings | of_two | TWO):
        same(rank, one)


def gathered_in_bf16(rank, folder, text):
    """The losses, the dtypes of the norm that the last block computes with and of the masters, and exchanges a step."""
    config = THREE | TWO | {"data": [text], "out": f"{folder}/run", "parallel": {"gather_dtype": "bf16"}}
    trainer = start_run(Config.from_dict(config), Console(quiet=True))
    dtypes = []
    trainer.model.model.norm.register_forward_pre_hook(lambda module, args: dtypes.append(module.weight.dtype))
    with mock.patch("torch.distributed.all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        losses = [float(mean_of_ranks(trainer.step()[0])) for _ in range(3)]
    masters = {str(p.dtype) for p in trainer.model.parameters()}
    return losses, str(dtypes[-1]), masters, exchange.call_count / 3


def test_other_weights_are_gathered_in_bf16_on_request(tmp_path, text):
    losses = train(0, tmp_path / "one", str(text), {"accumulate": 2})[1]
    found, dtype, masters, exchanges = run_ranks(2, gathered_in_bf16, tmp_path / "two", str(text))[0]
    assert (dtype, masters) == ("torch.bfloat16", {"torch.float32"})
    assert exchanges == 2  # of BF16 gradients: those of two blocks, which are one unit, and of the model
    assert found != losses
    np.testing.assert_allclose(found, losses, rtol=1e-2)


def refusals(rank, folder, text):
    """The messages of runs that must not start, and the seconds that a rank waits for a message of another."""
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").touch()
    wrong = {
        "async": {"parallel": {"tp": 2, "async_tp": True}, "kv_heads": 2},
        "settings": {"learning_rate": 1e-2 + rank * 1e-3},
        "folder": {"out": str(folder / "taken")},
        "data": {"data": [str(folder / "absent.txt")]},
    }
    messages = {"ranks": gather(rank)}
    # rank 0 may tokenize for hours before it sends a message
    group = processes._message_group(dist.group.WORLD)._get_backend(torch.device("cpu"))
    messages["patience"] = group.options._timeout.total_seconds()
    for name, settings in wrong.items():
        config = Config.from_dict(tiny(THREE, {"data": [text], "out": f"{folder}/run"} | settings))
        try:
            start_run(config, Console(quiet=True))
        except (ValueError, OSError) as error:
            messages[name] = (type(error).__name__, str(error))
    return messages


def test_a_run_that_cannot_start_is_refused_on_every_rank_with_one_message(tmp_path, text):
    first, second = run_ranks(2, refusals, tmp_path, str(text))
    assert first == second
    assert (first["ranks"], first["patience"]) == ([0, 1], 24 * 3600)
    assert "parallel.async_tp True requires GPUs" in first["async"][1]
    assert "learning_rate is 0.01 on rank 0 and 0.011 on rank 1" in first["settings"][1]
    assert first["folder"][0] == "FileExistsError"
    assert "absent.txt" in first["data"][1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_that_share_layers_and_replicas_train_as_one_within_rounding(tmp_path, text):
    settings = {"kv_heads": 2, "clip": 1}
    mesh = {"parallel": {"tp": 2, "dp_replicate": 2, "dp_shard": 1}}
    initial, losses, weights, evaluation = train(0, tmp_path / "one", str(text), settings)
    four = run_ranks(4, train, tmp_path / "four", str(text), settings | mesh)
    assert all(rank[1] == four[0][1] for rank in four)
    for name, expected in initial.items():
        np.testing.assert_array_equal(four[0][0][name], expected, name)
    np.testing.assert_allclose(four[0][1], losses, rtol=1e-3)
    np.testing.assert_allclose(four[0][3], evaluation, rtol=1e-3)


def test_a_model_that_cannot_be_cut():
    mesh: Any = mock.create_autospec(DeviceMesh, instance=True, ndim=1)
    mesh.size.return_value = 2
    with pytest.raises(ConfigError, match="set parallel.tp back to 1.*knows the modules of Llama.*got Identity"):
        parallelize(torch.nn.Identity(), Config(), {"tp": mesh}, fp8=False)


def test_minus_one_is_what_is_left():
    assert find_degrees(Parallel(), 1) == Degrees(1, 1, 1)
    assert find_degrees(Parallel(), 8) == Degrees(1, 8, 1)
    assert find_degrees(Parallel(tp=2), 8) == Degrees(1, 4, 2)
    assert find_degrees(Parallel(dp_shard=2, dp_replicate=-1, tp=2), 12) == Degrees(3, 2, 2)
    assert find_degrees(Parallel(dp_shard=2, tp=-1), 2) == Degrees(1, 2, 1)


@pytest.mark.parametrize(
    ("processes", "parallel", "settings", "message"),
    [
        (3, {"tp": 2}, {}, "number of processes, 3; .*dp_shard 1 x tp 2, which is 2"),
        (1, {"dp_shard": 4}, {}, "number of processes, 1; .*dp_shard 4.*start 4 processes"),
        (2, {"dp_replicate": -1}, {}, "dp_replicate and dp_shard: set all but one"),
        (4, {"tp": 4}, {"heads": 8, "kv_heads": 2}, "tp 4 requires a kv_heads that is a multiple .*got kv_heads 2"),
        (4, {"tp": 4}, {"heads": 6, "width": 384, "kv_heads": 2}, "heads 6"),
        (4, {"tp": 4}, {"heads": 8, "kv_heads": 4, "mlp_width": 70}, "mlp_width 70"),
        (3, {}, {}, "batch 4 requires a multiple of 3.*dp_shard 3: give --batch 6"),
        (2, {}, {"precision": "fp16"}, "fp16 requires one process"),
        (2, {}, {"optimizer": OptimizerSettings(masters="host")}, "optimizer.masters host requires one process; got 2"),
        (2, {}, {"model": "./folder", "lora": 4}, "lora 4 requires one process.*got 2"),
    ],
)
def test_degrees_and_sizes_that_do_not_divide(processes, parallel, settings, message):
    config = Config(parallel=Parallel(**parallel), **settings)
    with pytest.raises(ConfigError, match=message):
        check_parallel(config, find_degrees(config.parallel, processes), torch.device("cpu"))


# ---- `torchrun ... -m octavo train`: a run to its end, a rank that fails, and who prints an error


SETTINGS = json.dumps(TINY | {"batch": 4, "steps": 4, "save_every": 2, "log_every": 2, "sample": 4, "out": "run"})


step = Trainer.step


def fail_in_step_3(*words):
    def fail(trainer):
        if os.environ["RANK"] == "1" and trainer.state.step == 3:
            raise RuntimeError("the GPU of rank 1 fell off the bus")
        return step(trainer)

    Trainer.step = fail
    sys.argv = ["octavo", "train", *words]
    main()


@pytest.mark.slow
def test_two_processes_train_log_and_save(tmp_path, text, go_on, records):
    (tmp_path / "run.json").write_text(SETTINGS)
    ended = torchrun(tmp_path, "-m", "octavo", "train", "run.json", "--data", str(text))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith("ranks")] == ["ranks   2, dp_shard 2"]
    assert "FP8 all-gather: 14 weights in eight bits, 0 wide" in lines
    assert sum(line.startswith("step 4/4") for line in lines) == 1
    assert "a GPU)" in next(line for line in lines if line.startswith("step 4/4"))
    assert lines[-1] == "done: 4 steps in run"
    speeds, shares = (records(tmp_path / "run", f"tokens_per_second{of}") for of in ("", "_per_gpu"))
    assert list(records(tmp_path / "run")) == list(speeds) == [2, 4]
    assert shares == pytest.approx({step: speed / 2 for step, speed in speeds.items()})
    # one process goes on where two ended
    assert go_on(tmp_path / "run", "--steps", "5", "--data", str(text)).run().step == 5


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job_with_its_traceback(tmp_path, text):
    (tmp_path / "run.json").write_text(SETTINGS)
    words = [str(tmp_path / "run.json"), "--data", str(text), "--out", str(tmp_path / "run")]
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

    monkeypatch.setattr(processes, "attempt_store", lambda: (dist.HashStore(), 0, 1))
    monkeypatch.setattr(processes.dist, "init_process_group", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="width must be even") as refused:
        processes._join(refuse)
    assert "refuse" not in [entry.name for entry in refused.traceback]
    assert refused.value.__context__ is None


@pytest.mark.parametrize("error", [dist.DistBackendError("timed out"), RuntimeError("[gloo/transport/tcp] closed")])
def test_a_rank_that_has_lost_another_says_so(monkeypatch, error):
    monkeypatch.setattr(processes, "attempt_store", lambda: (dist.HashStore(), 0, 2))
    monkeypatch.setattr(processes.dist, "init_process_group", mock.Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="rank 0 has lost another rank.*parallel.timeout"):
        processes._join(lambda: None)


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


@pytest.mark.parametrize("number", ["x", "", "0", "-1", "2.0", "2"])
def test_an_environment_without_torchrun_is_refused(monkeypatch, number):
    monkeypatch.setenv("WORLD_SIZE", number)
    monkeypatch.delenv("RANK", raising=False)
    wrong = f"WORLD_SIZE must be a number of processes, got '{number}': start"
    with pytest.raises(ConfigError, match=wrong if number != "2" else "RANK, .*start several processes with torchrun"):
        processes.run_in_group(lambda: None)


# ---- A rank that is killed costs the steps since the last checkpoint; a signal to one rank stops all of them


def continue_undisturbed(rank, folder):
    resume_run(Path(folder), ("--steps", "10"), Console(quiet=True)).run()


writing = threading.Event()
write_data = SafetensorsWriter.write_data


def write_forever(writer, plan, planner):
    if writer.target.name == "step-00000006":
        writing.set()
        threading.Event().wait(HANG)
    return write_data(writer, plan, planner)


def step_and_die(trainer):
    result = step(trainer)
    if trainer.state.step == 7 and writing.wait(HANG):
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def train_and_die(*words):
    """Rank 1 is killed in the first attempt: in step 7, while the checkpoint of step 6 is being written."""
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        SafetensorsWriter.write_data, Trainer.step = write_forever, step_and_die
    sys.argv = ["octavo", "train", *words]
    main()


@pytest.mark.slow
def test_torchrun_resumes_a_run_of_which_a_rank_was_killed(settings, go_on, records, tmp_path):
    """Its losses are those of a run without a failure. One process then continues it like two."""
    of_run = {"recipe": "delayed", "save_every": 2, "keep": 2}
    words = [str(tmp_path / "config.json"), "--out", str(tmp_path / "run")]
    (tmp_path / "config.json").write_text(json.dumps(settings(**of_run).to_dict()))
    run_elastic(tmp_path / "logs", train_and_die, *words, restarts=1)
    (log,) = (tmp_path / "logs").glob("*/attempt_1/0/stdout.log")
    assert f"resumed from {tmp_path}/run/step-00000004" in log.read_text()
    run = RunFolder(tmp_path / "run")
    assert run.checkpoints() == [run.checkpoint(6), run.checkpoint(8)]
    assert list(run.path.glob(".*")) == []

    run_ranks(2, train_signalled, settings(**of_run, out=str(tmp_path / "whole")).to_dict(), None)
    for key in ("loss", "evaluation_loss", "gradient_norm", "largest_weight"):
        assert records(run.path, key) == records(tmp_path / "whole", key)
    for name in ("model.safetensors", "optimizer.safetensors", "state.safetensors"):
        assert (run.newest() / name).read_bytes() == (RunFolder(tmp_path / "whole").newest() / name).read_bytes()

    assert go_on(run.path, "--steps", "10").run().step == 10
    run_ranks(2, continue_undisturbed, str(tmp_path / "whole"))
    for step, loss in records(tmp_path / "whole").items():
        assert records(run.path)[step] == pytest.approx(loss, rel=1e-5)


def train_signalled(rank, settings, signalled):
    """The step at which a rank stops, when one of them, or none, gets SIGTERM in step 3."""
    trainer = start_run(Config.from_dict(settings), Console(quiet=True))
    after_steps(trainer, lambda: rank == signalled and trainer.state.step == 3 and os.kill(os.getpid(), signal.SIGTERM))
    result = trainer.run()
    return result.step, result.interrupted


def test_a_signal_to_one_rank_stops_and_saves_all_at_the_same_step(settings, tmp_path):
    assert run_ranks(2, train_signalled, settings(recipe="bf16").to_dict(), 1) == [(4, "SIGTERM")] * 2
    assert RunFolder(tmp_path / "run").newest() == tmp_path / "run" / "step-00000004"


# --- Processes of one attempt find each other, and never those of an attempt before


def attempt(store, ranks, lost=()):
    """The names that the ranks of an attempt agree on; `lost` ranks never come.

    For rank 0 no time passes until the other ranks are done; its patience ends in the turn after that.
    """
    others = []
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def sleep(_):
        clock.now = math.inf if lost and all(call.done() for call in others) else 0.0

    with ThreadPoolExecutor(ranks) as threads, pytest.MonkeyPatch.context() as patch:
        clock.sleep = sleep
        patch.setattr(processes, "time", clock)
        others += [threads.submit(agree_on_name, store, rank, ranks) for rank in range(1, ranks) if rank not in lost]
        first = [threads.submit(agree_on_name, store, 0, ranks)] if 0 not in lost else []
        return [call.result() for call in first + others]


def test_each_attempt_has_a_name_of_its_own_in_the_same_store():
    store = dist.HashStore()
    first = attempt(store, 4)
    assert len(set(first)) == 1
    with pytest.raises(dist.DistStoreError, match=r"ranks \[2\] have not come"):
        attempt(store, 4, lost={2})
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError):  # rank 0 is lost: the others have no answer
        attempt(store, 3, lost={0})
    store.set_timeout(timedelta(seconds=HANG))
    second, fewer = attempt(store, 4), attempt(store, 2)
    assert len({*first, *second, *fewer}) == 3


# ---- Weights and moments in the CPU's memory. On a CPU nothing moves, and the numbers must be those of a run withou


@pytest.mark.parametrize("option", ["--optimizer.offload", "--no-optimizer.offload"])
def test_one_process_trains_the_same_bit_for_bit_and_goes_on_with_or_without(begin, go_on, records, tmp_path, option):
    begin(out=str(tmp_path / "plain")).run()
    begin(out=str(tmp_path / "moved"), steps=4, decay_steps=8, optimizer={"offload": True}).run()
    trainer = go_on(tmp_path / "moved", "--steps", "8", option)
    divided = [isinstance(p, DTensor) for p in trainer.model.parameters()]
    assert set(divided) == {option == "--optimizer.offload"}
    trainer.run()
    assert records(tmp_path / "moved") == records(tmp_path / "plain")
    assert not dist.is_initialized()


def sharded_run(rank, folder, text, tiny):
    """The first weights, the first loss and the dtypes and devices of BF16 weights and their state on two ranks."""
    with torch.compiler.set_stance("force_eager"):
        trainer = start_run(Config.from_dict(tiny | {"data": [text], "out": folder}), Console(quiet=True))
        weights = arrays(trainer.model)
        loss = float(trainer.step()[0].detach())
        tensors = [*trainer.model.parameters(), *optimizer_state(trainer.model, trainer.state.optimizer).values()]
        trainer.lock.close()
    return weights, loss, {str(t.dtype) for t in tensors}, {str(t.device) for t in tensors}


def test_bf16_weights_of_two_ranks_begin_as_those_of_one(begin, settings, tmp_path, text):
    pytest.importorskip("torchao")
    chosen = {"batch": 4, "accumulate": 2, "optimizer": {"weights": "bf16", "offload": True}}
    trainer = begin(out=str(tmp_path / "one"), **chosen | {"optimizer": {"weights": "bf16"}})
    expected = arrays(trainer.model)
    with torch.compiler.set_stance("force_eager"):
        loss = float(trainer.step()[0])
    by_rank = run_ranks(2, sharded_run, str(tmp_path / "two"), str(text), settings(**chosen).to_dict())
    for weights, _, dtypes, devices in by_rank:
        assert dtypes == {"torch.bfloat16", "torch.float32"}
        assert devices == {"cpu"}
        for name, array in expected.items():
            np.testing.assert_array_equal(weights[name], array, name)
    assert sum(found for _, found, *_ in by_rank) / 2 == pytest.approx(loss, rel=1e-5)
