"""Calibration of runs of the trainer: the statistics of the same weights in a model folder, and packing by them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_examples import write_data
from packed_examples import LLAMA, examples, write_run
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import octavo
from octavo.artifact.files import ArtifactError
from octavo.calibration import Calibration, calibrate
from octavo.evaluation import PromptOptions
from octavo.models import MixtureConfig, build
from octavo.packing import PackOptions, pack, pack_frozen
from octavo.runtime.packed_experts import PackedGroupedLinear
from octavo.verification import verify
from octavo_cli.app import app

PROMPTS = PromptOptions(samples=8, context=32, batch=4, seed=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_data(tmp_path_factory.mktemp("data") / "rows.jsonl")


def as_folder(run: Path, out: Path) -> Path:
    """The model of a run as a Hugging Face folder."""
    shutil.copytree(run / "model", out)
    shutil.copy(run / "step-00000007" / "model.safetensors", out)
    return out


def write_mixture(path: Path, shared: int = 0) -> Path:
    """A run of a mixture. The router of its first block never chooses experts 2 and 3."""
    torch.manual_seed(0)
    sizes: Any = LLAMA | {"mlp_width": 32}
    model = build(MixtureConfig(**sizes, experts=4, top_k=1, shared_width=shared))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.2)
        router = model.get_submodule("model.layers.0.mlp.gate").weight
        router[1], router[2:] = -router[0], 0  # of the first two one is above zero
    return write_run(path, model, model.config.to_hf(), model="mixture")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, data: list[str]) -> tuple[Path, Path]:
    """A run of a mixture, and its calibration."""
    root = tmp_path_factory.mktemp("mixture")
    run = write_mixture(root / "run")
    calibrate(run, data, root / "calibrated", prompts=PROMPTS)
    return run, root / "calibrated"


def same(a: Calibration, b: Calibration) -> bool:
    one, other = ({name: s.to_tensors() for name, s in found.sites.items()} for found in (a, b))
    return one.keys() == other.keys() and all(
        torch.equal(one[site][leaf], other[site][leaf]) for site in one for leaf in one[site]
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_a_run_has_the_statistics_of_its_model(name: str, tmp_path: Path, data: list[str]) -> None:
    model, hf, settings = examples()[name]
    run = write_run(tmp_path / "run", model, hf, **settings)
    save_file({"state": torch.zeros(1)}, run / "step-00000007" / "optimizer.safetensors")
    found = calibrate(run, data, tmp_path / "calibrated", prompts=PROMPTS)
    expected = calibrate(as_folder(run, tmp_path / "folder"), data, tmp_path / "expected", prompts=PROMPTS)
    assert same(found, expected)
    assert found.layers == expected.layers
    report = pack(run, tmp_path / "packed", scheme="static", calibration=tmp_path / "calibrated")
    theirs = pack(tmp_path / "folder", tmp_path / "theirs", scheme="static", calibration=tmp_path / "expected")
    one, other = (load_file(each.folder / "model.safetensors") for each in (report, theirs))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one if key.endswith("input_scale"))


def test_a_run_is_packed_with_scales_of_keys_and_values(tmp_path: Path, data: list[str]) -> None:
    model, hf, settings = examples()["llama"]
    run = write_run(tmp_path / "run", model, hf, **settings)
    calibrate(run, data, tmp_path / "calibrated", prompts=PROMPTS)
    report = pack(run, tmp_path / "packed", kv_cache="fp8", calibration=tmp_path / "calibrated")
    assert set(report.packed.values()) == {"channel"}
    names = load_file(report.folder / "model.safetensors").keys()
    assert sum(name.endswith((".k_scale", ".v_scale")) for name in names) == 2 * 2
    assert verify(report.folder, run).ok


def test_a_calibration_is_of_one_checkpoint(tmp_path: Path, data: list[str]) -> None:
    model, hf, settings = examples()["llama"]
    run = write_run(tmp_path / "run", model, hf, **settings)
    save_file({"state": torch.zeros(1)}, run / "step-00000007" / "optimizer.safetensors")
    calibrate(run, data, tmp_path / "calibrated", prompts=PROMPTS, step=7)
    later = shutil.copytree(run / "step-00000007", run / "step-00000009")
    tensors = load_file(later / "model.safetensors")
    save_file({name: t * 2 for name, t in tensors.items()}, later / "model.safetensors")
    how: Any = {"scheme": "static", "calibration": tmp_path / "calibrated"}
    with pytest.raises(ValueError, match="is a calibration of another model than .*step-00000009"):
        pack(run, tmp_path / "packed", **how)
    assert set(pack(run, tmp_path / "packed", **how, step=7).packed.values()) == {"static"}
    with pytest.raises(ArtifactError, match="has no checkpoint of step 8: it keeps 7, 9"):
        calibrate(run, data, tmp_path / "none", prompts=PROMPTS, step=8)
    with pytest.raises(ValueError, match="is a model, not a run of octavo train"):
        calibrate(as_folder(run, tmp_path / "folder"), data, tmp_path / "none", prompts=PROMPTS, step=7)


def test_a_mixture_has_the_statistics_of_the_folder_that_transformers_writes(
    mixture: tuple[Path, Path], tmp_path: Path, data: list[str]
) -> None:
    """A checkpoint of a run holds stacks of experts, the folder of transformers a matrix for each."""
    run, calibrated = mixture
    folder, model = tmp_path / "folder", AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run / "model"))
    model.load_state_dict(load_file(run / "step-00000007" / "model.safetensors"), strict=False)  # the head is tied
    model.save_pretrained(folder)
    for file in (run / "model").glob("token*"):
        shutil.copy(file, folder)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in load_file(folder / "model.safetensors")
    found, expected = Calibration.load(calibrated), calibrate(folder, data, tmp_path / "out", prompts=PROMPTS)
    assert same(found, expected)
    expected_names = {f"model.layers.0.block_sparse_moe.experts.{e}.w{i}" for e in (2, 3) for i in (1, 2, 3)}
    assert {name for name in found.unseen if ".layers.0." in name} == expected_names


def test_the_experts_of_a_run_are_packed_by_static(mixture: tuple[Path, Path], tmp_path: Path) -> None:
    run, calibrated = mixture
    report = pack(run, tmp_path / "packed", experts=True, scheme="static", calibration=calibrated)
    scales = {n: t for n, t in load_file(report.folder / "model.safetensors").items() if n.endswith("input_scale")}
    assert sum(".experts." in name for name in scales) == 2 * 4 * 3
    assert all(t.shape == (1,) and float(t) > 0 and bool(t.isfinite()) for t in scales.values())
    recorded = json.loads((report.folder / "octavo.json").read_text())["calibration"]["unseen_experts"]
    assert recorded == Calibration.load(calibrated).unseen
    assert isinstance(octavo.load(report.folder).model.layers[1].mlp.experts.down_proj, PackedGroupedLinear)
    found = verify(report.folder, run)
    assert found.ok, [str(finding) for finding in found.findings]


def test_a_mixture_with_a_shared_expert(tmp_path: Path, data: list[str]) -> None:
    run = write_mixture(tmp_path / "run", shared=32)
    found = calibrate(run, data, tmp_path / "calibrated", prompts=PROMPTS)
    assert "model.layers.1.mlp.shared_expert.gate_proj.input" in found.sites
    report = pack(run, tmp_path / "packed", experts=True, scheme="static", calibration=tmp_path / "calibrated")
    assert sum(".experts." in name for name in report.packed) == 2 * 4 * 3


def test_a_warm_up_refuses_experts_before_the_model_runs(
    mixture: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: list[str]
) -> None:
    monkeypatch.setattr("octavo.packing.freezing._warm_up", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=r"those of experts come from a calibration alone: .*experts\.\*=channel"):
        pack_frozen(mixture[0], tmp_path / "out", data, PackOptions(experts=True))


def test_a_warm_up_leaves_experts_to_another_scheme(
    mixture: tuple[Path, Path], tmp_path: Path, data: list[str]
) -> None:
    options = PackOptions(experts=True, layers={"*.experts.*": "channel"})
    report = pack_frozen(mixture[0], tmp_path / "out", data, options, prompts=PROMPTS)
    assert set(report.packed.values()) == {"static", "channel"}


def test_the_command_takes_a_step_of_a_run(mixture: tuple[Path, Path], tmp_path: Path, data: list[str]) -> None:
    command = ["calibrate", str(mixture[0]), str(tmp_path / "out"), f"--data={data[0]}", "--step", "7"]
    done = CliRunner().invoke(app, [*command, "--samples", "4", "--context", "16"], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert "matrices of experts (model.layers.0.block_sparse_moe.experts.2.w1" in " ".join(done.output.split())
