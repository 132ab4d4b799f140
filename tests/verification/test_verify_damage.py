"""Planted damage of each kind: one clear finding that names it, nothing run, and never a traceback."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_examples import small_shards
from safetensors.torch import save_file
from verify_examples import change_config, change_tensors, make_model

from octavo.calibration import calibrate
from octavo.evaluation import PromptOptions
from octavo.packing import pack
from octavo.verification import pipeline as verification_pipeline
from octavo.verification.pipeline import verify
from octavo.verification.result import Report

Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def good(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packings of the model, each by a name."""
    root = tmp_path_factory.mktemp("packed")
    (root / "text.txt").write_text("\n".join(f"{i} times seven is {7 * i}" for i in range(60)))
    calibrate(model, [str(root / "text.txt")], root / "calibrated", prompts=PromptOptions(8, 32))
    made: dict[str, Path] = {}
    for name, how in {
        "channel": {}, "block": {"scheme": "block"}, "fp8": {"scheme": "block", "layout": "fp8"},
        "mx": {"scheme": "mx"}, "tensor": {"scheme": "tensor"},
        "static": {"scheme": "static", "calibration": root / "calibrated"},
    }.items():  # fmt: skip
        made[name] = root / name
        pack(model, made[name], **how)  # type: ignore[arg-type]
    with small_shards(100_000):
        made["shards"] = pack(model, root / "shards").folder
    return made


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader sees a folder whose bytes are wrong."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a reader was tried")

    monkeypatch.setattr(verification_pipeline, "try_readers", refuse)


def damaged(folder: Path, target: Path, damage: Damage) -> Path:
    shutil.copytree(folder, target)
    damage(target)
    return target


