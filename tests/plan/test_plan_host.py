"""The host's time of a step, and settings with which a GPU waits less for it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from bench.gpu.plan import with_plan
from octavo.plan.cases import Case, TrainingPlan
from octavo.plan.step_time import HOP, NETWORK_HOP, Links, Training
from octavo.rates.measured import find_gpu

RESULTS = Path(__file__).parents[2] / "bench/results"


def plan(gpus: int = 2, **settings: Any) -> TrainingPlan:
    """Of 2,048 tokens a GPU, and so of little work for it."""
    return Case("llama-3.2-1b", {"context": 2048} | settings, gpus=gpus).training()


ROWS = [
    row
    for model in ("1b", "3b")
    for row in json.loads((RESULTS / f"gpu_plan_{model}.json").read_text())["rows"]
    if "host_seconds" in row
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['recipe']}-{row['checkpointing']}")
def test_the_measured_hosts_of_two_gpus(row: dict[str, Any]) -> None:
    """The call of `Trainer.step`, nothing waited for. The blocks of `1b` are gathered in pairs."""
    assert row["gpus"] == 2
    assert with_plan(row)["planned"]["host_seconds"] == pytest.approx(row["host_seconds"], rel=0.05)


@pytest.mark.parametrize(("mode", "ms"), [("bf16", 4.0), ("rowwise", 9.4)])
def test_the_measured_stack_of_four_blocks_on_one_gpu(mode: str, ms: float) -> None:
    """bench/log.md, on the host of an H100: without an optimizer."""
    one, two = (plan(1, recipe=mode, accumulate=n).time.host for n in (1, 2))
    assert 1e3 * (two - one) / 16 == pytest.approx(ms / 4, rel=0.15)


# ---- Masters on the host: the passes and AdamW, with the arithmetic written down here.


def hosted(**settings: float) -> dict[str, float]:
    """Seconds by part of a step of so few tokens that its copies take longer than its arithmetic."""
    few = {"recipe": "rowwise", "context": 128, "batch": 1, "optimizer.masters": "host"}
    return Case("llama-3.2-1b", few | settings).training().time.parts


def test_a_step_with_masters_on_the_host() -> None:
    """1,235,814,400 masters and as many gradients, of four bytes each at 47.6 GB/s, and AdamW at 16 x 270 million."""
    copied, adam = 0.103850, 0.286068
    alone = sum(hosted()[name] for name in ("linear_layers", "attention", "head", "memory"))
    assert 0 < alone < copied / 3
    for settings, passes, update in (
        ({}, 2 * copied, adam),
        ({"clip": 0.0}, 2 * copied, adam - copied),
        ({"accumulate": 4}, 2 * copied + 3 * (alone / 3 + 2 * copied), adam),
        ({"accumulate": 4, "clip": 0.0}, 2 * copied + 3 * (alone / 3 + 2 * copied), adam - 2 * copied),
    ):
        found = hosted(**settings)
        assert found["optimizer"] == pytest.approx(update, rel=1e-4)
        assert sum(found.values()) == pytest.approx(passes + update, rel=1e-4)


def test_the_rates_of_the_host_follow_from_the_measured_steps() -> None:
    """AdamW is what clipping adds to the passes. A later micro-batch moves eight bytes a parameter beside its backward
    pass, after a forward pass of 181 ms in BF16 and 129 ms in FP8, by the plan."""
    rows = json.loads((RESULTS / "gpu_offload.json").read_text())["rows"]
    adam, copies = [], []
    for row, forward in zip(rows, (0.181, 0.129), strict=True):
        passes = {kind: row[kind]["seconds"] - row[kind]["update_seconds"] for kind in ("clipped", "unclipped")}
        adam.append(row["clipped"]["seconds"] - passes["unclipped"])
        later = row["accumulated"]["seconds"] - row["accumulated"]["update_seconds"] - passes["clipped"]
        copies.append(later / 3 - forward)
    gpu, parameters = find_gpu("h200"), rows[0]["parameters"]
    assert parameters / mean(adam) == pytest.approx(gpu.host_adam, rel=0.01)
    assert 8 * parameters / mean(copies) == pytest.approx(gpu.host_copy, rel=0.01)


def test_a_setting_that_does_not_fit_is_not_named() -> None:
    """All of them take more memory here."""
    waiting = plan(batch=2, **{"activation_checkpointing.mode": "full"})
    small = replace(waiting.setup.gpu, memory=1.001 * waiting.memory.peak)
    full = replace(waiting, setup=replace(waiting.setup, gpu=small))
    assert full.fits
    assert full.time.parts["waiting"]
    assert full.faster_settings == {}


# ---- octavo/plan/step_time.py against steps that are simple enough to write down


TRAINING = Training(
    layers=4, block=0.3, rest=0.05, optimizer=0.08, gathered=8e9, reduced=16e9, root_gathered=2e9, root_reduced=4e9
)  # fmt: skip


def test_a_ring_moves_all_but_the_own_shard() -> None:
    links = Links(node=100e9, network=50e9)
    assert links.gather(8e9, 1) == 0
    assert links.gather(8e9, 2) == pytest.approx(0.04 + HOP)
    assert links.gather(8e9, 8) == pytest.approx(0.07 + 7 * HOP)
    assert links.gather(8e9, 16) == pytest.approx(8e9 * 15 / 16 / 50e9 + NETWORK_HOP + 14 * HOP)
    assert replace(links, network=math.inf).gather(8e9, 16) < links.gather(8e9, 16)
    assert links.reduce(1e9, 4) == pytest.approx(2 * 1e9 * 0.75 / (50e9 / 8) + 4 * NETWORK_HOP)


def test_one_gpu_communicates_nothing() -> None:
    assert TRAINING.step(Links(1.0), 1) == pytest.approx(4 * 0.3 + 0.05 + 0.08)


def test_hidden_communication_costs_its_ends_only() -> None:
    links = Links(100e9)  # a block is gathered in 0.04 s and reduced in 0.08 s: less than 0.1 and 0.2
    ends = 0.04 + 0.04 + 0.08 + 0.01 + 0.02
    assert TRAINING.step(links, 2) == pytest.approx(4 * 0.3 + 0.05 + 0.04 + ends, rel=1e-3)


def test_a_slow_network_sets_the_time_of_a_block() -> None:
    links = Links(10e9)  # gathered in 0.4 s and reduced in 0.8 s
    expected = 0.4 + 3 * 0.4 + 0.1 + 0.4 + 3 * 1.2 + 0.2 + 0.8 + 0.1 + 0.2 + 0.05 + 0.04
    assert TRAINING.step(links, 2) == pytest.approx(expected, rel=1e-3)
    half = replace(TRAINING, gathered=4e9)
    assert TRAINING.step(links, 2) - half.step(links, 2) == pytest.approx(0.2 + 3 * 0.2 + 0.2 + 3 * 0.2, rel=1e-3)


def test_groups_that_hold_all_weights_sum_their_gradients_too() -> None:
    links = Links(100e9, network=50e9)
    alone, grouped = TRAINING.step(links, 8), TRAINING.step(links, 32, shards=8)
    across = [links.reduce(size / 8, 4) for size in (TRAINING.reduced, TRAINING.root_reduced)]
    g, s = links.gather(8e9, 8), links.gather(16e9, 8) + across[0]
    blocks = 3 * (max(0.2, g + s) - max(0.2, g + s - across[0]))
    assert grouped - alone == pytest.approx(blocks + sum(across))
