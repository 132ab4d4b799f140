"""Planned attention in FP8: where it runs, and its measured speed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.plan.attention import attention_seconds, fp8_limit, fp8_speed, gradient_bytes
from octavo.plan.cases import Case
from octavo.plan.hardware import find_gpu
from octavo.plan.training import TrainingPlan

RESULTS = Path(__file__).parents[2] / "bench/results"
CELLS = json.loads((RESULTS / "gpu_attention.json").read_text())["cells"]
FP8 = ("--attention.precision", "fp8")


def plan(*settings: str, model: str = "llama-3-8b", gpu: str = "h200") -> TrainingPlan:
    return Case(model, settings, gpu).training()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: str(cell["tokens"]))
def test_the_speeds_are_those_of_the_benchmark(cell):
    for passes, key, mode in [
        ("forward", "forward", "ours"),
        ("forward from an FP8 KV cache", "forward", "ours, FP8 KV cache"),
        ("forward and backward", "both", "ours"),
    ]:
        ms = cell[key]["ms"]
        assert fp8_speed(passes, cell["tokens"]) == pytest.approx(ms["BF16, cuDNN"] / ms[mode], rel=0.01)


def test_other_lengths_are_interpolated_and_longer_ones_have_the_speed_of_the_longest():
    short, middle, long, beyond = (fp8_speed("forward", n) for n in (8192, 16384, 32768, 131072))
    assert middle == pytest.approx((short + long) / 2)
    assert beyond == long


def test_a_step_with_attention_in_fp8():
    wide, narrow = plan(), plan(*FP8)
    assert wide.time.attention / narrow.time.attention == pytest.approx(narrow.fp8_attention_speed)
    assert wide.fp8_attention_speed == narrow.fp8_attention_speed  # a question of the settings' texts alone
    # q, k and v of 32 and 8 heads of 128, a byte less each, in 32 blocks. The output takes two bytes in both: in BF16
    # for the attention and the next layer, in FP8 a byte for each of them.
    assert wide.memory.activations - narrow.memory.activations == 32 * 8192 * (4096 + 1024 + 1024)
    assert "FP8" in narrow.origins["attention"]
    assert wide.origins["attention"] == "measured"


def test_attention_computes_whole_tiles():
    """Of 7 FLOPs a pair and an element: two thirds of the keys of 256 tokens for 128 of them, and all if not causal."""
    gpu, causal = find_gpu("h100"), plan().setup.model.blocks[0]
    every = replace(causal, attention=replace(causal.attention, causal=False))
    flops = 7 * 2 * 4096  # of a pair, with queries and outputs of 4,096 elements
    others = gradient_bytes(causal.attention) / gpu.copy_rate  # seconds a token
    for context, whole in ((256, 256), (257, 384), (100, 128)):
        pairs = sum(128 * (tile + 1) * 128 for tile in range(whole // 128))
        for block, computed in ((causal, pairs), (every, whole**2)):
            both, forward = attention_seconds(block, gpu, context, context)
            assert both == pytest.approx(flops * computed / gpu.attention_rate + context * others)
            assert forward == pytest.approx(flops * computed / gpu.attention_rate / 4)


def test_narrow_heads_have_a_lower_rate():
    """Of the same FLOPs. 64 heads of 64 elements take twice the exponentials of 32 heads of 128."""
    gpu, wide = find_gpu("h100"), plan().setup.model.blocks[0]
    narrow = replace(wide, attention=replace(wide.attention, heads=64))
    of_wide, of_narrow = (attention_seconds(block, gpu, 8192, 8192)[1] for block in (wide, narrow))
    assert of_narrow / of_wide == pytest.approx((7 * 2 * 64 + 2 * 256) * 2 / (7 * 2 * 128 + 2 * 256))


@pytest.mark.parametrize(("head", "computed"), [(40, 64), (80, 128), (128, 128), (160, 192), (512, 512)])
def test_heads_are_padded_to_those_of_the_kernels(head, computed):
    gpu, block = find_gpu("h100"), plan().setup.model.blocks[0]

    def seconds(width):
        a = replace(block.attention, heads=16, queries=16 * width, output=16 * width)
        return attention_seconds(replace(block, attention=a), gpu, 8192, 8192)[1]

    assert seconds(head) == pytest.approx(seconds(computed))
    assert seconds(head) < seconds(computed + 64)


def test_the_gradient_moves_the_bytes_that_were_profiled():
    """The kernels of cuDNN around the products in the stack's backward pass: 0.093, 0.074 and 2 x 0.031 ms a block."""
    kernels = json.loads((RESULTS / "gpu_stack.json").read_text())["profiles"]["bf16, compile"]["kernels"]
    around = sum(ms for name, _, ms in kernels if "cudnn::fusion" in name) / 4
    products = sum(ms for name, _, ms in kernels if "native_sdpa" in name) / 4
    gpu, block = find_gpu("h100"), plan().setup.model.blocks[0]
    assert 1e3 * 8192 * gradient_bytes(block.attention) / gpu.copy_rate == pytest.approx(around, rel=0.1)
    assert 1e3 * attention_seconds(block, gpu, 8192, 8192)[0] == pytest.approx(products + around, rel=0.01)


def test_the_gradients_of_key_heads_that_nobody_shares_are_not_summed():
    a = plan().setup.model.blocks[0].attention
    alone = replace(a, keys=a.queries, values=a.output)
    assert gradient_bytes(a) - gradient_bytes(alone) == 2 * 2 * (4096 + 1024)


def test_recomputation_repeats_the_forward_pass_in_fp8():
    checkpointing = ("--activation-checkpointing.mode", "full")
    wide, narrow = plan(*checkpointing), plan(*checkpointing, *FP8)
    block = wide.setup.model.blocks[0]
    _, forward = attention_seconds(block, wide.setup.gpu, wide.setup.tokens, 8192)
    saved = block.count * forward * (1 - 1 / fp8_speed("forward", 8192))
    assert wide.time.recomputation - narrow.time.recomputation == pytest.approx(saved)


@pytest.mark.parametrize(
    ("settings", "model", "gpu", "reason"),
    [
        (("--context", "4096"), "llama-3-8b", "h200", "shorter than attention.shortest, 8,192"),
        (("--context", "8100", "--attention.shortest", "8000"), "llama-3-8b", "h200", "no multiple of 128"),
        ((), "llama-3-8b", "l40s", "Hopper and Blackwell"),
        (("--attention.shortest", "128", "--context", "1024"), "gpt2", "h200", "heads of 128 elements"),
        (("--attention.shortest", "128"), "vit-h-14", "h200", "no multiple"),
    ],
)
def test_attention_that_stays_in_bf16_says_why(settings, model, gpu, reason):
    wide, narrow = (plan(*settings, *more, model=model, gpu=gpu) for more in ((), FP8))
    assert narrow.time == wide.time
    assert narrow.memory == wide.memory
    assert reason in narrow.origins["attention"]
    assert narrow.fp8_attention_speed is None


@pytest.mark.parametrize(("model", "reason"), [("vit-h-14", "is causal"), ("deepseek-v3", "of one size")])
def test_models_whose_attention_has_no_fp8(model, reason):
    assert reason in fp8_limit(plan(model=model).setup.model, find_gpu("h100"))