def expect(report: Report, kind: str, where: str, message: str) -> None:
    said = [str(finding) for finding in report.findings]
    assert any(f.kind == kind and f.where == where and message in f.message for f in report.findings), said
    assert len(report.findings) <= 2, said  # one planted thing is not a page of findings
    assert not report.ok
    assert report.not_run
    assert not report.readers


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def no_tensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def write(name: str, text: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def index(change: Callable[[dict[str, str]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        change(content["weight_map"])
        path.write_text(json.dumps(content))

    return damage


FILES: list[tuple[str, Damage, str, str, str]] = [
    ("channel", cut, "file", "model.safetensors", "is truncated or not a safetensors file"),
    ("channel", write("model.safetensors", b"\x80\x02}q\x00."), "file", "model.safetensors", "is truncated or not a"),
    ("channel", write("model.safetensors", b"\xff" * 64), "file", "model.safetensors", "is truncated or not a safeten"),
    ("channel", no_tensors, "file", "model.safetensors", "the folder has no tensors"),
    ("channel", write("config.json", "{"), "file", "config.json", "is not valid JSON"),
    ("channel", write("config.json", b"\xff\xfe{"), "file", "config.json", "is not valid JSON"),
    ("channel", write("config.json", "[]"), "file", "config.json", "must hold a JSON object, it holds list"),
    ("channel", write("config.json", '{"a": 1}'), "config", "config.json", "transformers cannot build the model"),
    ("channel", lambda f: (f / "config.json").unlink(), "file", "config.json", "is missing"),
    ("channel", write("training.bin", b"x"), "pickle", "training.bin", "was not opened: delete it"),
    ("shards", write("model.safetensors.index.json", "{}"), "file", "model.safetensors.index.json", "must map the"),
    (
        "shards", index(lambda names: names.update({f"{Q}.weight": "../../secret.safetensors"})), "file",
        "model.safetensors.index.json", "'../../secret.safetensors', which is outside of the folder: not opened",
    ),
    (
        "shards", index(lambda names: names.update({f"{Q}.weight": "/etc/passwd"})), "file",
        "model.safetensors.index.json", "'/etc/passwd', which is outside",
    ),
    (
        "shards", index(lambda names: names.update({f"{Q}.weight": "pytorch_model.bin"})), "file",
        "model.safetensors.index.json", "'pytorch_model.bin', which is not a safetensors file: not opened",
    ),
    (
        "shards", index(lambda names: names.pop(f"{Q}.bias", None) or names.pop("model.norm.weight")), "tensor",
        "model.norm.weight", "does not list it",
    ),
    (
        "shards", index(lambda names: names.update({"model.extra": names["model.norm.weight"]})), "tensor",
        "model.extra", "is missing in model-",
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FILES)))
def test_files(good: dict[str, Path], model: Path, tmp_path: Path, number: int) -> None:
    name, damage, kind, where, message = FILES[number]
    report = verify(damaged(good[name], tmp_path / "bad", damage), model)
    if message.startswith("'"):  # where a shard is named twice, the tensor is found missing as well
        report.findings = [f for f in report.findings if f.kind == kind]
    expect(report, kind, where, message)


def test_a_missing_shard(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    bad = damaged(good["shards"], tmp_path / "bad", lambda f: sorted(f.glob("model-*"))[0].unlink())
    report = verify(bad, model)
    assert "is missing, and model.safetensors.index.json names it" in report.findings[0].message


def test_no_folder(model: Path, tmp_path: Path) -> None:
    expect(verify(tmp_path / "none", model), "file", str(tmp_path / "none"), "there is no such folder")


class Evil:
    """What a pickle can do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_is_never_loaded(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        no_tensors(folder)
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(tmp_path / "harm"))))

    report = verify(damaged(good["channel"], tmp_path / "bad", damage), model)
    expect(report, "pickle", "pytorch_model.bin", "can run code, and was not opened")
    assert not (tmp_path / "harm").exists()


def groups(**settings: Any) -> dict[str, Any]:
    base = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return {"g": {"targets": ["Linear"], "weights": base | settings, "input_activations": inputs}}


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq"}, "quant_method must be one of compressed-tensors, fp8, modelopt, it is 'gptq'"),
    ({"quant_method": None}, "it is None"),
    ({"quantization_status": "frozen"}, "quantization_status must be \"compressed\", it is 'frozen'"),
    ({"format": "pack-quantized"}, "format must be one of float-quantized"),
    ({"config_groups": {}}, "config_groups must hold groups, it is {}"),
    ({"config_groups": {"g": 3}}, "config_groups.g must have targets (names) and weights, it is 3"),
    ({"config_groups": groups(num_bits=4)}, "must have num_bits 8, type float or int, and symmetric true; it has 4"),
    ({"config_groups": groups(strategy="diagonal")}, "strategy must be tensor, channel, group"),
    ({"ignore": "lm_head"}, "ignore must be a list of names of modules"),
    ({"ignore": ["model.layers.7.o"]}, "has 'model.layers.7.o', which is not a linear layer"),
    ({"ignore": ["lm_head", "model.layers.7.o"]}, "has 'model.layers.7.o', which is not a linear layer"),
    ({"ignore": ["lm_head", Q]}, f"is packed (F8_E4M3), and the list of ignored modules has {Q}"),
    ({"config_groups": groups(strategy="block", block_structure=[64, 64])}, "must have shape"),
    ({"config_groups": groups(strategy="group", group_size=48)}, "not a multiple of its blocks of 1 x 48"),
    ({"config_groups": groups(type="int")}, "must be I8, it is F8_E4M3"),
    ({"config_groups": groups(scale_dtype="torch.uint8")}, "must be U8 or F8_E8M0, it is F32"),
]


@pytest.mark.parametrize(("settings", "message"), CONFIGS)
def test_configurations(
    good: dict[str, Path], model: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    bad = damaged(good["channel"], tmp_path / "bad", lambda f: change_config(f, **settings))
    report = verify(bad, model)
    assert any(message in str(finding) for finding in report.findings), [str(f) for f in report.findings]
    assert {finding.kind for finding in report.findings} <= {"config", "scale", "tensor"}
    assert report.not_run


def test_no_quantization_config(good: dict[str, Path], model: Path) -> None:
    report = verify(model, model)
    expect(report, "config", "config.json", "must have a quantization_config, it has None")


def put(name: str, place: Any, value: float) -> Damage:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8 if tensors[name].itemsize == 1 else tensors[name].dtype)[place] = value

    return lambda folder: change_tensors(folder, change)


def replaced(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda folder: change_tensors(folder, lambda t: t.update({name: function(t[name])}))


def renamed(old: str, new: str) -> Damage:
    return lambda folder: change_tensors(folder, lambda t: t.update({new: t.pop(old)}))


TENSORS: list[tuple[str, Damage, str, str, str]] = [
    ("channel", put(f"{Q}.weight_scale", (3, 0), torch.nan), "scale", f"{Q}.weight_scale", "1 of 128 are NaN"),
    ("channel", put(f"{Q}.weight_scale", (3, 0), torch.inf), "scale", f"{Q}.weight_scale", "1 of 128 are inf"),
    ("channel", put(f"{Q}.weight_scale", slice(2), 0), "scale", f"{Q}.weight_scale", "2 of 128 are zero"),
    ("block", put(f"{DOWN}.weight_scale", (0, 1), -1), "scale", f"{DOWN}.weight_scale", "1 of 2 are negative"),
    ("mx", put(f"{Q}.weight_scale", (0, 0), 255), "scale", f"{Q}.weight_scale", "1 of 512 are NaN (255)"),
    ("static", put(f"{Q}.input_scale", 0, 0), "scale", f"{Q}.input_scale", "1 of 1 are zero"),
    ("channel", put(f"{Q}.weight", (5, 5), 0xFF), "tensor", f"{Q}.weight", "must be finite: 1 of 16384 are NaN"),
    ("channel", put("model.norm.weight", 4, torch.inf), "tensor", "model.norm.weight", "must be finite: 1 of 128"),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: 1 / s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("tensor", replaced(f"{Q}.weight_scale", lambda s: 1 / s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("fp8", replaced(f"{Q}.weight_scale_inv", lambda s: 1 / s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("mx", replaced(f"{Q}.weight_scale", lambda s: 254 - s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: s * 2), "weights", f"{Q}.weight", "128 of 128 scales are not"),
    ("block", replaced(f"{DOWN}.weight_scale", lambda s: s * 0.7), "weights", f"{DOWN}.weight", "2 of 2 scales are"),
    ("mx", put(f"{Q}.weight_scale", (9, 1), 110), "weights", f"{Q}.weight", "1 of 512 scales are not: [9, 1] is "),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: s[:64]), "scale", f"{Q}.weight_scale", "have shape [128, 1]"),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: s.T), "scale", f"{Q}.weight_scale", "it has [1, 128]"),
    ("channel", replaced(f"{Q}.weight_scale", torch.Tensor.double), "scale", f"{Q}.weight_scale", "it is F64"),
    ("channel", replaced(f"{Q}.weight", lambda w: w[:64]), "tensor", f"{Q}.weight", "must have shape [128, 128]"),
    ("channel", renamed(f"{Q}.weight_scale", f"{Q}.weight_scale_inv"), "scale", f"{Q}.weight_scale", "another layout"),
    ("fp8", renamed(f"{Q}.weight_scale_inv", f"{Q}.scale"), "scale", f"{Q}.weight_scale_inv", "is missing"),
    ("static", renamed(f"{Q}.input_scale", f"{Q}.old_scale"), "scale", f"{Q}.input_scale", "is missing"),
    ("channel", renamed("model.norm.weight", "model.norm.w"), "tensor", "model.norm.weight", "is missing, and the"),
    ("channel", renamed(f"{Q}.weight", f"{Q}.w"), "tensor", f"{Q}.weight", "is missing, and the model needs it"),
    (
        "channel", replaced(f"{Q}.weight", lambda w: w.float().bfloat16()), "config", f"{Q}.weight",
        f"is stored in BF16, and the list of ignored modules lacks {Q}",
    ),
    (
        "channel", replaced(f"{Q}.weight", lambda w: w.view(torch.uint8).flip(0).view(w.dtype)), "weights",
        f"{Q}.weight", "the bytes are not MODEL's weight",
    ),
    (
        "channel", replaced("model.norm.weight", lambda w: w * 1.5), "weights", "model.norm.weight",
        "is not MODEL's, rounded to torch.bfloat16",
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TENSORS)))
def test_tensors(good: dict[str, Path], model: Path, tmp_path: Path, number: int) -> None:
    name, damage, kind, where, message = TENSORS[number]
    expect(verify(damaged(good[name], tmp_path / "bad", damage), model), kind, where, message)


def test_another_model(good: dict[str, Path], tmp_path: Path) -> None:
    """Of the same sizes, of other sizes, and of another architecture."""
    report = verify(good["block"], make_model(tmp_path / "seed", "llama", seed=1))
    assert any("the bytes are not MODEL's weight" in str(finding) for finding in report.findings)
    report = verify(good["block"], make_model(tmp_path / "wide", "llama", intermediate_size=384))
    assert any("MODEL has shape [384, 128], the folder [256, 128]" in str(finding) for finding in report.findings)
    report = verify(good["block"], make_model(tmp_path / "opt", "opt"))
    assert any("MODEL has no such tensor: the folder is of another model" in str(f) for f in report.findings)


def test_a_tensor_in_two_files(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        [first, second, *_] = sorted(folder.glob("model-*"))
        names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        save_file({name: torch.zeros(1) for name, file in names.items() if file in (first.name, second.name)}, second)

    report = verify(damaged(good["shards"], tmp_path / "bad", damage), model)
    assert any("is in two files, model-00001" in finding.message for finding in report.findings)


def test_a_damaged_model_is_the_users_error(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is truncated or not a safetensors file"):
        verify(good["channel"], damaged(model, tmp_path / "model", cut))


def test_right_folders_have_no_findings(good: dict[str, Path], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification_pipeline, "try_readers", lambda *_: iter(()))
    for folder in good.values():
        assert not verify(folder, model).findings
