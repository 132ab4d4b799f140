"""Files, settings and tensors with planted damage: one clear finding that names it, nothing run, and no traceback."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import cut, edit, put, replaced
from safetensors.torch import save_file
from tiny_models import make_model
from torch import Tensor
from verify_examples import Damage, change_config, change_json, damaged, expect

from octavo.verification import verify
from octavo.verification.findings import Report

pytestmark = pytest.mark.usefixtures("no_reader")
Judge = Callable[[str, Damage], Report]


@pytest.fixture
def judge(good: dict[str, Path], model: Path, tmp_path: Path) -> Judge:
    """judge(name, damage): the report of a packing with damage."""
    return lambda name, damage: verify(damaged(good[name], tmp_path / "bad", damage), model)


Q = "model.layers.1.self_attn.q_proj"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def removed(name: str) -> Damage:
    """The first file whose name matches is removed."""
    return lambda folder: min(folder.glob(name)).unlink()


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def index(change: Callable[[dict[str, str]], Any]) -> Damage:
    """Change the files of tensors that the index lists."""
    return lambda folder: change_json(folder / INDEX, lambda content: change(content["weight_map"]))


def placed(tensor: str, file: str) -> Damage:
    """Let the index list a tensor for another file."""
    return index(lambda files: files.update({tensor: file}))


def written_twice(folder: Path) -> None:
    """All tensors of the first shard are in the second, too."""
    [first, second, *_] = sorted(folder.glob("model-*"))
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    save_file({name: torch.zeros(1) for name, file in names.items() if file in (first.name, second.name)}, second)


FILES: list[tuple[str, Damage, str, str, str]] = [
    ("channel", write(SINGLE, b"\x80\x02}q\x00."), "file", SINGLE, "is truncated or not a safetensors file"),
    ("channel", write(SINGLE, b"\xff" * 64), "file", SINGLE, "is truncated or not a safetensors file"),
    ("channel", removed(SINGLE), "file", SINGLE, "the folder has no tensors"),
    ("channel", write("config.json", b"{"), "file", "config.json", "is not valid JSON"),
    ("channel", write("config.json", b"\xff\xfe{"), "file", "config.json", "is not valid JSON"),
    ("channel", write("config.json", b"[]"), "file", "config.json", "must hold a JSON object, it holds list"),
    ("channel", write("config.json", b'{"a": 1}'), "config", "config.json", "transformers cannot build the model"),
    ("channel", removed("config.json"), "file", "config.json", "is missing"),
    ("channel", write("training.bin", b"x"), "pickle", "training.bin", "was not opened: move it elsewhere"),
    ("shards", write(INDEX, b"{}"), "file", INDEX, "must map the name of each tensor"),
    (
        "shards", placed(f"{Q}.weight", "../../secret.safetensors"), "file", INDEX,
        "'../../secret.safetensors', which is outside of the",
    ),
    ("shards", placed(f"{Q}.weight", "/etc/passwd"), "file", INDEX, "'/etc/passwd', which is outside"),
    (
        "shards", placed(f"{Q}.weight", "pytorch_model.bin"), "file", INDEX,
        "'pytorch_model.bin', which is not a safetensors",
    ),
    ("shards", index(lambda files: files.pop("model.norm.weight")), "tensor", "model.norm.weight", "does not list it"),
    (
        "shards", index(lambda files: files.update({"model.extra": files["model.norm.weight"]})), "tensor",
        "model.extra", "is missing in model-",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "kind", "where", "message"), FILES)
def test_files(judge: Judge, name: str, damage: Damage, kind: str, where: str, message: str) -> None:
    report = judge(name, damage)
    if message.startswith("'"):  # the tensor of a file that was not opened is missing, too
        report.findings = [finding for finding in report.findings if finding.kind == kind]
    expect(report, kind, where, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed("model-*"), "is missing, and model.safetensors.index.json names it"),
        (written_twice, "is in two files, model-00001"),
    ],
)
def test_damaged_shards(judge: Judge, damage: Damage, message: str) -> None:
    assert any(message in finding.message for finding in judge("shards", damage).findings)


def test_no_folder(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path / 'none'}: give a packed folder"):
        verify(tmp_path / "none", model)


class Evil:
    """Its pickle makes a directory when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_is_never_loaded(judge: Judge, tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        (folder / SINGLE).unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(tmp_path / "harm"))))

    expect(judge("channel", damage), "pickle", "pytorch_model.bin", "can run code, and was not opened")
    assert not (tmp_path / "harm").exists()


