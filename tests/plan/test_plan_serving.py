"""Planned serving against bench/results/gpu_serve.json, and against what must follow from the sizes."""

import json
from pathlib import Path

import pytest

from octavo.plan.cases import Case
from octavo.plan.models import find_architecture
from octavo.plan.serving import ServingPlan, cache_bytes
from octavo.train.config import Config

MEASURED = json.loads((Path(__file__).parents[2] / "bench/results/gpu_serve.json").read_text())


def serve(recipe: str, batch: int, context: int, cache: str = "bf16", gpus: int = 1) -> ServingPlan:
    settings = ("--recipe", recipe, "--batch", str(batch), "--context", str(context))
    return Case("llama-3-8b", settings, "h100", gpus, cache=cache).serving()


@pytest.mark.parametrize(("recipe", "key"), [("bf16", "bf16"), ("rowwise", "ours")])
def test_the_weights_take_the_measured_memory(recipe, key):
    assert serve(recipe, 1, 1024).weights == pytest.approx(MEASURED["memory"][key]["model"], rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "mode", "batch", "cache"),
    [
        ("bf16", "bf16, compile", 1, "bf16"),
        ("rowwise", "ours, compile", 1, "bf16"),
        ("bf16", "bf16, compile", 64, "bf16"),
        ("rowwise", "ours, compile", 64, "bf16"),
        ("rowwise", "ours, FP8 KV cache", 64, "fp8"),
    ],
)
def test_the_measured_decoding_steps(recipe, mode, batch, cache):
    found = MEASURED[f"decode {batch}"]["ms"][mode]["median"]
    assert 1e3 * serve(recipe, batch, 1024, cache).step_seconds == pytest.approx(found, rel=0.16)


@pytest.mark.parametrize(("recipe", "mode"), [("bf16", "bf16, compile"), ("rowwise", "ours, compile")])
def test_the_measured_prompt(recipe, mode):
    found = MEASURED["prefill"]["ms"][mode]["median"]
    assert 1e3 * serve(recipe, 1, 8192).prefill_seconds == pytest.approx(found, rel=0.1)


def test_keys_and_values_by_context_and_batch():
    # 32 blocks, keys and values, 8 heads of 128 features, 2 bytes
    assert serve("bf16", 3, 1000).cache == 3 * 1000 * 32 * 2 * 8 * 128 * 2
    assert serve("bf16", 3, 1000, "fp8").cache == 3 * 1000 * 32 * 2 * 8 * 128


def test_latent_attention_caches_the_latents():
    deepseek = find_architecture("deepseek-v3", Config())
    assert cache_bytes(deepseek, "bf16") == 61 * (512 + 64) * 2


def test_the_largest_batch_fits_and_one_more_does_not():
    most = serve("bf16", 1, 8192).largest_batch
    assert serve("bf16", most, 8192).fits
    assert not serve("bf16", most + 2, 8192).fits


def test_experts_are_read_as_the_batch_needs_them():
    one, many = (Case("mixtral-8x7b", ("--batch", str(n)), gpus=2).serving().step_seconds for n in (1, 64))
    assert many > 2 * one


def test_gpus_share_weights_and_cache():
    one, four = serve("bf16", 8, 1024), serve("bf16", 8, 1024, gpus=4)
    assert (one.weights, one.cache) == (4 * four.weights, 4 * four.cache)
    assert four.step_seconds < one.step_seconds


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("vit-h-14"), "vit-h-14 has no vocabulary"),
        (Case("llama-3-8b", gpus=3), "--gpus must divide the 32 heads"),
        (Case("llama-3-8b", gpus=0), "must be at least 1"),
        (Case("llama-3-8b", ("--context", "9000")), "must be at most the 8192 tokens"),
    ],
)
def test_bad_input(case, message):
    with pytest.raises(ValueError, match=message):
        case.serving()


def test_a_gpu_without_fp8_gemms_serves_weights_in_eight_bits():
    """It reads half the bytes of a BF16 model in each step, and computes prompts at the same speed."""
    fp8, bf16 = (Case("llama-3-8b", ("--recipe", recipe), "a100").serving() for recipe in ("rowwise", "bf16"))
    assert (fp8.gemm, bf16.gemm) == ("weight-only", "bf16")
    assert fp8.weights < 0.6 * bf16.weights
    assert fp8.step_seconds < 0.7 * bf16.step_seconds
    assert fp8.prefill_seconds == bf16.prefill_seconds
