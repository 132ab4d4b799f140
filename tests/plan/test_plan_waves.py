"""Outputs that do not fill a GPU: against a simulation of its multiprocessors, and against kernels of bench/results."""

import heapq
import json
from pathlib import Path

import pytest

from octavo.plan.hardware import find_gpu
from octavo.plan.rates import forward_seconds, linear_seconds
from octavo.plan.waves import MEASURED, MULTIPROCESSORS, slowdowns
from octavo.recipe import get_recipe

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "src/octavo/nn/speedup/h100.json").read_text())["grid"]
BF16, ROWWISE = get_recipe("bf16"), get_recipe("rowwise")


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


def test_the_fastest_tile_is_chosen_and_few_tiles_share_their_sums():
    """[5120, 1280] is 200 tiles of 256 x 128 in two waves; [1280, 1280] fewer than a wave in each of the tiles."""
    assert slowdowns(BF16, (32768, 1280, 5120))[2] == 256 / 200
    assert slowdowns(BF16, (32768, 1280, 1280))[2] == 1.0


def test_each_gemm_of_a_mixed_recipe_has_its_own_tiles():
    shape = (32896, 1280, 3840)
    mixed = get_recipe("rowwise_dw_bf16")
    assert slowdowns(mixed, shape) == (*slowdowns(ROWWISE, shape)[:2], slowdowns(BF16, shape)[2])
    assert slowdowns(ROWWISE, shape)[2] > 1.2 > slowdowns(BF16, shape)[2]


def test_kernels_of_a_profile():
    """Six blocks of ViT-H: those of dw [5120, 1280] and [1280, 5120], against dx of all layers, whose outputs have
    thousands of tiles. Their rate is 0.85 of it."""
    shape = json.loads((ROOT / "bench/results/gpu_vision.json").read_text())["shapes"]["ViT-H/14"]
    kernels = {name: (count, ms) for name, count, ms in shape["profiles"]["bf16"]["kernels"]}
    (dw_count, dw_ms), (_, dx_ms) = (
        next(found for name, found in kernels.items() if form in name)
        for form in ("128x256_64x4_4x2_h_bz_coopA_NTN", "320x128_64x3_1x2_h_bz_coopB_NNT")
    )
    assert dw_count == 2 * 6
    dx_columns = 1280 + 3 * 1280 + 2 * 5120  # N of o and qkv, and of up and down, each times K = 1280
    slower = (dw_ms / (2 * 5120)) / (dx_ms / dx_columns)
    assert slowdowns(BF16, (32896, 1280, 5120))[2] == pytest.approx(slower, rel=0.12)


def test_the_forward_pass_has_no_part_of_the_slower_gradient():
    gpu, shape = find_gpu("h100"), (32768, 1280, 3840)
    assert forward_seconds(gpu, ROWWISE, shape, 1) < 0.95 * linear_seconds(gpu, ROWWISE, shape) / 3
