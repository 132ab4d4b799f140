"""Planned times against measured steps of bench/results, and against what must follow from the settings."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.plan.architecture import Architecture
from octavo.plan.attention import attention_seconds, gradient_bytes
from octavo.plan.cases import Case
from octavo.plan.hardware import find_gpu
from octavo.plan.models import find_architecture
from octavo.plan.passes import passes_seconds
from octavo.plan.rates import layer_speedup, linear_seconds
from octavo.plan.setup import make_setup
from octavo.plan.step_time import StepTime, block_products, plan_step
from octavo.plan.training import TrainingPlan
from octavo.recipe import get_recipe
from octavo.train.config import Config

RESULTS = Path(__file__).parents[2] / "bench/results"


def layer_stack(*, fused: bool) -> Architecture:
    """The four blocks of bench/gpu/stack.py, without embedding and head."""
    llama = find_architecture("llama-3-8b", Config())
    blocks = (replace(llama.blocks[0], count=4),)
    return replace(llama, blocks=blocks, vocabulary=0, head=0, embeddings=0, others=0, fused=fused)


@pytest.mark.parametrize(
    ("mode", "recipe", "fused"),
    [
        ("bf16, compile", "bf16", False),
        ("ours fused: rowwise, compile", "rowwise", True),
        ("ours plain: tensorwise, compile", "tensorwise", False),
        ("ours plain: rowwise_dw_bf16, compile", "rowwise_dw_bf16", False),
        ("ours plain: blockwise, compile", "blockwise", False),
    ],
)
def test_the_measured_stack_of_layers(mode, recipe, fused):
    rows = json.loads((RESULTS / "gpu_stack.json").read_text())["modes"]
    measured = next(row["median"] for row in rows if row["mode"] == mode)
    config = Config(recipe=recipe).change(
        batch=1, context=8192, **{"compile.blocks": True, "optimizer.weights": "bf16"}
    )
    time = plan_step(make_setup(layer_stack(fused=fused), config, find_gpu("h100"), 1), 0.0)
    assert 1e3 * (time.total - time.optimizer) == pytest.approx(measured, rel=0.1)


def step(*settings: str, gpus: int = 1, gpu: str = "h100", network: float = 400.0) -> StepTime:
    return Case("llama-3-8b", settings, gpu, gpus, network).training().time


def test_micro_batches_repeat_all_but_the_optimizer():
    one, four = step(), step("--accumulate", "4")
    assert four.linear_layers == 4 * one.linear_layers
    assert four.optimizer == one.optimizer


def forward_seconds(plan: TrainingPlan, layers: tuple[str, ...]) -> float:
    """Seconds of the forward GEMMs of these layers, in all blocks."""
    setup, block = plan.setup, plan.setup.model.blocks[0]
    products = [each for each in block_products(setup, block) if each.layer in layers]
    return block.count * sum(linear_seconds(setup.gpu, setup.recipe, each.shape) for each in products) / 3


@pytest.mark.parametrize(
    ("mode", "layers", "attention"), [("full", ("qkv", "o", "up"), True), ("selective", ("o",), False)]
)
def test_checkpointing_computes_what_is_not_saved_again(mode, layers, attention):
    """All GEMMs, or every second one, but the last, whose output no gradient reads."""
    plan = Case("llama-3-8b", ("--activation-checkpointing.mode", mode), "h100").training()
    time, block = plan.time, plan.setup.model.blocks[0]
    traffic = block.count * plan.setup.tokens * passes_seconds(plan.setup, block)[1]
    _, attention_forward = attention_seconds(block, plan.setup.gpu, plan.setup.tokens, plan.setup.config.context)
    expected = forward_seconds(plan, layers) + attention * block.count * attention_forward + traffic
    assert time.recomputation == pytest.approx(expected)
    assert traffic < 0.45 * time.memory
    assert step().recomputation == 0


def test_eager_converted_layers_compute_their_outputs_again_too():
    settings = ("--activation-checkpointing.mode", "full")
    compiled, eager = step(*settings), step(*settings, "--no-compile.blocks")
    assert eager.recomputation > 1.1 * compiled.recomputation


def test_gathers_are_not_copied_again_for_the_recomputation():
    one, two = (step("--activation-checkpointing.mode", "full", "--batch", str(n), gpus=n) for n in (1, 2))
    assert two.memory > 1.1 * one.memory
    assert two.recomputation == pytest.approx(one.recomputation)


def test_attention_grows_with_the_square_of_the_context():
    """And with a tile more for each token. The bytes that the backward pass moves beside it grow with the context."""
    plans = {n: Case("llama-3-8b", ("--context", str(n), "--batch", "1"), "h200").training() for n in (8192, 2048)}
    block, gpu = plans[8192].setup.model.blocks[0], find_gpu("h200")
    a_token = block.count * gradient_bytes(block.attention) / gpu.copy_rate
    long, short = (plan.time.attention - tokens * a_token for tokens, plan in plans.items())
    assert long == pytest.approx(16 * short * (1 + 128 / 8192) / (1 + 128 / 2048))


def test_one_gpu_communicates_nothing_and_a_slow_network_costs_most():
    assert step().communication == 0
    fast, slow = (step(gpus=64, network=gbit).communication for gbit in (3200, 25))
    assert 0 < fast < slow


def test_gathering_in_eight_bits_is_faster_on_a_slow_network():
    narrow, wide = (step(*option, gpus=64, network=100) for option in ((), ("--no-parallel.fp8-all-gather",)))
    assert narrow.total < 0.9 * wide.total


def test_offloading_pays_with_the_links_and_the_cpu():
    here, there = step(), step("--optimizer.offload")
    assert there.optimizer > 10 * here.optimizer
    assert there.communication > 0


def test_tensor_parallelism_divides_the_work():
    alone, four = step("--batch", "1"), step("--batch", "1", "--parallel.tp", "4", gpus=4)
    assert four.linear_layers == pytest.approx(alone.linear_layers / 4, rel=0.2)
    assert four.attention == pytest.approx(alone.attention / 4)
    assert four.communication > 0


def test_the_rate_is_that_of_the_table_at_a_measured_shape():
    table = json.loads((RESULTS.parents[1] / "src/octavo/nn/speedup/h100.json").read_text())["grid"]
    row = next(r for r in table if r["recipe"] == "rowwise" and (r["M"], r["K"], r["N"]) == (8192, 4096, 32768))
    gpu, bf16, rowwise, shape = find_gpu("h100"), get_recipe("bf16"), get_recipe("rowwise"), (8192, 4096, 32768)
    assert 1e3 * linear_seconds(gpu, bf16, shape) == pytest.approx(row["bf16_ms"])
    assert 1e3 * linear_seconds(gpu, rowwise, shape) == pytest.approx(row["fp8_ms"])
    assert layer_speedup(gpu, rowwise, shape) == pytest.approx(row["bf16_ms"] / row["fp8_ms"])


def test_no_bf16_layer_is_faster_than_the_power_allows_in_a_long_run():
    """Small layers were measured for milliseconds, before the clock is lowered; the largest for a third of a second."""
    gpu, bf16, size = find_gpu("h100"), get_recipe("bf16"), 32768
    largest = linear_seconds(gpu, bf16, (size, size, size)) / size**3
    assert largest == pytest.approx(6 / 687e12, rel=1e-3)
    for shape in ((8192, 4096, 4096), (32768, 1024, 1024), (8192, 2048, 8192)):
        m, k, n = shape
        assert linear_seconds(gpu, bf16, shape) / (m * k * n) == pytest.approx(largest)
    assert linear_seconds(gpu, bf16, (512, 1024, 1024)) / (512 * 1024**2) > 1.5 * largest


def test_the_time_of_smaller_layers_than_measured_is_extrapolated():
    gpu, rowwise = find_gpu("h100"), get_recipe("rowwise")
    half, least, double = (linear_seconds(gpu, rowwise, (32768, k, 4096)) for k in (512, 1024, 2048))
    assert half == pytest.approx(least - (double - least) / 2)
    assert half > least / 2  # a lower rate
    narrow, corner = (linear_seconds(gpu, rowwise, (32768, 512, n)) for n in (1024, 512))
    assert narrow / 2 < corner < narrow


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("size", [1, 64, 512])
def test_the_rate_of_smaller_layers_than_measured_is_no_higher(recipe, size):
    gpu, used = find_gpu("h100"), get_recipe(recipe)
    least = linear_seconds(gpu, used, (8192, 1024, 1024))
    assert linear_seconds(gpu, used, (8192, size, 1024)) >= least * size / 1024 * (1 - 1e-9)
    assert linear_seconds(gpu, used, (8192, 1024, size)) >= least * size / 1024 * (1 - 1e-9)


@pytest.mark.parametrize(("recipe", "moved"), [("bf16", 12), ("rowwise", 2)])
@pytest.mark.parametrize("compiled", ["--compile.blocks", "--no-compile.blocks"])
def test_fp32_weights_are_cast_and_their_gradients_too(recipe, moved, compiled):
    """A cast moves six bytes an element. A converted layer casts once a step, and writes its gradient in FP32."""
    settings = ("--recipe", recipe, compiled)
    narrow, wide = (
        Case("llama-3-8b", (*settings, "--optimizer.weights", weights), "h100").training()
        for weights in ("bf16", "fp32")
    )
    more = moved * wide.setup.model.block_weights / wide.setup.gpu.copy_rate
    assert wide.time.linear_layers - narrow.time.linear_layers == pytest.approx(more)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_the_measured_steps_of_gpt2(recipe):
    runs = json.loads((RESULTS / "gpt_parity.json").read_text())["runs"]
    measured = statistics.median(run["tokens_per_second"] for run in runs if run["mode"] == recipe)
    settings = ("--recipe", recipe, "--batch", "64", "--context", "1024", "--loss.logits", "whole")
    assert Case("gpt2", settings).training().tokens_per_second == pytest.approx(measured, rel=0.1)


def test_a_gpu_without_measurements_gets_the_share_of_the_h100():
    shape, bf16 = (8192, 4096, 4096), get_recipe("bf16")
    a100, h100 = (linear_seconds(find_gpu(name), bf16, shape) for name in ("a100", "h100"))
    assert a100 / h100 == pytest.approx(989.4 / 312)
    plan = Case("gpt2", ("--recipe", "bf16"), gpu="a100").training()
    assert "data sheet" in plan.origins["matrix products"]
    assert Case("gpt2", gpu="h100").training().origins["matrix products"] == "measured"
    assert (
        "mxfp8 was not measured"
        in Case("gpt2", ("--recipe", "mxfp8"), gpu="h100").training().origins["matrix products"]
    )
