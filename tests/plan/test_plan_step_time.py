"""Planned times against measured steps of bench/results, and against what must follow from the settings."""

import heapq
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from bench.gpu.plan import with_plan
from octavo.plan.cases import Case, TrainingPlan
from octavo.plan.model_shape import Block
from octavo.plan.setup import Setup, attention_seconds, gradient_bytes
from octavo.plan.step_time import GELU, HOP, LAYER_NORM, NETWORK_HOP, STACKED_GATE, Links, Pass, Training, block_passes
from octavo.rates.measured import MEASURED, MULTIPROCESSORS, find_gpu, grouped_seconds, product_seconds, slowdowns
from octavo.recipe import get_recipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
BF16, ROWWISE = get_recipe("bf16"), get_recipe("rowwise")
TABLE = json.loads((ROOT / "src/octavo/rates/h100.json").read_text())["grid"]


def test_the_rate_is_that_of_the_table_at_a_measured_shape():
    row = next(r for r in TABLE if r["recipe"] == "rowwise" and (r["M"], r["K"], r["N"]) == (8192, 4096, 32768))
    for recipe, ms in ((BF16, row["bf16_ms"]), (ROWWISE, row["fp8_ms"])):
        assert 1e3 * product_seconds(find_gpu("h100"), recipe, (8192, 4096, 32768)) == pytest.approx(ms)


# ---- Outputs that do not fill a GPU: against a simulation of its multiprocessors, and against kernels of bench/resu


@pytest.mark.parametrize("recipe", [BF16, ROWWISE])
def test_no_measured_layer_is_slowed(recipe):
    shapes = {(row["M"], row["K"], row["N"]) for row in TABLE}
    assert {slowdowns(recipe, shape) for shape in shapes} == {(1.0, 1.0, 1.0)}


def rounds(tiles: int) -> int:
    """How many tiles one after the other the busiest multiprocessor computes: each takes the next when it is free."""
    free = [0] * MULTIPROCESSORS
    for _ in range(tiles):
        heapq.heappush(free, heapq.heappop(free) + 1)
    return max(free)