def test_a_damaged_model_is_the_users_error(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is truncated or not a safetensors file"):
        verify(good["channel"], damaged(model, tmp_path / "model", cut))


def groups(**settings: Any) -> dict[str, Any]:
    base = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return {"g": {"targets": ["Linear"], "weights": base | settings, "input_activations": inputs}}


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq"}, "quant_method must be one of compressed-tensors, fp8, modelopt, torchao, it is 'gptq'"),
    ({"quant_method": None}, "it is None"),
    (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "must state a weight_block_size, or null: this is AutoFP8",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo must be one of FP8, "),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4", "_data": 3}}}, "must be one Float8Dyn"),
    ({"quant_method": "torchao", "quant_type": "int8"}, "PerRow or PerTensor; it is 'int8'"),
    ({"format": "pack-quantized"}, "format must be one of float-quantized"),
    ({"config_groups": {}}, "config_groups must hold groups, it is {}"),
    ({"config_groups": {"g": 3}}, "config_groups.g must have targets (names) and weights, it is 3"),
    ({"config_groups": groups(num_bits=4)}, "must have num_bits 8, type float or int, and symmetric true; it has 4"),
    ({"config_groups": groups(strategy="diagonal")}, "strategy must be tensor, channel, group"),
    ({"ignore": "lm_head"}, "ignore must be a list of names of modules"),
    ({"ignore": ["model.layers.7.o"]}, "has 'model.layers.7.o', which is not a linear layer"),
    ({"ignore": ["lm_head", "model.layers.7.o"]}, "has 'model.layers.7.o', which is not a linear layer"),
    ({"config_groups": groups(strategy="block", block_structure=[64, 64])}, "must have shape"),
    ({"config_groups": groups(strategy="group", group_size=48)}, "not a multiple of its blocks of 1 x 48"),
    ({"config_groups": groups(type="int")}, "must be I8, it is F8_E4M3"),
    ({"config_groups": groups(scale_dtype="torch.uint8")}, "must be U8 or F8_E8M0, it is F32"),
]


@pytest.mark.parametrize(("settings", "message"), CONFIGS)
def test_configurations(judge: Judge, settings: dict[str, Any], message: str) -> None:
    report = judge("channel", lambda folder: change_config(folder, **settings))
    assert any(message in str(finding) for finding in report.findings), [str(f) for f in report.findings]
    assert {finding.kind for finding in report.findings} <= {"config", "scale", "tensor"}
    assert report.not_run


def test_no_quantization_config(good: dict[str, Path], model: Path) -> None:
    report = verify(model, model)
    expect(report, "config", "config.json", "must have a quantization_config, it has None")


# ---- Tensors with planted damage: one clear finding that names it, nothing run, and no traceback


DOWN = "model.layers.0.mlp.down_proj"


def renamed(old: str, new: str) -> Damage:
    return edit(lambda tensors: tensors.update({new: tensors.pop(old)}))


# Beside the faults of test_faults.py.
TENSORS: list[tuple[str, Damage, str, str, str]] = [
    ("channel", put(f"{Q}.weight_scale", (3, 0), torch.inf), "scale", f"{Q}.weight_scale", "1 of 128 are inf"),
    (
        "channel", put(f"{Q}.weight_scale", (3, 0), 1e-44), "scale", f"{Q}.weight_scale",
        "1 of 128 are below 2^-127, and 1 / scale overflows",
    ),
    ("channel", replaced(f"{Q}.weight_scale", lambda s: s * 1e31), "weights", f"{Q}.weight", "128 of 128 scales are"),
    ("block", put(f"{DOWN}.weight_scale", (0, 1), -1), "scale", f"{DOWN}.weight_scale", "1 of 2 are negative"),
    ("mx", put(f"{Q}.weight_scale", (0, 0), 255), "scale", f"{Q}.weight_scale", "1 of 512 are NaN (255)"),
    ("static", put(f"{Q}.input_scale", 0, 0), "scale", f"{Q}.input_scale", "1 of 1 are zero"),
    ("channel", put("model.norm.weight", 4, torch.inf), "tensor", "model.norm.weight", "must be finite: 1 of 128"),
    ("fp8", replaced(f"{Q}.weight_scale_inv", lambda s: 1 / s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("mx", replaced(f"{Q}.weight_scale", lambda s: 254 - s), "weights", f"{Q}.weight", "the scale is reciprocal"),
    ("block", replaced(f"{DOWN}.weight_scale", lambda s: s * 0.7), "weights", f"{DOWN}.weight", "2 of 2 scales are"),
    ("channel", replaced(f"{Q}.weight_scale", Tensor.double), "scale", f"{Q}.weight_scale", "it is F64"),
    ("channel", renamed(f"{Q}.weight_scale", f"{Q}.weight_scale_inv"), "scale", f"{Q}.weight_scale", "another layout"),
    ("fp8", renamed(f"{Q}.weight_scale_inv", f"{Q}.scale"), "scale", f"{Q}.weight_scale_inv", "is missing"),
    ("static", renamed(f"{Q}.input_scale", f"{Q}.old_scale"), "scale", f"{Q}.input_scale", "is missing"),
    ("channel", renamed("model.norm.weight", "model.norm.w"), "tensor", "model.norm.weight", "is missing, and the"),
    ("channel", renamed(f"{Q}.weight", f"{Q}.w"), "tensor", f"{Q}.weight", "is missing, and the model needs it"),
    (
        "channel", replaced(f"{Q}.weight", lambda w: w.float().bfloat16()), "config", f"{Q}.weight",
        f"is stored in BF16, and the list of ignored modules lacks {Q}",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "kind", "where", "message"), TENSORS)
def test_tensors(judge: Judge, name: str, damage: Damage, kind: str, where: str, message: str) -> None:
    expect(judge(name, damage), kind, where, message)


def test_another_model(good: dict[str, Path], tmp_path: Path) -> None:
    """It has the same sizes, other sizes, or another architecture."""
    report = verify(good["block"], make_model(tmp_path / "seed", "llama", seed=1))
    assert any("the bytes are not MODEL's weight" in str(finding) for finding in report.findings)
    report = verify(good["block"], make_model(tmp_path / "wide", "llama", intermediate_size=384))
    assert any("MODEL has shape [384, 128], the folder [256, 128]" in str(finding) for finding in report.findings)
    report = verify(good["block"], make_model(tmp_path / "opt", "opt"))
    assert any("MODEL has no such tensor: the folder is of another model" in str(f) for f in report.findings)
