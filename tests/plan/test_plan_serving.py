"""Planned serving against measured steps of bench/results, and against what must follow from the sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo.checkpoint.scheme import CHANNEL, SCHEME_OF, SCHEMES
from octavo.inference.packed_linear import PackedLinear
from octavo.ops import quantize
from octavo.plan.cases import Case, find_architecture
from octavo.plan.model_shape import Architecture, Layer
from octavo.plan.serving import ServingPlan, find_speeds, weight_bytes
from octavo.rates.measured import _read, find_gpu

MEASURED = json.loads((Path(__file__).parents[2] / "bench/results/gpu_serve.json").read_text())


def serve(scheme: str, batch: int, context: int, cache: str = "bf16") -> ServingPlan:
    return Case("llama-3.1-8b", {"batch": batch, "context": context}, "h100", scheme=scheme, cache=cache).serving()


@pytest.mark.parametrize(("scheme", "key"), [("bf16", "bf16"), ("channel", "ours")])
def test_the_weights_take_the_measured_memory(scheme, key):
    assert serve(scheme, 1, 1024).weights == pytest.approx(MEASURED["memory"][key]["model"], rel=1e-3)


def test_keys_and_values_by_context_and_batch():
    # 32 blocks, keys and values, 8 heads of 128 features, 2 bytes; of MLA the latents and the rotary features
    assert serve("bf16", 3, 1000).cache == 2 * serve("bf16", 3, 1000, "fp8").cache == 3 * 1000 * 32 * 2 * 8 * 128 * 2
    assert Case("deepseek-v3").serving().cache_a_token == 61 * (512 + 64) * 2
    # GPUs share the 8 key heads; of 16 GPUs two have the same one. Each has all latents of MLA, which no head owns.
    for model, gpus, parts in (("llama-3.1-8b", 2, 2), ("llama-3.1-8b", 16, 8), ("deepseek-v3", 16, 1)):
        one, many = Case(model).serving(), Case(model, gpus=gpus).serving()
        assert (one.cache, one.cache_a_token) == (parts * many.cache, many.cache_a_token)


def test_only_servers_of_several_nodes_wait_for_the_network():
    def seconds(gpus, network):
        return Case("llama-3.1-8b", gpus=gpus, network=network).serving().prefill_seconds

    assert seconds(8, 400) == seconds(8, 50)
    assert seconds(16, 50) > 1.5 * seconds(16, 400)


def test_the_largest_batch_fits_and_one_more_does_not():
    most = serve("bf16", 1, 8192).largest_batch
    assert [serve("bf16", batch, 8192).fits for batch in (most, most + 2)] == [True, False]


# ---- The bytes of packed weights, and the speed of each scheme where it was measured and where it was not


LLAMA = find_architecture("llama-3.1-8b")


def with_layers(*layers: Layer) -> Architecture:
    """A model whose parameters are those of `layers`, once."""
    block = replace(LLAMA.blocks[0], count=1, layers=layers, others=0)
    return replace(LLAMA, blocks=(block,), head=0, embeddings=0, others=0)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_packed_layer_takes_the_bytes_that_are_planned(scheme):
    n, k = 256, 384
    packed = PackedLinear(nn.Linear(k, n, bias=False), scheme)
    q = quantize(torch.randn(n, k), scheme.weight)
    packed.weight, packed.weight_scale = q.data, scheme.stored_scale(q)
    assert weight_bytes(with_layers(Layer("o", k, n)), scheme) == sum(buffer.nbytes for buffer in packed.buffers())


def test_routers_stay_in_bf16_and_each_expert_has_its_scales():
    router, experts = Layer("router", 128, 8), Layer("up", 128, 256, copies=8, active=2)
    assert weight_bytes(with_layers(router, experts), CHANNEL) == 2 * 128 * 8 + 8 * (128 * 256 + 4 * 256)
    assert weight_bytes(with_layers(router, experts), None) == 2 * (128 * 8 + 8 * 128 * 256)


def test_the_speed_of_experts_is_that_of_the_layer_of_the_nearest_size():
    gpu = find_gpu("h200")
    for layer in _read("expert_speeds.json")["layers"]:
        experts = Layer("up", layer["shape"]["width"], 2 * layer["shape"]["mlp_width"], copies=8, active=2)
        for tokens, by_scheme in layer["speeds"].items():
            for name, speed in by_scheme.items():
                assert find_speeds(SCHEMES[name], gpu, experts).at(tokens) == pytest.approx(speed)


def test_a_gemm_that_widens_its_operands_has_the_speed_of_another_that_does():
    gpu, experts = find_gpu("h200"), Layer("up", 4096, 14336, copies=8, active=2)
    assert find_speeds(SCHEMES["group32"], gpu, experts).points == find_speeds(SCHEMES["mx"], gpu, experts).points


def test_the_usual_scheme_is_that_of_the_recipe():
    for recipe, scheme in {"auto": "channel", "bf16": "bf16", **SCHEME_OF}.items():
        assert Case("llama-3.1-8b", {"recipe": recipe}).serving().scheme == scheme
    assert Case("llama-3.1-8b", {"recipe": "rowwise"}, scheme="int8").serving().scheme == "int8"