@pytest.mark.parametrize(("k", "n"), [(1280, 3840), (1280, 5120), (3072, 5120), (2048, 3072), (1152, 4608)])
def test_tiles_that_multiprocessors_take_one_by_one(k, n):
    """dw of [N, K] in tiles of 128 x 128. A measured layer has 128 of 132 multiprocessors at work."""
    tiles = (n // 128) * (k // 128)
    y, _, dw = slowdowns(ROWWISE, (32768, k, n))
    assert dw == pytest.approx(rounds(tiles) * MEASURED / tiles)
    assert 1 <= y < 1.04  # thousands of tiles


def test_each_gemm_of_a_mixed_recipe_has_its_own_tiles():
    shape = (32896, 1280, 3840)
    mixed = get_recipe("rowwise_dw_bf16")
    assert slowdowns(mixed, shape) == (*slowdowns(ROWWISE, shape)[:2], slowdowns(BF16, shape)[2])
    assert slowdowns(ROWWISE, shape)[2] > 1.2 > slowdowns(BF16, shape)[2]


def test_kernels_of_a_profile():
    """Six blocks of ViT-H: those of dw [5120, 1280] and [1280, 5120], against dx of all layers, whose outputs have
    thousands of tiles. Their rate is 0.85 of it."""
    shape = json.loads((RESULTS / "gpu_vision.json").read_text())["shapes"]["ViT-H/14"]
    kernels = {name: (count, ms) for name, count, ms in shape["profiles"]["bf16"]["kernels"]}
    (dw_count, dw_ms), (_, dx_ms) = (
        next(found for name, found in kernels.items() if form in name)
        for form in ("128x256_64x4_4x2_h_bz_coopA_NTN", "320x128_64x3_1x2_h_bz_coopB_NNT")
    )
    assert dw_count == 2 * 6
    dx_columns = 1280 + 3 * 1280 + 2 * 5120  # N of o and qkv, and of up and down, each times K = 1280
    slower = (dw_ms / (2 * 5120)) / (dx_ms / dx_columns)
    assert slowdowns(BF16, (32896, 1280, 5120))[2] == pytest.approx(slower, rel=0.12)


# ---- Planned passes between the GEMMs against kernels of bench/results, and against what must follow from the model


def setup_of(model: str, recipe: str, **settings: Any) -> tuple[Setup, Block]:
    setup = Case(model, {"recipe": recipe} | settings, "h200").training().setup
    return setup, setup.model.blocks[0]


@pytest.mark.parametrize(
    ("backward", "at", "instructions", "form"),
    [
        (0, 2, GELU[0] * 5120, "triton_poi_fused_gelu_view"),
        (1, 2, GELU[1] * 5120, "triton_poi_fused_gelu_gelu_b"),
        # a power of two of columns, of which 1,280 are the row
        (0, 0, LAYER_NORM[0] * 2048, "triton_red_fused_native_layer_norm_0"),
    ],
)
def test_the_kernels_of_gelu_and_layer_norm_in_a_step(backward, at, instructions, form):
    """They were timed alone, and take longer in a step, in which the clock is lower."""
    shape = json.loads((RESULTS / "gpu_vision.json").read_text())["shapes"]["ViT-H/14"]
    setup, block = setup_of("vit-h-14", "bf16", **{"batch": 128, "optimizer.weights": "bf16"})
    found = block_passes(setup, block)[backward][at]
    assert found.instructions == instructions
    assert setup.tokens == shape["shape"]["batch"] * shape["shape"]["tokens"]
    ((_, count, ms),) = (row for row in shape["profiles"]["bf16"]["kernels"] if row[0].startswith(form))
    assert 0.85 < 1e3 * setup.tokens * found.seconds(setup.gpu) / (ms / count) < 1


def test_the_norms_of_queries_and_keys_read_them_again():
    """5,120 features. Inductor's kernels move two bytes of each more in the forward pass, and ten in the backward."""
    setup, block = setup_of("qwen3-8b", "bf16")
    plain = replace(block, attention=replace(block.attention, normed=0))
    moved = [[passes[-1].moved for passes in block_passes(setup, each)] for each in (block, plain)]
    assert [a - b for a, b in zip(*moved, strict=True)] == [2 * 5120, 10 * 5120]


def test_the_gradient_of_gate_and_up_as_one_tensor():
    row = json.loads((RESULTS / "gpu_moe.json").read_text())["mixtral"]
    ((_, _, measured),) = (each for each in row["kernels"]["bf16"] if "silu_backward" in each[0])
    setup, block = setup_of("mixtral-8x7b", "bf16", batch=1)
    gradient = block_passes(setup, block)[1][2]
    assert gradient.instructions == STACKED_GATE * 2 * 14336  # of two experts a token
    planned = 1e3 * row["shape"]["tokens"] * gradient.seconds(find_gpu("h200"))
    assert 0.75 < planned / measured < 1.1  # two runs under the power limit are 14 % apart
    assert planned > 1.3e3 * row["shape"]["tokens"] * Pass(gradient.moved).seconds(find_gpu("h200"))


# ---- Planned experts against the measured grouped GEMMs of bench/results, and what runs in FP8 of a mixture


@pytest.mark.parametrize("shape", ["mixtral", "small experts"])
@pytest.mark.parametrize(("recipe", "ways"), [("bf16", ["bf16"] * 3), ("rowwise", ["fast", "fast", "promoted"])])
def test_the_measured_rates_of_experts(shape, recipe, ways):
    """The products of a grouped layer take the time of its three GEMMs at the measured rates; FP8 has casts beside."""
    row = json.loads((RESULTS / "gpu_moe.json").read_text())[shape]
    found, sizes = row["gemm_tflops"], row["shape"]
    rows, k, n = sizes["tokens"] * sizes["top_k"] // sizes["experts"], sizes["width"], sizes["mlp_width"]
    rates = [1e12 * found[f"{gemm}, {way}"] for gemm, way in zip(("y", "dx", "dw"), ways, strict=True)]
    products = sum(2 * rows * k * n / rate for rate in rates)
    planned = grouped_seconds(find_gpu("h200"), get_recipe(recipe), (rows, k, n), 8) / 8
    casts = 5 * (rows * (k + n) + k * n) / find_gpu("h200").copy_rate if recipe == "rowwise" else 0.0
    assert planned - casts == pytest.approx(products, rel=1e-3)


# ---- Planned attention in FP8: where it runs, and its measured speed


def test_attention_computes_whole_tiles():
    """Of 7 FLOPs a pair and an element: two thirds of the keys of 256 tokens for 128 of them, and all if not causal."""
    gpu, causal = find_gpu("h100"), setup_of("llama-3.1-8b", "bf16")[1]
    every = replace(causal, attention=replace(causal.attention, causal=False))
    flops = 7 * 2 * 4096  # of a pair, with queries and outputs of 4,096 elements
    others = gradient_bytes(causal.attention) / gpu.copy_rate  # seconds a token
    for context, whole in ((256, 256), (257, 384), (100, 128)):
        pairs = sum(128 * (tile + 1) * 128 for tile in range(whole // 128))
        for block, computed in ((causal, pairs), (every, whole**2)):
            both, forward = attention_seconds(block, gpu, context, context)
            assert both == pytest.approx(flops * computed / gpu.attention_rate + context * others)
            assert forward == pytest.approx(flops * computed / gpu.attention_rate / 4)


def test_the_gradient_moves_the_bytes_that_were_profiled():
    """The kernels of cuDNN around the products in the stack's backward pass: 0.093, 0.074 and 2 x 0.031 ms a block."""
    kernels = json.loads((RESULTS / "gpu_stack.json").read_text())["profiles"]["bf16, compile"]["kernels"]
    around = sum(ms for name, _, ms in kernels if "cudnn::fusion" in name) / 4
    products = sum(ms for name, _, ms in kernels if "native_sdpa" in name) / 4
    gpu, block = find_gpu("h100"), setup_of("llama-3.1-8b", "bf16")[1]
    assert 1e3 * 8192 * gradient_bytes(block.attention) / gpu.copy_rate == pytest.approx(around, rel=0.1)
    assert 1e3 * attention_seconds(block, gpu, 8192, 8192)[0] == pytest.approx(products + around, rel=0.01)


# ---- The host's time of a step, and settings with which a GPU waits less for it


def plan(gpus: int = 2, **settings: Any) -> TrainingPlan:
    """Of 2,048 tokens a GPU, and so of little work for it."""
    return Case("llama-3.2-1b", {"context": 2048} | settings, gpus=gpus).training()


ROWS = [
    row
    for model in ("1b", "3b")
    for row in json.loads((RESULTS / f"gpu_plan_{model}.json").read_text())["rows"]
    if row["gpus"] == 2 and "host_seconds" in row
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['recipe']}-{row['checkpointing']}")
def test_the_measured_hosts_of_two_gpus(row: dict[str, Any]) -> None:
    """The call of `Trainer.step`, nothing waited for. The blocks of `1b` are gathered in pairs."""
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
    # one GPU communicates nothing
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
