"""The note of packed layers that are slower than BF16, from recorded speeds."""

from collections import Counter

import pytest
import torch

from octavo.artifact.packed.scheme import CHANNEL, GROUPS, MX, SCHEMES
from octavo.runtime import scheme_speeds
from octavo.runtime.scheme_speeds import slower_experts_note, slower_note

CUDA = torch.device("cuda")
SPEEDS = {1: {"channel": 1.8, "mx": 0.95, "group32": 1.2}, 8192: {"channel": 1.5, "mx": 0.8, "group32": 0.9}}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(scheme_speeds, "measured_speeds", lambda: SPEEDS)


def test_slower_layers_are_named_with_their_speeds(hopper):
    note = slower_note(Counter({CHANNEL: 3, MX: 2, GROUPS[0]: 1}), CUDA)
    assert "2 layers of the scheme mx (0.95x at 1 token, 0.80x at 8192 tokens)" in note
    assert "1 layer of the scheme group32 (0.90x at 8192 tokens)" in note
    assert "channel" not in note


def test_nothing_is_said_of_faster_schemes_and_of_those_without_a_measurement(hopper):
    assert slower_note(Counter({CHANNEL: 3, GROUPS[1]: 1}), CUDA) == ""


def test_nothing_is_said_of_devices_that_were_not_measured(hopper, monkeypatch):
    assert slower_note(Counter({MX: 1}), torch.device("cpu")) == ""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    assert slower_note(Counter({MX: 1}), CUDA) == ""


def test_slower_experts_are_named_with_the_measured_layer_of_that_size(hopper, monkeypatch):
    large, small = {"experts": 8, "width": 4096, "mlp_width": 14336}, {"experts": 128, "width": 2048, "mlp_width": 768}
    speeds = {1: {"channel": 1.7, "block": 0.5}, 512: {"channel": 1.01, "block": 1.2}}
    layers = [(large, speeds), (small, {16: {"channel": 0.9, "block": 0.012}})]
    monkeypatch.setattr(scheme_speeds, "measured_expert_speeds", lambda: layers)
    note = slower_experts_note(SCHEMES["block"], (14336, 4096), CUDA)
    assert "experts of the scheme block are slower than BF16 on this GPU: 0.50x at 1 token, as measured with 8" in note
    assert "0.01x at 16 tokens, as measured with 128 experts" in slower_experts_note(
        SCHEMES["block"], (1024, 2048), CUDA
    )
    assert slower_experts_note(CHANNEL, (14336, 4096), CUDA) == ""
    assert slower_experts_note(MX, (14336, 4096), CUDA) == ""
    assert slower_experts_note(SCHEMES["block"], (14336, 4096), torch.device("cpu")) == ""


def test_the_file_of_experts_has_speeds_of_schemes_that_exist():
    layers = scheme_speeds.measured_expert_speeds()
    assert {shape["experts"] for shape, _ in layers} == {8, 128}
    for _, speeds in layers:
        assert all(found.keys() <= SCHEMES.keys() for found in speeds.values())


def test_the_file_has_speeds_of_schemes_that_exist():
    for found in scheme_speeds.measured_speeds().values():
        assert found.keys() <= SCHEMES.keys()
        assert all(speed > 0 for speed in found.values())
