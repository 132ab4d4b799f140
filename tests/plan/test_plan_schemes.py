"""The bytes of packed weights, and the speed of each scheme where it was measured and where it was not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from octavo.artifact.packed.scheme import CHANNEL, INT8, MX, SCHEME_OF, SCHEMES, WEIGHT
from octavo.ops import quantize
from octavo.plan import schemes
from octavo.plan.architecture import Architecture, Layer
from octavo.plan.cases import Case, plan_schemes
from octavo.plan.hardware import find_gpu, known_gpus
from octavo.plan.models import find_architecture
from octavo.plan.schemes import find_scheme, find_speeds, refusal, weight_bytes
from octavo.runtime.packed_linear import PackedLinear
from octavo.runtime.scheme_speeds import measured_expert_speeds
from octavo.train.config import Config

LLAMA = find_architecture("llama-3-8b", Config())


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
    held = sum(buffer.nbytes for buffer in packed.buffers())
    assert weight_bytes(with_layers(Layer("o", k, n)), scheme) == held


def test_routers_stay_in_bf16_and_each_expert_has_its_scales():
    router, experts = Layer("router", 128, 8), Layer("up", 128, 256, copies=8, active=2)
    assert weight_bytes(with_layers(router, experts), CHANNEL) == 2 * 128 * 8 + 8 * (128 * 256 + 4 * 256)
    assert weight_bytes(with_layers(router, experts), None) == 2 * (128 * 8 + 8 * 128 * 256)


@pytest.fixture
def measured(monkeypatch):
    speeds = {
        1: {"channel": 1.7, "weight": 1.8},
        16: {"channel": 1.4, "weight": 1.1},
        8192: {"channel": 1.8, "weight": 0.9, "mx": 0.8},
    }
    monkeypatch.setattr(schemes, "measured_speeds", lambda: speeds)


def test_speeds_between_two_measurements(measured):
    found = find_speeds(CHANNEL, find_gpu("h200"))
    assert [found.at(tokens) for tokens in (1, 4, 16, 8192, 1 << 20)] == pytest.approx([1.7, 1.55, 1.4, 1.8, 1.8])
    assert found.is_measured(1)
    assert found.gemm == "cublaslt"


def test_a_scheme_without_a_measurement_has_the_speed_of_another(measured):
    mx, int8 = (find_speeds(scheme, find_gpu("h100")) for scheme in (MX, INT8))
    assert (mx.at(1), mx.at(8192)) == (1.7, 0.8)
    assert (mx.is_measured(16), mx.is_measured(8192)) == (False, True)
    assert (int8.at(8192), int8.is_measured(8192), int8.instead) == (1.8, False, "channel")


def test_another_gemm_has_other_speeds(measured):
    """MX has GEMMs of its own on a B200, and takes inputs in BF16 on an A100."""
    b200, a100 = (find_speeds(MX, find_gpu(name)) for name in ("b200", "a100"))
    assert (b200.gemm, b200.at(8192), b200.is_measured(8192)) == ("cublaslt", 1.8, False)
    assert (a100.gemm, a100.at(8192)) == ("weight-only", 0.9)


def test_weights_that_are_widened_in_memory_are_slower_than_bf16(measured):
    found = find_speeds(WEIGHT, find_gpu("mi300x"))
    assert (found.gemm, found.at(1)) == ("dequantized", 0.4)


def test_what_cannot_be_served_says_why():
    deepseek = find_architecture("deepseek-v3", Config())
    assert "no multiple of 128 x 128" in refusal(deepseek, find_scheme("block"), find_gpu("h200"))
    assert "no kernel for the scheme int8" in refusal(LLAMA, INT8, find_gpu("mi300x"))
    mixtral = find_architecture("mixtral-8x7b", Config())
    assert "can be packed in FP8, not int8" in refusal(mixtral, INT8, find_gpu("h200"))
    assert all(not refusal(LLAMA, scheme, find_gpu("h200")) for scheme in (None, *SCHEMES.values()))
    with pytest.raises(ValueError, match="cannot pack"):
        Case("deepseek-v3", gpus=8, scheme="block").serving()
    with pytest.raises(ValueError, match="--scheme must be one of bf16, channel"):
        find_scheme("int4")


@pytest.mark.parametrize("gpu", known_gpus())
def test_every_gpu_has_a_table_of_schemes(gpu):
    plans = plan_schemes(Case("llama-3-8b", ("--context", "1024"), gpu))
    assert plans[0].scheme == "bf16"
    assert {plan.scheme for plan in plans} >= {"bf16", "channel", "weight"}
    assert all(plan.weights < 0.65 * plans[0].weights for plan in plans[1:])


def test_the_speed_of_experts_is_that_of_the_layer_of_the_nearest_size():
    gpu = find_gpu("h200")
    for shape, speeds in measured_expert_speeds():
        experts = Layer("up", shape["width"], 2 * shape["mlp_width"], copies=8, active=2)
        for tokens, by_scheme in speeds.items():
            for name, speed in by_scheme.items():
                assert find_speeds(SCHEMES[name], gpu, experts).at(tokens) == pytest.approx(speed)


def test_experts_that_were_not_measured_are_named():
    channel, tensor = (Case("mixtral-8x7b", gpus=2, scheme=name).serving() for name in ("channel", "tensor"))
    assert channel.measured
    assert not tensor.measured
    assert "for experts that of channel, since tensor was not measured there" in tensor.origins["packed layers"]


def test_the_usual_scheme_is_that_of_the_recipe():
    assert Case("llama-3-8b").serving().scheme == "channel"
    assert Case("llama-3-8b", ("--recipe", "bf16")).serving().scheme == "bf16"
    for recipe, scheme in SCHEME_OF.items():
        assert Case("llama-3-8b", ("--recipe", recipe)).serving().scheme == scheme
    assert Case("llama-3-8b", ("--recipe", "rowwise"), scheme="int8").serving().scheme == "int8"
