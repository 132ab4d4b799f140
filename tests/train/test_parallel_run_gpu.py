"""Runs on two GPUs under torchrun, against the run of one."""

import json

import pytest
import torch
from launch import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

SETTINGS = """
layers = 2
width = 256
heads = 4
kv_heads = 2
mlp_width = 512
context = 128
batch = 4
steps = 6
warmup = 2
evaluate_every = 6
evaluate_batches = 2
save_every = 3
log_every = 1
out = "run"
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory, text):
    """train(processes, *words): the records of a run, by step; a run that was made once is not made again."""
    made = {}

    def make(processes, *words):
        if (processes, *words) not in made:
            folder = tmp_path_factory.mktemp("run")
            (folder / "run.toml").write_text(SETTINGS)
            words_of_run = ("-m", "octavo", "train", "run.toml", "--data", str(text), *words)
            ended = torchrun(folder, *words_of_run, processes=processes)
            assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-8000:]
            lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
            made[(processes, *words)] = [json.loads(line) for line in lines], ended.stdout
        return made[(processes, *words)]

    return make


def losses(records):
    return [record["loss"] for record in records if "loss" in record]


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
def test_two_gpus_train_as_one(train, words):
    recipe = words[words.index("--recipe") : words.index("--recipe") + 2] if "--recipe" in words else ()
    one, _ = train(1, *recipe)
    two, out = train(2, *words)
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
    last = [record for record in two if "loss" in record][-1]
    assert last["tokens_per_second_per_gpu"] == pytest.approx(last["tokens_per_second"] / 2)
    if "H200" in torch.cuda.get_device_name() or "H100" in torch.cuda.get_device_name():
        assert 0 < last["mfu"] < 1
        assert "MFU" in out
    assert "14 weights in eight bits" in out


def test_parameters_and_moments_are_divided(train):
    """Of the peak of one GPU, two need less than three quarters: all is small here but the state."""
    wide = ("--width", "1024", "--mlp-width", "4096", "--heads", "8", "--layers", "8", "--context", "32")
    peaks = []
    for processes in (1, 2):
        records, _ = train(processes, *wide)
        peaks.append(max(record["peak_memory"] for record in records if "peak_memory" in record))
    assert peaks[1] < 0.75 * peaks[0]
