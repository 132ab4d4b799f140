"""Planned passes between the GEMMs against kernels of bench/results, and against what must follow from the model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.plan.architecture import Block
from octavo.plan.cases import Case
from octavo.plan.hardware import find_gpu, known_gpus
from octavo.plan.passes import GELU, LAYER_NORM, STACKED_GATE, Pass, bias_bytes, block_passes, passes_seconds
from octavo.plan.setup import Setup

RESULTS = Path(__file__).parents[2] / "bench/results"


def setup_of(model: str, recipe: str, *settings: str) -> tuple[Setup, Block]:
    setup = Case(model, ("--recipe", recipe, *settings), "h200").training().setup
    return setup, setup.model.blocks[0]


def kernel_ms(profile: dict[str, list[list[float]]], name: str) -> float:
    """Milliseconds of one launch of the only kernel whose name starts so."""
    ((_, count, ms),) = (row for row in profile["kernels"] if str(row[0]).startswith(name))
    return ms / count


@pytest.mark.parametrize(("which", "form"), [(0, "triton_poi_fused_gelu_view"), (1, "triton_poi_fused_gelu_gelu_b")])
def test_the_kernels_of_gelu_in_a_step(which, form):
    """They were timed alone, and take longer in a step, in which the clock is lower."""
    shape = json.loads((RESULTS / "gpu_vision.json").read_text())["shapes"]["ViT-H/14"]
    setup, block = setup_of("vit-h-14", "bf16", "--batch", "128", "--optimizer.weights", "bf16")
    activation = block_passes(setup, block)[which][2]
    assert activation.instructions == GELU[which] * 5120
    planned = 1e3 * setup.tokens * activation.seconds(setup.gpu)
    assert setup.tokens == shape["shape"]["batch"] * shape["shape"]["tokens"]
    assert 0.85 < planned / kernel_ms(shape["profiles"]["bf16"], form) < 1


def test_the_kernel_of_layer_norm_in_a_step():
    shape = json.loads((RESULTS / "gpu_vision.json").read_text())["shapes"]["ViT-H/14"]
    setup, block = setup_of("vit-h-14", "bf16", "--batch", "128", "--optimizer.weights", "bf16")
    norm = block_passes(setup, block)[0][0]
    assert norm.instructions == LAYER_NORM[0] * 2048  # a power of two of columns, of which 1,280 are the row
    measured = kernel_ms(shape["profiles"]["bf16"], "triton_red_fused_native_layer_norm_0")
    assert 0.85 < 1e3 * setup.tokens * norm.seconds(setup.gpu) / measured < 1


def test_the_gradient_of_gate_and_up_as_one_tensor():
    row = json.loads((RESULTS / "gpu_moe.json").read_text())["mixtral"]
    ((_, _, measured),) = (each for each in row["kernels"]["bf16"] if "silu_backward" in each[0])
    setup, block = setup_of("mixtral-8x7b", "bf16", "--batch", "1")
    gradient = block_passes(setup, block)[1][2]
    assert gradient.instructions == STACKED_GATE * 2 * 14336  # of two experts a token
    planned = 1e3 * row["shape"]["tokens"] * gradient.seconds(find_gpu("h200"))
    assert 0.75 < planned / measured < 1.1  # two runs under the power limit are 14 % apart
    assert planned > 1.3e3 * row["shape"]["tokens"] * Pass(gradient.moved).seconds(find_gpu("h200"))


@pytest.mark.parametrize(
    ("model", "recipe"),
    [("llama-3-8b", "bf16"), ("llama-3-8b", "rowwise"), ("gpt2", "rowwise"), ("mixtral-8x7b", "rowwise")],
)
def test_other_passes_are_bound_by_their_bytes(model, recipe):
    setup, block = setup_of(model, recipe)
    assert not any(each.instructions for passes in block_passes(setup, block) for each in passes)
    both, forward = (sum(each.moved for each in passes) / setup.gpu.copy_rate for passes in block_passes(setup, block))
    assert passes_seconds(setup, block) == pytest.approx((both + forward, both))


def test_a_pass_takes_the_longer_of_bytes_and_instructions():
    gpu = find_gpu("h200")
    assert Pass(gpu.copy_rate, gpu.instruction_rate / 2).seconds(gpu) == 1
    assert Pass(gpu.copy_rate / 2, gpu.instruction_rate * 2).seconds(gpu) == 2


def test_the_gradients_of_biases_read_the_gradients_of_outputs():
    setup, block = setup_of("gpt2", "rowwise")
    assert bias_bytes(setup, block) == 2 * 768 * (3 + 1 + 4 + 1) + 2 * 768 * 4  # dh and u of the fused MLP
    without = replace(block, layers=tuple(replace(layer, bias=False) for layer in block.layers))
    assert bias_bytes(setup, without) == 0
    forward, backward = block_passes(setup, block)
    assert forward == block_passes(setup, without)[0]
    more = sum(each.moved for each in backward) - sum(each.moved for each in block_passes(setup, without)[1])
    assert more == bias_bytes(setup, block)


def test_q_k_and_v_without_rotary_positions_are_views_whose_gradients_are_copied():
    setup, block = setup_of("gpt2", "bf16")
    forward, backward = (passes[-1].moved for passes in block_passes(setup, block))
    assert forward == 0
    assert backward - bias_bytes(setup, block) == 4 * 3 * 768


@pytest.mark.parametrize("key", known_gpus())
def test_no_gpu_multiplies_faster_without_its_tensor_cores(key):
    gpu = find_gpu(key)
    assert gpu.fp32 < gpu.bf16
    assert gpu.instruction_rate == gpu.fp32 / 2
