"""The backends that are reported are those that a scaled GEMM chooses."""

import pytest
import torch
from torch import nn

import octavo
from octavo.nn.backends import choose_recipe, gemm_backends, in_formats_of, pick_recipe
from octavo.ops.gpu_architecture import ARCHITECTURES


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


def test_a_preset_on_an_mi300_gets_its_formats(tmp_path) -> None:
    """A recipe that states its formats keeps them."""
    mi300 = ARCHITECTURES["mi300"]
    assert choose_recipe("tensorwise", mi300).name == "tensorwise_fnuz"
    assert choose_recipe("bf16", mi300).name == "bf16"
    assert choose_recipe(octavo.PRESETS["tensorwise"](), mi300).name == "tensorwise"
    path = tmp_path / "mine.json"
    path.write_text(octavo.PRESETS["tensorwise"]().to_json())
    assert choose_recipe(str(path), mi300).name == "tensorwise"
    for place in (ARCHITECTURES["mi350"], ARCHITECTURES["ada"], torch.device("cpu")):
        assert choose_recipe("tensorwise", place).name == "tensorwise"


@pytest.mark.parametrize("preset", ["rowwise", "tensorwise", "delayed"])
@pytest.mark.parametrize("key", ["ada", "hopper", "blackwell", "rtx_blackwell", "mi300", "mi350"])
def test_every_gpu_with_fp8_runs_row_and_tensor_scales(preset: str, key: str) -> None:
    gpu = ARCHITECTURES[key]
    for gradients in ("e4m3", "e5m2"):
        recipe = in_formats_of(gpu, octavo.PRESETS[preset](gradients))
        assert "none" not in {backend.name for backend in gemm_backends(recipe, gpu).values()}


@pytest.mark.parametrize(
    ("capability", "hip", "recipe", "library"),
    [
        ((8, 9), None, "rowwise", "cutlass"),
        ((12, 0), None, "tensorwise", "cublaslt"),
        ((9, 4), "7.0", "delayed", "hipblaslt"),
    ],
)
def test_convert_reports_the_library(monkeypatch: pytest.MonkeyPatch, capability, hip, recipe, library) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64))
    report = octavo.convert(model, recipe, device="cuda")
    assert report.converted == ["0"]
    assert report.recipe.name == (f"{recipe}_fnuz" if hip else recipe)
    assert {backend.name for backend in report.backends.values()} == {library}
    assert "not measured on" in str(report)


def test_convert_on_an_ampere_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(
        ValueError,
        match=r"cannot run the recipe rowwise \(y, dx, dw: Ampere .* has no FP8 GEMM\).*emulate=True",
    ):
        octavo.convert(model, "rowwise", device="cuda")
    with pytest.raises(ValueError, match="train in BF16 here"):
        octavo.convert(model, "auto", device="cuda")
    assert octavo.convert(model, "rowwise", device="cuda", emulate=True).converted == ["0"]
