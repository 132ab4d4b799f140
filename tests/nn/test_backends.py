"""The backends that are reported are those that a scaled GEMM chooses."""

import pytest
import torch
from torch import nn

import octavo
from octavo.nn.backends import gemm_backends, pick_recipe


def test_every_recipe_runs_on_a_cpu_by_emulation() -> None:
    for name, preset in octavo.PRESETS.items():
        backends = gemm_backends(preset(), torch.device("cpu"))
        assert list(backends) == ["y", "dx", "dw"]
        for gemm, backend in backends.items():
            quantized = name != "bf16" and (name, gemm) != ("rowwise_dw_bf16", "dw")
            assert backend.name == ("emulated" if quantized else "bf16"), (name, gemm)


@pytest.mark.parametrize(
    ("capability", "hip", "picked", "library"),
    [
        ((9, 0), None, "rowwise", "cublaslt"),
        ((8, 9), None, "rowwise", "cutlass"),
        ((10, 0), None, "rowwise", "cutlass"),
        ((12, 0), None, "rowwise", "cutlass"),
        ((9, 4), "7.0", "rowwise_fnuz", "hipblaslt"),
        ((9, 5), "7.0", "rowwise", "hipblaslt"),
    ],
)
def test_a_recipe_is_picked_that_runs(monkeypatch: pytest.MonkeyPatch, capability, hip, picked, library) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    recipe = pick_recipe(torch.device("cuda"))
    assert recipe.name == picked
    assert {backend.name for backend in gemm_backends(recipe, torch.device("cuda")).values()} == {library}


def test_an_older_gpu_is_told_what_fp8_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"Ampere .* has no FP8 GEMM: FP8 needs an Ada.*train in BF16"):
        pick_recipe(torch.device("cuda"))


def test_auto_on_a_cpu_is_rowwise() -> None:
    assert octavo.convert(nn.Sequential(nn.Linear(16, 16)), "auto").recipe == octavo.PRESETS["rowwise"]()
