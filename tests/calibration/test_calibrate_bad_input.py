"""Calibration of what cannot be calibrated, and calibrations that are damaged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from calibration_examples import write_model
from safetensors.torch import load_file, save_file

from octavo.artifact.files import ArtifactError
from octavo.calibration.folder import Calibration
from octavo.calibration.pipeline import calibrate
from octavo.calibration.statistics import BINS
from octavo.evaluation import PromptOptions
from octavo.text import DataError

PROMPTS = PromptOptions(samples=8, context=32, batch=4)


@pytest.fixture(scope="module")
def result(llama, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("result") / "out"
    calibrate(llama, data, out, prompts=PROMPTS)
    return out


def test_a_layer_that_saw_no_token_is_named(tmp_path, data):
    """Cross-attention, to which nobody gives what it attends to."""
    folder = write_model(tmp_path / "bert", "bert", is_decoder=True, add_cross_attention=True)
    with pytest.raises(
        ValueError, match=r"encoder\.layer\.0\.crossattention\.self\.query saw no token .* \(4 layers of"
    ):
        calibrate(folder, data, tmp_path / "out", prompts=PROMPTS)
    assert not (tmp_path / "out").exists()


def test_inf_is_an_error_that_names_the_site(model, tmp_path, data):
    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.layers.1.mlp.up_proj.weight" in tensors:
            tensors["model.layers.1.mlp.up_proj.weight"][7] = torch.nan
        save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.input: channel 7 holds inf or NaN"):
        calibrate(model, data, tmp_path / "out", prompts=PROMPTS)


def test_bad_models(model, tmp_path, data):
    index = model / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = "model.layers.1.mlp.up_proj.weight"

    def refused(error, match):
        with pytest.raises(error, match=match):
            calibrate(model, data, tmp_path / "out", prompts=PROMPTS)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    for path in ("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors"):
        index.write_text(json.dumps(good | {"weight_map": good["weight_map"] | {first: path}}))
        refused(ArtifactError, "its files must lie in the folder itself")
    index.write_text("{")
    refused(ArtifactError, "not valid JSON")
    index.write_text(json.dumps(good))
    shard = model / good["weight_map"][first]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    refused(ArtifactError, rf"{shard.name} is truncated or not a safetensors file")
    shard.unlink()
    refused(FileNotFoundError, rf"{shard.name} is missing")
    save_file(load_tensors_of(content, tmp_path) | {first: torch.zeros(3)}, shard)
    refused(ArtifactError, rf"{first} must have shape .* the file has \[3\]")
    for path in (*model.glob("*.safetensors"), index):
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    refused(ArtifactError, r"pytorch_model\.bin, a pickle")


def load_tensors_of(content: bytes, folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "again.safetensors"
    path.write_bytes(content)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    return tensors


def test_other_bad_input(llama, model, tmp_path, data):
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError, match="taken exists already"):
        calibrate(llama, data, tmp_path / "taken")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no GPU: use cpu"):
            calibrate(llama, data, tmp_path / "out", device="cuda")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"data must hold some text.*skipped 1: 1 empty"):
        calibrate(llama, [str(tmp_path / "empty.jsonl")], tmp_path / "out")
    small = write_model(tmp_path / "small", "llama", vocab_size=50)
    with pytest.raises(ArtifactError, match="the model has 50 embeddings: the tokenizer is of another model"):
        calibrate(small, data, tmp_path / "out")
    shutil.rmtree(small)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        calibrate(model, data, tmp_path / "out")


@pytest.mark.parametrize("damage", ["truncated", "version", "no field", "nan", "zero tokens", "site", "kind", "bin"])
def test_a_damaged_result_is_refused(damage, tmp_path, result):
    out = shutil.copytree(result, tmp_path / "out")
    described = json.loads((out / "calibration.json").read_text())
    tensors = load_file(out / "calibration.safetensors")
    site = "model.layers.0.self_attn.k"
    if damage == "version":
        described["format_version"] = 99
    elif damage == "no field":
        del described["tokens"]
    elif damage == "nan":
        tensors[f"{site}.channel_amax"][0] = torch.nan
    elif damage == "zero tokens":
        tensors[f"{site}.tokens"] *= 0
    elif damage == "site":
        described["sites"]["nowhere"] = {"kind": "norm", "layers": []}
    elif damage == "kind":
        described["sites"][site]["kind"] = "other"
    elif damage == "bin":
        tensors[f"{site}.first_bin"] += BINS
    (out / "calibration.json").write_text(json.dumps(described))
    save_file(tensors, out / "calibration.safetensors")
    if damage == "truncated":
        path = out / "calibration.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"calibration\.(json|safetensors)"):
        Calibration.load(out)
