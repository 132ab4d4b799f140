import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from octavo.models import GPT2Config, LlamaConfig, build
from octavo.plan.hardware import known_gpus
from octavo.train.utilization import flops_per_token, mfu, peak_flops


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_llama_are_those_of_its_matrices_and_attention(tied):
    config = LlamaConfig(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, mlp_width=96, context=16, tied=tied)
    attention = 32 * 32 * 2 + 2 * 32 * 16
    matrices = 3 * (attention + 3 * 32 * 96) + 64 * 32
    assert flops_per_token(build(config), 16) == 6 * matrices + 12 * 3 * 32 * 16


def test_flops_agree_with_those_that_torch_counts():
    """Of the matrices: forward 2 N, backward 4 N less the gradient of the first input; attention is counted apart."""
    config = GPT2Config(vocabulary=64, layers=2, width=32, heads=2, context=16)
    model = build(config)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    found = counter.get_flop_counts()["Global"]
    matrices = found[torch.ops.aten.mm] + found.get(torch.ops.aten.addmm, 0)
    assert flops_per_token(model, 0) * tokens.numel() == matrices


def test_stacked_experts_have_no_known_flops():
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(4, 8, 8))
    assert flops_per_token(model, 16) is None


def test_peaks_are_found_by_the_names_that_torch_gives():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4")
    assert [peak_flops(name) / 1e12 for name in names] == [989.4, 756.5, 989.4, 312, 121]
    assert peak_flops("NVIDIA L40S") == 362.05e12
    assert peak_flops("Tesla T4") is None


@pytest.mark.parametrize("key", known_gpus())
def test_every_gpu_of_a_plan_has_the_same_peak(key):
    gpu = known_gpus()[key]
    reported = {"h100": "NVIDIA H100 80GB HBM3"}.get(key, gpu.name)
    assert peak_flops(reported) == gpu.bf16


def test_utilization(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = torch.device("cuda")
    assert mfu(6e9, 10_000, gpu) == pytest.approx(6e13 / 989.4e12)
    assert mfu(None, 10_000, gpu) is None
    assert mfu(6e9, 10_000, torch.device("cpu")) is None
