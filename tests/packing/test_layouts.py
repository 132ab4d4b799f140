"""The layouts that vLLM alone opens: written, read back, and converted.

Oracles: the names and shapes that the loaders of vLLM and ModelOpt read, from their sources (`VLLM` below), and bytes
for everything that must not change.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Folders, outputs, same_bytes
from typer.testing import CliRunner
from verify_examples import change_config, change_tensors

from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.reader import PackedTensors
from octavo.packing import convert_layout, pack, unpack
from octavo.runtime import load_packed
from octavo_cli.app import app

# The suffix and shape of what lies beside a weight [256, 128], by layout and scheme, as vLLM's loaders want it.
VLLM: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("modelopt", "static"): {"weight_scale": (), "input_scale": ()},
    ("modelopt", "channel"): {"weight_scale": (256,)},
    ("modelopt", "block"): {"weight_scale": (2, 1, 1, 1)},
    ("autofp8", "static"): {"weight_scale": (), "input_scale": ()},
    ("autofp8", "tensor"): {"weight_scale": ()},
}
UP, ATTENTION = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn"


@pytest.mark.parametrize(("layout", "scheme"), VLLM)
def test_names_and_shapes_are_those_that_vllm_reads(made: Folders, layout: str, scheme: str) -> None:
    folder = made("llama", scheme=scheme, layout=layout, kv_cache="fp8")
    stored = load_file(folder / "model.safetensors")
    beside = {name.removeprefix(f"{UP}."): tuple(t.shape) for name, t in stored.items() if name.startswith(UP)}
    assert beside == {"weight": (256, 128), **VLLM[layout, scheme]}
    cache = {name: t for name, t in stored.items() if name.endswith(("k_scale", "v_scale"))}
    dot = {"modelopt": ("k_proj.", "v_proj."), "autofp8": ("", "")}[layout]
    assert set(cache) == {f"model.layers.{i}.self_attn.{dot[j]}{'kv'[j]}_scale" for i in range(2) for j in range(2)}
    assert all(t.dtype == torch.float32 and t.shape == () for t in cache.values())
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    if layout == "autofp8":
        activations = {"static": "static", "tensor": "dynamic"}[scheme]
        assert config == {
            "quant_method": "fp8", "activation_scheme": activations, "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
        }  # fmt: skip
        return
    algorithm = {"static": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}[scheme]
    assert (config["quant_method"], config["quant_algo"], config["ignore"]) == ("modelopt", algorithm, ["lm_head"])
    assert (config["kv_cache_scheme"]["type"], config["kv_cache_scheme"]["num_bits"]) == ("float", 8)
    beside = json.loads((folder / "hf_quant_config.json").read_text())
    assert beside["quantization"] == {
        "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]
    }  # fmt: skip


@pytest.mark.parametrize("cache", [None, "fp8"])
@pytest.mark.parametrize(("layout", "scheme"), VLLM)
def test_there_and_back_again_changes_no_bit(
    made: Folders, tmp_path: Path, layout: str, scheme: str, cache: str | None
) -> None:
    plain, packed = (
        made("llama", scheme=scheme, layout=name, kv_cache=cache) for name in ("compressed-tensors", layout)
    )
    assert convert_layout(plain, tmp_path / "there", layout=layout).lossless
    assert convert_layout(tmp_path / "there", tmp_path / "back").lossless
    assert same_bytes(tmp_path / "there", packed)
    assert same_bytes(tmp_path / "back", plain)
    assert json.loads((tmp_path / "there" / "config.json").read_text()) == json.loads(
        (packed / "config.json").read_text()
    )
    assert (tmp_path / "there" / "hf_quant_config.json").exists() == (layout == "modelopt")
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()
    assert torch.equal(outputs(load_packed(packed).model), outputs(load_packed(plain).model))
    for name, (k, v) in PackedTensors(packed).kv_scales.items():
        assert (k, v) == PackedTensors(plain).kv_scales[name]
    unpack(packed, tmp_path / "from packed")
    unpack(plain, tmp_path / "from plain")
    assert same_bytes(tmp_path / "from packed", tmp_path / "from plain")


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_folders_as_modelopt_writes_them(made: Folders, tmp_path: Path, file: str) -> None:
    """Scales [1], layers left out by patterns, the configuration in either file, a name in small letters."""
    folder = shutil.copytree(made("llama", scheme="static", layout="modelopt", kv_cache="fp8"), tmp_path / "theirs")
    change_tensors(folder, lambda t: t.update({name: x.reshape(1) for name, x in t.items() if x.ndim == 0}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_algo": "fp8", "ignore": ["lm_head*", "vision*"]}
    if file != "config.json":
        del config["quantization_config"]
        beside = json.loads((folder / file).read_text())
        beside["quantization"]["exclude_modules"] = ["lm_head*"]
        (folder / file).write_text(json.dumps(beside))
    (folder / "config.json").write_text(json.dumps(config))
    assert "lm_head" in PackedTensors(folder).ignored
    before = made("llama", scheme="static", layout="modelopt", kv_cache="fp8")
    assert torch.equal(outputs(load_packed(folder).model), outputs(load_packed(before).model))
    convert_layout(folder, tmp_path / "again", layout="autofp8")
    load_packed(tmp_path / "again")


@pytest.mark.parametrize("names", ["kv_scale", "output_scale"])
def test_folders_as_autofp8_writes_them(made: Folders, tmp_path: Path, names: str) -> None:
    folder = shutil.copytree(made("llama", scheme="static", layout="autofp8", kv_cache="fp8"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    ours = PackedTensors(folder).kv_scales
    for name, (k, v) in ours.items():
        del tensors[f"{name}.k_scale"], tensors[f"{name}.v_scale"]
        if names == "kv_scale":
            tensors[f"{name}.kv_scale"] = k.clone()
        else:
            tensors |= {f"{name}.k_proj.output_scale": k.clone(), f"{name}.v_proj.output_scale": v.clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, kv_cache_scheme=None)
    for name, (k, v) in PackedTensors(folder).kv_scales.items():
        assert (k, v) == (ours[name][0], ours[name][names == "output_scale"])
    load_packed(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layout": "modelopt", "scheme": "tensor"}, "modelopt holds the schemes static, channel, block, not tensor"),
        (
            {"layout": "autofp8", "scheme": "channel"},
            "autofp8 holds the schemes static, tensor, not channel: --sc",
        ),
        ({"layout": "autofp8", "scheme": "mx"}, "or --layout compressed-tensors, which holds any"),
        (
            {"layout": "modelopt", "scheme": "channel", "layers": {"*.o_proj": "block"}},
            "modelopt holds one scheme in a model, not block and channel",
        ),
    ],
)
def test_what_a_layout_does_not_hold(made: Folders, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(made("llama"), tmp_path / "out", **how)
    if "layers" not in how:
        source = made("llama", scheme=how["scheme"], kv_cache="fp8")
        with pytest.raises(ValueError, match=message):
            convert_layout(source, tmp_path / "out", layout=how["layout"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', octavo runs FP8, FP8_PER_CHANNEL_PER_TOKEN"),
        (
            "modelopt",
            {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
            "num_bits is 4, required 8",
        ),
        ("modelopt", {"ignore": "lm_head"}, "ignore must be a list of module names, got 'lm_head'"),
        ("autofp8", {"activation_scheme": "token"}, "activation_scheme is 'token', required 'dynamic'"),
        ("autofp8", {"ignored_layers": ["lm_head", "re:.*up_proj"]}, "up_proj.input_scale has no place in the model"),
        ("autofp8", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\], required \[128, 128\]"),
    ],
)
def test_another_packing_is_refused(
    made: Folders, tmp_path: Path, layout: str, change: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(made("llama", scheme="static", layout=layout, kv_cache="fp8"), tmp_path / "bad")
    change_config(folder, **change)
    with pytest.raises(ArtifactError, match=message):
        load_packed(folder)


def test_scales_of_another_shape_are_refused(made: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(made("llama", scheme="block", layout="modelopt", kv_cache="fp8"), tmp_path / "bad")
    change_tensors(folder, lambda tensors: tensors.update({f"{UP}.weight_scale": torch.ones(1, 2, 1, 1)}))
    for opened in (PackedTensors, load_packed):
        with pytest.raises(ArtifactError, match=r"up_proj"):
            opened(folder)


# ---- the command line


@pytest.mark.parametrize(("scheme", "said"), [("group32", True), ("channel", False)])
def test_who_does_not_open_groups_is_said(made: Folders, tmp_path: Path, scheme: str, said: bool) -> None:
    done = CliRunner().invoke(app, ["pack", str(made("llama")), str(tmp_path / "out"), "--scheme", scheme])
    assert done.exit_code == 0, done.output
    assert ("not for vLLM" in done.output) == said


def test_commands(made: Folders, tmp_path: Path) -> None:
    run, out = CliRunner().invoke, tmp_path / "out"
    calibrated, source = str(made("llama", "calibrated")), str(made("llama"))
    done = run(
        app,
        ["pack", source, str(out), "--layout", "modelopt", "--scheme", "static", "--calibration", calibrated,
         "--kv-cache", "fp8", "--tensor-parallel", "1,2,4"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "for vLLM and TensorRT-LLM: transformers computes nonsense" in done.output
    listed = json.loads(run(app, ["inspect", str(out), "--json"]).output)
    assert listed["layout"] == "modelopt"
    rows = {row["tensor"]: row for row in listed["tensors"]}
    k, v = PackedTensors(out).kv_scales[ATTENTION]
    assert rows[f"{ATTENTION}.k_proj.k_scale"]["least"] == float(k)
    assert rows[f"{ATTENTION}.v_proj.v_scale"]["largest"] == float(v)
    assert rows[f"{UP}.weight"]["input_scale"] > 0
    assert listed["bytes"] == sum(row["bytes"] for row in listed["tensors"])
    assert "kv cache" in run(app, ["inspect", str(out)], env={"COLUMNS": "200"}).output
    converted = run(app, ["convert-layout", str(out), str(tmp_path / "again"), "--layout", "autofp8"])
    assert "no weight changed" in converted.output
    wrong = run(app, ["pack", source, str(tmp_path / "no"), "--tensor-parallel", "two"])
    assert isinstance(wrong.exception, ValueError)
    assert "such as 1,2,4,8, got 'two'" in str(wrong.exception)
