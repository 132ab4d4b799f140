"""Files and settings with planted damage: one clear finding that names it, nothing run, and no traceback."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from verify_examples import Damage, change_config, damaged, expect

from octavo.verification import verify

pytestmark = pytest.mark.usefixtures("no_reader")

Q = "model.layers.1.self_attn.q_proj"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def cut(folder: Path) -> None:
    path = folder / SINGLE
    os.truncate(path, path.stat().st_size - 100)


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def index(change: Callable[[dict[str, str]], Any]) -> Damage:
    """Change the files of tensors that the index lists."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return damage


def placed(tensor: str, file: str) -> Damage:
    """Let the index list a tensor for another file."""
    return index(lambda files: files.update({tensor: file}))


def list_another_tensor(files: dict[str, str]) -> None:
    files["model.extra"] = files["model.norm.weight"]


FILES: list[tuple[str, Damage, str, str, str]] = [
    ("channel", cut, "file", SINGLE, "is truncated or not a safetensors file"),
    ("channel", write(SINGLE, b"\x80\x02}q\x00."), "file", SINGLE, "is truncated or not a safetensors file"),
    ("channel", write(SINGLE, b"\xff" * 64), "file", SINGLE, "is truncated or not a safetensors file"),
    ("channel", removed(SINGLE), "file", SINGLE, "the folder has no tensors"),
    ("channel", write("config.json", b"{"), "file", "config.json", "is not valid JSON"),
    ("channel", write("config.json", b"\xff\xfe{"), "file", "config.json", "is not valid JSON"),
    ("channel", write("config.json", b"[]"), "file", "config.json", "must hold a JSON object, it holds list"),
    ("channel", write("config.json", b'{"a": 1}'), "config", "config.json", "transformers cannot build the model"),
    ("channel", removed("config.json"), "file", "config.json", "is missing"),
    ("channel", write("training.bin", b"x"), "pickle", "training.bin", "was not opened: delete it"),
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
    ("shards", index(list_another_tensor), "tensor", "model.extra", "is missing in model-"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "kind", "where", "message"), FILES)
def test_files(
    good: dict[str, Path], model: Path, tmp_path: Path, name: str, damage: Damage, kind: str, where: str, message: str
) -> None:
    report = verify(damaged(good[name], tmp_path / "bad", damage), model)
    if message.startswith("'"):  # the tensor of a file that was not opened is missing, too
        report.findings = [finding for finding in report.findings if finding.kind == kind]
    expect(report, kind, where, message)


def test_a_missing_shard(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    bad = damaged(good["shards"], tmp_path / "bad", lambda f: sorted(f.glob("model-*"))[0].unlink())
    report = verify(bad, model)
    assert "is missing, and model.safetensors.index.json names it" in report.findings[0].message


def test_no_folder(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path / 'none'}: give a packed folder"):
        verify(tmp_path / "none", model)


def test_a_tensor_in_two_files(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        [first, second, *_] = sorted(folder.glob("model-*"))
        names = json.loads((folder / INDEX).read_text())["weight_map"]
        save_file({name: torch.zeros(1) for name, file in names.items() if file in (first.name, second.name)}, second)

    report = verify(damaged(good["shards"], tmp_path / "bad", damage), model)
    assert any("is in two files, model-00001" in finding.message for finding in report.findings)


class Evil:
    """Its pickle makes a directory when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_is_never_loaded(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        (folder / SINGLE).unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(tmp_path / "harm"))))

    report = verify(damaged(good["channel"], tmp_path / "bad", damage), model)
    expect(report, "pickle", "pytorch_model.bin", "can run code, and was not opened")
    assert not (tmp_path / "harm").exists()


def test_a_damaged_model_is_the_users_error(good: dict[str, Path], model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is truncated or not a safetensors file"):
        verify(good["channel"], damaged(model, tmp_path / "model", cut))


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
