"""Planned serving against measured steps of bench/results, and against what must follow from the sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.artifact.packed.scheme import SCHEMES
from octavo.plan.cases import Case
from octavo.plan.hardware import find_gpu
from octavo.plan.models import find_architecture
from octavo.plan.schemes import find_scheme
from octavo.plan.server import Server, cache_bytes
from octavo.plan.serving import ServingPlan, plan_serving
from octavo.train.config import Config

RESULTS = Path(__file__).parents[2] / "bench/results"
MEASURED = json.loads((RESULTS / "gpu_serve.json").read_text())


def serve(
    scheme: str,
    batch: int,
    context: int,
    cache: str = "bf16",
    gpus: int = 1,
    gpu: str = "h100",
    attention: str = "bf16",
) -> ServingPlan:
    settings = ("--batch", str(batch), "--context", str(context))
    return Case("llama-3-8b", settings, gpu, gpus, scheme=scheme, cache=cache, attention=attention).serving()


@pytest.mark.parametrize(("scheme", "key"), [("bf16", "bf16"), ("channel", "ours")])
def test_the_weights_take_the_measured_memory(scheme, key):
    assert serve(scheme, 1, 1024).weights == pytest.approx(MEASURED["memory"][key]["model"], rel=1e-3)


@pytest.mark.parametrize(
    ("scheme", "mode", "batch", "cache"),
    [
        ("bf16", "bf16, compile", 1, "bf16"),
        ("channel", "ours, compile", 1, "bf16"),
        ("bf16", "bf16, compile", 64, "bf16"),
        ("channel", "ours, compile", 64, "bf16"),
        ("channel", "ours, FP8 KV cache", 64, "fp8"),
    ],
)
def test_the_measured_decoding_steps(scheme, mode, batch, cache):
    found = MEASURED[f"decode {batch}"]["ms"][mode]["median"]
    assert 1e3 * serve(scheme, batch, 1024, cache).step_seconds == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("scheme", "mode"),
    [("bf16", "bf16, compile"), ("channel", "W8A8, compile"), ("weight", "weight-only, compile")],
)
def test_the_measured_decoding_steps_on_an_h200(scheme, mode):
    decode = json.loads((RESULTS / "gpu_weight_only.json").read_text())["decode"]
    planned = serve(scheme, 1, decode["context"], gpu="h200").step_seconds
    assert 1e3 * planned == pytest.approx(decode["ms"][mode]["median"], rel=0.1)


@pytest.mark.parametrize(("scheme", "mode"), [("bf16", "bf16, compile"), ("channel", "ours, compile")])
def test_the_measured_prompt(scheme, mode):
    found = MEASURED["prefill"]["ms"][mode]["median"]
    assert 1e3 * serve(scheme, 1, 8192).prefill_seconds == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(
    ("scheme", "attention", "mode"),
    [
        ("bf16", "bf16", "bf16, compile"),
        ("channel", "bf16", "ours, compile"),
        ("channel", "fp8", "ours, compile, FP8 attention"),
    ],
)
def test_the_measured_prompt_of_four_blocks_on_an_h200(scheme, attention, mode):
    found = json.loads((RESULTS / "gpu_attention.json").read_text())["prefill"]
    model = find_architecture("llama-3-8b", Config())
    model = replace(model, blocks=(replace(model.blocks[0], count=found["layers"]),))
    server = Server(model, find_scheme(scheme), find_gpu("h200"), 1, 1, found["tokens"], "bf16", attention)
    assert 1e3 * plan_serving(server).prefill_seconds == pytest.approx(found["ms"][mode], rel=0.05)


def test_prompts_that_read_an_fp8_cache_are_faster():
    slow, fast = (serve("channel", 1, 8192, cache, attention="fp8").prefill_seconds for cache in ("bf16", "fp8"))
    assert fast < slow


def test_short_prompts_attend_in_bf16():
    plan = serve("channel", 1, 2048, attention="fp8")
    assert plan.attention == "bf16"
    assert "in BF16, since prompts of 2,048 tokens are shorter than 4,096" in plan.origins["attention"]


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
    """It reads half the bytes of a BF16 model in each step, and computes prompts no faster."""
    fp8, bf16 = (serve(scheme, 1, 8192, gpu="a100") for scheme in ("channel", "bf16"))
    assert (fp8.gemm, bf16.gemm) == ("weight-only", "bf16")
    assert fp8.weights < 0.6 * bf16.weights
    assert fp8.step_seconds < 0.7 * bf16.step_seconds
    assert bf16.prefill_seconds < fp8.prefill_seconds < 1.1 * bf16.prefill_seconds
    assert serve("weight", 1, 8192, gpu="a100").step_seconds == fp8.step_seconds
    assert not fp8.measured


def test_norms_and_activations_cast_the_inputs_of_the_schemes_that_are_fused():
    model, gpu = find_architecture("llama-3-8b", Config()), find_gpu("h200")
    servers = {name: Server(model, find_scheme(name), gpu, 1, 1, 1024, "bf16", "bf16") for name in SCHEMES}
    assert [name for name, server in servers.items() if server.is_cast_fused] == ["channel", "int8"]
