"""The tensors of a folder under the names of the model, compared with those that transformers loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Folders, make_model, open_theirs

from octavo.artifact.files import ArtifactError
from octavo.hf.source import open_source


@pytest.mark.parametrize("name", ["vit", "dinov2", "swin", "gptneox"])
def test_renamed_tensors_are_those_that_transformers_loads(made: Folders, name: str) -> None:
    folder, theirs = made(name), open_theirs(made(name), torch.bfloat16).state_dict()
    source = open_source(folder)
    assert not source.specs.keys() <= load_file(folder / "model.safetensors").keys()  # some are renamed
    assert source.specs.keys() <= theirs.keys()
    assert source.left_out == []
    for tensor in source.specs:
        torch.testing.assert_close(source.get(tensor), theirs[tensor], rtol=0, atol=0)


def test_a_tensor_that_is_missing_has_the_name_of_the_model(tmp_path: Path) -> None:
    path = make_model(tmp_path, "vit") / "model.safetensors"
    tensors = load_file(path)
    del tensors["vit.encoder.layer.1.attention.attention.key.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"tensor vit\.layers\.1\.attention\.k_proj\.weight is missing \(1 in all"):
        open_source(tmp_path)


def test_two_tensors_of_one_name_are_not_renamed(tmp_path: Path) -> None:
    path = make_model(tmp_path, "vit") / "model.safetensors"
    tensors = load_file(path)
    tensors["vit.layers.1.attention.k_proj.weight"] = torch.zeros(128, 128)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"lacks vit\.layers\..*, and has vit\.encoder\.layer"):
        open_source(tmp_path)


def test_a_folder_that_says_another_class_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "vit trunk") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["ViTForImageClassification"]}))
    with pytest.raises(ArtifactError, match="lacks"):
        open_source(tmp_path)
