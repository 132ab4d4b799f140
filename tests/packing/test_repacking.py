"""Packed folders unpacked, converted and listed; the numbers in float64 from the files' own bytes."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from packed_examples import small_shards
from safetensors.torch import load_file
from tiny_models import make_model, same_bits, same_bytes
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner
from verify_examples import change_tensors

from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.reader import PackedTensors
from octavo.packing import convert_layout, pack, unpack
from octavo.runtime import load_packed
from octavo_cli.app import app


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A BF16 model, and its packings."""
    root = tmp_path_factory.mktemp("folders")
    make_model(root / "bf16", "qwen2", num_hidden_layers=1, tie_word_embeddings=False)
    for scheme in ("channel", "tensor", "block", "mx"):
        pack(root / "bf16", root / scheme, scheme=scheme)
    with small_shards(50_000):
        pack(root / "bf16", root / "mixed", layers={"*.o_proj": "block"}, skip=["*.down_proj"])
    return {path.name: path for path in root.iterdir()}


def wide(folder: Path) -> dict[str, Tensor]:
    packed = PackedTensors(folder)
    return {name: packed.weight(name).dequantize(torch.float64) for name in packed.packing.schemes}


@pytest.mark.parametrize("name", ["channel", "tensor", "block", "mx", "mixed"])
def test_unpacked_is_data_times_scale_in_bf16(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    unpack(folders[name], tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values())
    state, original = model.state_dict(), load_file(folders["bf16"] / "model.safetensors")
    weights = wide(folders[name])
    assert len(weights) == (6 if name == "mixed" else 7)
    for key, weight in weights.items():
        assert torch.equal(state[f"{key}.weight"], weight.bfloat16())
    for key, tensor in original.items():
        if key.removesuffix(".weight") not in weights:
            assert torch.equal(state[key], tensor)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").exists() == (folders["bf16"] / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("name", "layout", "scheme"),
    [("block", "fp8", None), ("block", "compressed-tensors", "block"), ("tensor", "compressed-tensors", "channel"),
     ("mixed", "compressed-tensors", None)],
)  # fmt: skip
def test_what_holds_the_same_scales_loses_nothing(
    folders: dict[str, Path], tmp_path: Path, name: str, layout: str, scheme: str | None
) -> None:
    result = convert_layout(folders[name], tmp_path / "out", layout=layout, scheme=scheme)
    assert result.lossless
    before, after = wide(folders[name]), wide(tmp_path / "out")
    assert same_bits(before, after)
    back = convert_layout(tmp_path / "out", tmp_path / "back")
    assert back.lossless
    if scheme is None and name != "mixed":
        assert same_bytes(tmp_path / "back", folders[name])
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    load_packed(tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "scheme"), [("channel", "block"), ("block", "mx"), ("mx", "channel"), ("channel", "tensor")]
)
def test_what_is_cast_again_states_its_loss(folders: dict[str, Path], tmp_path: Path, name: str, scheme: str) -> None:
    result = convert_layout(folders[name], tmp_path / "out", scheme=scheme)
    assert not result.lossless
    before, after = wide(folders[name]), wide(tmp_path / "out")
    for key, db in result.sqnr.items():
        noise = (before[key] - after[key]).square().sum()
        assert db == pytest.approx(float(10 * torch.log10(before[key].square().sum() / noise)), abs=1e-3)
        assert 20 < db < 60
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    assert record["sqnr_db"] == pytest.approx(result.sqnr)
    assert {PackedTensors(tmp_path / "out").packing.schemes[key].name for key in before} == {scheme}


def test_what_cannot_be_converted(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp8 holds the scheme block alone, not channel"):
        convert_layout(folders["channel"], tmp_path / "out", layout="fp8")
    with pytest.raises(ValueError, match="unknown layout 'gguf'"):
        convert_layout(folders["channel"], tmp_path / "out", layout="gguf")
    with pytest.raises(ValueError, match="unknown scheme"):
        convert_layout(folders["channel"], tmp_path / "out", scheme="int4")
    for act in (unpack, convert_layout):
        with pytest.raises(ArtifactError, match="has no quantization_config, so the model is not packed"):
            act(folders["bf16"], tmp_path / "out")
        with pytest.raises(FileExistsError):
            act(folders["channel"], folders["mx"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({"k.weight_scale": torch.ones(4, 1)}),
            "k.weight must be a matrix of torch.float8_e4m3fn, it is missing",
        ),
        (lambda t: t.pop(NAME), "up_proj.weight_scale is missing, and .*up_proj.weight is packed"),
        (lambda t: t.update({NAME: torch.ones(128)}), r"weight_scale must be .*\[256, 1\], it is .*\[128, 1\]"),
        (lambda t: t.update({NAME: torch.ones(256, 1).double()}), "up_proj.* must be .*float32.*it is .*float64"),
    ],
)  # fmt: skip
def test_damaged_folders(folders: dict[str, Path], tmp_path: Path, change, message: str) -> None:
    shutil.copytree(folders["channel"], tmp_path / "bad")
    change_tensors(tmp_path / "bad", change)
    with pytest.raises(ArtifactError, match=message):
        PackedTensors(tmp_path / "bad")


NAME = "model.layers.0.mlp.up_proj.weight_scale"


# ---- the command line


def test_commands(folders: dict[str, Path], tmp_path: Path) -> None:
    run = CliRunner().invoke
    listed = json.loads(run(app, ["inspect", str(folders["mixed"]), "--json"]).output)
    assert listed["layout"] == "compressed-tensors"
    rows = {row["tensor"]: row for row in listed["tensors"]}
    o_proj = rows["model.layers.0.self_attn.o_proj.weight"]
    assert (o_proj["scheme"], o_proj["scales"], o_proj["bytes"]) == ("block", 1, 128 * 128 + 4)
    weight = load_file(folders["bf16"] / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert o_proj["largest"] == pytest.approx(float(weight.abs().max()) / 448)
    assert rows["model.layers.0.mlp.down_proj.weight"]["dtype"] == "bfloat16"
    assert listed["bytes"] == sum(row["bytes"] for row in listed["tensors"])
    text = run(app, ["inspect", str(folders["mixed"])], env={"COLUMNS": "200"}).output
    assert "6 layers packed, 2 linear layers in BF16" in text
    done = run(app, ["convert-layout", str(folders["block"]), str(tmp_path / "hf"), "--layout", "fp8"])
    assert "no weight changed" in done.output
    lossy = run(
        app, ["convert-layout", str(tmp_path / "hf"), str(tmp_path / "mx"), "--scheme", "mx"], env={"COLUMNS": "200"}
    )
    assert "7 of 7 weights were cast again" in lossy.output
    assert "dB, lowest " in lossy.output
    assert run(app, ["unpack", str(tmp_path / "mx"), str(tmp_path / "plain")]).exit_code == 0
    assert math.isfinite(float(load_file(tmp_path / "plain" / "model.safetensors")["model.norm.weight"].sum()))
