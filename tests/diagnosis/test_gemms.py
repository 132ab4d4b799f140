"""Timing of GEMMs: each GEMM once, in a limited time."""

import pytest
import torch

from octavo.diagnosis import gemms, time_gemms
from octavo.diagnosis.gemms import Timing
from octavo.recipe import PRESETS

SHAPES = ((32, 128, 128), (64, 128, 256))
RECIPES = {name: PRESETS[name]() for name in ("bf16", "rowwise", "rowwise_dw_bf16", "tensorwise")}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(gemms, "_TURN_SECONDS", 1e-4)


def test_each_gemm_is_timed_once_beside_bf16():
    reported = []
    found, late = time_gemms(RECIPES, CPU, SHAPES, progress=lambda *each: reported.append(each))
    assert late == []
    assert [(each.recipe, each.shape) for each in found] == [
        (name, shape) for shape in SHAPES for name in ("bf16", "rowwise", "tensorwise")
    ]  # rowwise_dw_bf16 has the y of rowwise
    assert {each.backend for each in found} == {"torch.mm", "emulated"}
    assert all(each.milliseconds > 0 for each in found)
    assert [each.speedup for each in found if each.recipe == "bf16"] == [1.0, 1.0]
    assert reported[0] == (0, 6, "bf16 32 x 128 x 128")


def test_no_gemm_begins_after_the_time(monkeypatch):
    clock = iter([0.0, 1.0, 61.0, 62.0])
    monkeypatch.setattr(gemms, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(gemms, "_median_milliseconds", lambda call, device: 2.0)
    found, late = time_gemms({"rowwise": RECIPES["rowwise"]}, CPU, SHAPES[:1], seconds=60)
    assert [each.recipe for each in found] == ["bf16"]
    assert late == ["rowwise 32 x 128 x 128"]


def test_the_rate_counts_a_multiplication_and_an_addition():
    assert Timing("bf16", "torch.mm", (1000, 1000, 1000), 2.0, 1.0).tflops == pytest.approx(1.0)


@pytest.mark.gpu
def test_a_gpu_times_its_own_gemms():
    found, late = time_gemms({name: preset() for name, preset in PRESETS.items()}, torch.device("cuda", 0), SHAPES)
    assert late == []
    assert "emulated" not in {each.backend for each in found}
