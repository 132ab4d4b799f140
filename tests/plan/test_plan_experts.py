"""Planned experts against the measured grouped GEMMs of bench/results, and what runs in FP8 of a mixture."""

import json
from pathlib import Path

import pytest

from octavo.plan.cases import Case
from octavo.plan.hardware import find_gpu
from octavo.plan.memory import saved_bytes
from octavo.plan.rates import grouped_seconds, product_seconds
from octavo.plan.step_time import block_products
from octavo.recipe import get_recipe

RESULTS = Path(__file__).parents[2] / "bench/results"


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


def test_the_measured_layer_of_mixtrals_experts():
    row = json.loads((RESULTS / "gpu_moe.json").read_text())["mixtral"]
    for recipe, mode in (("bf16", "bf16"), ("rowwise", "ours")):
        plan = Case("mixtral-8x7b", ("--recipe", recipe, "--batch", "2"), gpus=1).training()
        setup, block = plan.setup, plan.setup.model.blocks[0]
        assert setup.tokens == row["shape"]["tokens"]
        layers = [each for each in block_products(setup, block) if each.count > 1]
        used = setup.recipe
        linear = sum(product_seconds(setup.gpu, used, each.shape, each.count) for each in layers)
        assert 1e3 * linear < row["ms"][mode]
        assert 1e3 * linear == pytest.approx(row["ms"][mode], rel=0.15)  # the layer also sorts, and computes SwiGLU


def test_few_rows_of_experts_take_the_time_of_reading_the_weights():
    gpu, recipe = find_gpu("h200"), get_recipe("bf16")
    few, one = (grouped_seconds(gpu, recipe, (rows, 4096, 14336), 8) for rows in (4, 1))
    assert few == one == 8 * 6 * 4096 * 14336 / gpu.copy_rate


def test_experts_stay_in_bf16_without_a_grouped_gemm_of_the_recipe():
    plans = {name: Case("mixtral-8x7b", ("--recipe", name)).training() for name in ("bf16", "tensorwise", "rowwise")}
    quantized = {
        name: {each.layer for each in block_products(plan.setup, plan.setup.model.blocks[0]) if each.quantized}
        for name, plan in plans.items()
    }
    assert quantized == {"bf16": set(), "tensorwise": {"qkv", "o"}, "rowwise": {"qkv", "o", "up", "down"}}


@pytest.mark.parametrize(("gpu", "layers"), [("b200", {"qkv", "o", "up", "down"}), ("mi300x", {"qkv", "o"})])
def test_experts_stay_in_bf16_without_a_grouped_gemm_of_the_gpu(gpu, layers):
    settings = ("--recipe", "rowwise", "--batch", "1")
    setup = Case("mixtral-8x7b", settings, gpu=gpu).training().setup
    block = setup.model.blocks[0]
    assert {each.layer for each in block_products(setup, block) if each.quantized} == layers
    in_fp8 = Case("mixtral-8x7b", settings).training().setup
    assert (saved_bytes(setup, block) > 1.5 * saved_bytes(in_fp8, block)) == (gpu == "mi300x")


def test_a_shared_mlp_is_computed_once_for_each_token():
    setup = Case("deepseek-v3", gpus=1).training().setup
    block = setup.model.blocks[1]
    shared = [each for each in block_products(setup, block) if each.layer in ("up", "down") and each.count == 1]
    assert [each.shape for each in shared] == [(4096, 7168, 2048), (4096, 7168, 2048), (4096, 2048, 7168)]
