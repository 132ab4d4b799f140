"""Tensors that transformers keeps in float32, such as the biases that choose the experts of GLM-4 and DeepSeek."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import IDS, make_model, open_theirs
from verify_examples import change_tensors

import octavo
from octavo.hf.block_by_block import BlockModel
from octavo.packing import pack
from octavo.verification import verify

NAME = "model.layers.1.mlp.gate.e_score_correction_bias"
BIAS = 8 + torch.tensor([1.0, 2.0, 3.0, 4.0]) / 128  # BF16 rounds all of them to 8


@pytest.fixture(scope="module", params=["glm4moe", "deepseekv3"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("source") / request.param, request.param)
    change_tensors(folder, lambda tensors: tensors.update({NAME: BIAS.clone()}))
    return folder


def test_they_are_packed_and_read_as_they_are(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed")
    assert torch.equal(load_file(tmp_path / "packed" / "model.safetensors")[NAME], BIAS)
    for model in (octavo.load(tmp_path / "packed"), open_theirs(tmp_path / "packed")):
        assert torch.equal(model.get_buffer(NAME), BIAS)
    found = verify(tmp_path / "packed", source)
    assert found.ok, [str(finding) for finding in found.findings]
    transformers = found.readers[0].distance
    assert transformers is not None
    assert (
        transformers < 0.01
    )  # DeepSeek's attention has inputs [B, 1, T, K], which compressed-tensors scales as one token


def test_a_folder_that_holds_them_in_bf16_is_widened(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed")
    change_tensors(tmp_path / "packed", lambda tensors: tensors.update({NAME: BIAS.bfloat16()}))
    assert torch.equal(octavo.load(tmp_path / "packed").get_buffer(NAME), BIAS.bfloat16().float())


def test_a_calibration_runs_with_them(source: Path) -> None:
    parts = BlockModel(source, "cpu")
    with parts.loaded_frame(), parts.loaded_block(1):
        assert torch.equal(parts.model.get_buffer(NAME), BIAS)
        assert parts.embed(IDS).shape == (*IDS.shape, 128)
