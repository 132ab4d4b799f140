"""Runs on two GPUs under torchrun, against the run of one."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from launch import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

SETTINGS = {
    "layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "mlp_width": 512, "context": 128, "batch": 4, "steps": 6,
    "warmup": 2, "evaluate_every": 6, "evaluate_batches": 2, "save_every": 3, "log_every": 1,
}  # fmt: skip


@pytest.fixture
def train(tmp_path, text):
    """train(processes, *words): the records of a run under torchrun, and its output."""

    def make(processes, *words):
        folder = tmp_path / f"{processes}"
        folder.mkdir()
        settings = SETTINGS | {"out": "run", "data": [str(text)]}
        (folder / "run.toml").write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items()))
        ended = torchrun(folder, "-m", "octavo", "train", "run.toml", *words, processes=processes)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-8000:]
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], ended.stdout

    return make


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--compile.blocks", "--activation-checkpointing.mode", "selective"),
        ("--compile.blocks", "--parallel.tp", "2"),
        ("--parallel.dp-replicate", "2", "--recipe", "delayed"),
    ],
    ids=["fsdp", "compiled", "tp", "hsdp delayed"],
)
def test_two_gpus_train_as_one(train, begin, records, tmp_path, words):
    recipe = {"recipe": "delayed"} if "delayed" in words else {}
    begin(**SETTINGS, **recipe, device="cuda", learning_rate=None, min_learning_rate=None).run()
    one = records(tmp_path / "run")
    lines, out = train(2, *words)
    two = {line["step"]: line for line in lines if "loss" in line}
    assert {step: line["loss"] for step, line in two.items()} == pytest.approx(one, rel=2e-2)
    last = two[SETTINGS["steps"]]
    assert last["tokens_per_second_per_gpu"] == pytest.approx(last["tokens_per_second"] / 2)
    if "H200" in torch.cuda.get_device_name() or "H100" in torch.cuda.get_device_name():
        assert 0 < last["mfu"] < 1
        assert "MFU" in out
    assert "14 weights in eight bits" in out


def test_parameters_and_moments_are_divided(train):
    """Of the peak of one GPU, two need less than three quarters: all is small here but the state."""
    wide = ("--width", "1024", "--mlp-width", "4096", "--heads", "8", "--layers", "8", "--context", "32")

    def peak(processes):
        records, _ = train(processes, *wide)
        return max(record["peak_memory"] for record in records if "peak_memory" in record)

    with ThreadPoolExecutor() as pool:
        one, two = pool.map(peak, (1, 2))
    assert two < 0.75 * one
