"""Packing a run of adapters: they are merged into the weights in float32, and the rounding of their update reported."""

import json
import shutil

import ml_dtypes
import numpy as np
import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_models import make_model, open_theirs, outputs
from transformers import AutoModelForCausalLM

from octavo.calibration import calibrate
from octavo.checkpoint.files import ArtifactError
from octavo.evaluation.prompts import PromptOptions
from octavo.packing import pack, unpack
from octavo.packing.packer import KeptUpdate
from octavo.train.config import Config
from octavo.train.trainer import start_run

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of some steps around a Llama in BF16 ("bf16"), in eight bits ("packed"), and around a mixture whose experts
    are packed too ("mixtral"). Each has its base beside it."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text("a quire of sheets folded three times makes eight leaves " * 200)
    make_model(root / "bf16 base", "llama")
    pack(root / "bf16 base", root / "packed base")
    make_model(root / "mixtral bf16", "mixtral")
    pack(root / "mixtral bf16", root / "mixtral base", experts=True)
    for kind in ("bf16", "packed", "mixtral"):
        settings = {
            "model": str(root / f"{kind} base"), "lora": 4, "targets": TARGETS if kind == "mixtral" else (),
            "data": (str(root / "text.txt"),), "out": str(root / kind), "context": 32, "steps": 6, "warmup": 0,
            "learning_rate": 5e-3, "min_learning_rate": 5e-3, "device": "cpu", "batch": 2,
        }  # fmt: skip
        start_run(Config.from_dict(settings), Console(quiet=True)).run()
    return root


def merged_by_peft(base, run, out):
    """The folder `out` of the base in float32 with the adapters merged by PEFT."""
    if "quantization_config" in json.loads((base / "config.json").read_text()):
        weights = load_file(base / "model.safetensors")
        unpack(base, out)
        wide = load_file(out / "model.safetensors")
        for name in wide:
            if f"{name}_scale" in weights:
                wide[name] = weights[name].float() * weights[f"{name}_scale"]
        save_file(wide, out / "model.safetensors", {"format": "pt"})
        base = out
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(model, next(run.glob("step-*"))).merge_and_unload()
    shutil.rmtree(out, ignore_errors=True)
    merged.save_pretrained(out)
    return out


@pytest.mark.parametrize("kind", ["bf16", "packed", "mixtral"])
def test_the_merged_weights_are_those_of_peft(runs, tmp_path, kind):
    how = {"experts": True} if kind == "mixtral" else {}
    report = pack(runs / kind, tmp_path / "packed", **how)
    pack(merged_by_peft(runs / f"{kind} base", runs / kind, tmp_path / "merged"), tmp_path / "theirs", **how)
    found, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "theirs"))
    assert found.keys() == theirs.keys()
    for name, t in theirs.items():
        same = found[name].view(torch.uint8) == t.view(torch.uint8)
        assert same.float().mean() > 0.999, name  # products in another order differ in their last bit
    assert sorted(report.updates) == sorted({*TARGETS} if how else {*TARGETS, "gate_proj", "up_proj", "down_proj"})
    assert outputs(open_theirs(tmp_path / "packed")).isfinite().all()


def rounded(w):
    """w [N, K] with a scale for each row, rounded to E4M3 by ml_dtypes."""
    scale = np.abs(w).max(1, keepdims=True) / np.float32(448)
    return (w / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def test_the_report_is_that_of_an_independent_rounding(runs, tmp_path):
    report = pack(runs / "bf16", tmp_path / "packed")
    assert pack(runs / "bf16 base", tmp_path / "alone").updates == {}
    base = load_file(runs / "bf16 base" / "model.safetensors")
    adapters = load_file(next((runs / "bf16").glob("step-*")) / "adapter_model.safetensors")
    for kind, found in report.updates.items():
        u, d = [], []
        for name in (n for n in base if n.endswith(f".{kind}.weight")):
            a, b = (adapters[f"base_model.model.{name[:-7]}.lora_{m}.weight"].numpy() for m in "AB")
            w, update = base[name].float().numpy(), b @ a * np.float32(2)
            u.append(update.ravel())
            d.append((rounded(w + update) - rounded(w)).ravel())
        before, after = (np.concatenate(each).astype(np.float64) for each in (u, d))
        norms = [float(np.linalg.norm(each)) for each in (before, after)]
        cosine = float(before @ after) / (norms[0] * norms[1])
        assert found == pytest.approx(KeptUpdate(len(u), norms[1] / norms[0], cosine), rel=2e-3), kind
        assert 0.3 < found.cosine < 1
    record = json.loads((tmp_path / "packed" / "octavo.json").read_text())["adapters"]
    assert record == {kind: each._asdict() for kind, each in report.updates.items()}


def test_a_calibration_is_of_the_merged_model(runs, tmp_path):
    calibrate(runs / "bf16", [str(runs / "text.txt")], tmp_path / "calibrated", prompts=PromptOptions(4, 32))
    assert pack(runs / "bf16", tmp_path / "packed", scheme="static", calibration=tmp_path / "calibrated").updates
    other = shutil.copytree(runs / "bf16", tmp_path / "run")
    path = next(other.glob("step-*")) / "adapter_model.safetensors"
    save_file({name: 2 * t for name, t in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(ArtifactError, match="is a calibration of another model"):
        pack(other, tmp_path / "other", scheme="static", calibration=tmp_path / "calibrated")


def test_the_base_must_be_there_and_fit(runs, tmp_path):
    run = shutil.copytree(runs / "bf16", tmp_path / "run")
    settings = json.loads((run / "config.json").read_text())
    narrow = make_model(tmp_path / "narrow", "llama", num_key_value_heads=2)
    for base, error, said in (
        (tmp_path / "gone", FileNotFoundError, "no folder .*gone: give the model that the adapters of .*run were"),
        (narrow, ArtifactError, "narrow is not the model of the adapters .* must have shape"),
    ):
        (run / "config.json").write_text(json.dumps(settings | {"model": str(base)}))
        with pytest.raises(error, match=said):
            pack(run, tmp_path / "packed")
