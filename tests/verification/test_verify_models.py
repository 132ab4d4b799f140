"""Right folders of models that readers treat specially: every reader agrees, with a margin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from verify_examples import make_model, write_text

from octavo.artifact.files import read_json
from octavo.evaluation import PromptOptions
from octavo.evaluation.metrics import LogitQuality
from octavo.hf.meta_model import compute_buffers, transformers_meta_model
from octavo.packing import pack
from octavo.verification.pipeline import verify


def test_gemma2_whose_embedding_has_a_buffer_beside_its_weight(tmp_path: Path) -> None:
    model, text = make_model(tmp_path / "model", "gemma2"), write_text(tmp_path / "text.txt")
    pack(model, tmp_path / "out")
    report = verify(tmp_path / "out", model, [str(text)], prompts=PromptOptions(8, batch=4))
    assert not report.findings
    transformers, octavo, _ = report.readers
    assert transformers.distance is not None
    assert transformers.distance < 1e-5
    assert octavo.outcome == "agrees"
    assert isinstance(report.quality, LogitQuality)
    assert report.quality.kl.value < 0.1
    assert report.quality.top1.value > 0.7


def test_weights_that_are_filled_are_not_initialized_again(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gemma2")
    model = transformers_meta_model(read_json(folder / "config.json"), folder).model
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(torch.ones(embedding.weight.shape))
    with pytest.raises(RuntimeError, match="Gemma2TextScaledWordEmbedding would be initialized again"):
        compute_buffers(model, "cpu")
    assert torch.equal(embedding.weight, torch.ones_like(embedding.weight))


# OPT's decoder layers flatten their MLP's input to [T, K]; compressed-tensors then scales it as one tensor.
FLAT = [
    ("opt", {}, 0), ("gpt2", {}, 0), ("gpt2", {}, 1), ("gpt2", {"scheme": "tensor"}, 0), ("gpt2", {"pow2": True}, 0),
    ("gpt2", {"pow2": True}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "seed"), FLAT)
def test_a_reader_that_scales_inputs_of_two_dimensions_as_one_tensor(
    tmp_path: Path, name: str, options: dict[str, Any], seed: int
) -> None:
    model = make_model(tmp_path / "model", name, seed)
    pack(model, tmp_path / "out", **options)
    report = verify(tmp_path / "out", model)
    assert not report.findings
    transformers = report.readers[0]
    assert transformers.distance is not None
    assert transformers.tolerance is not None
    assert transformers.distance < transformers.tolerance / 20 < 0.01  # above 0 if a tie rounds to the other side


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    pack(model, tmp_path / "out")
    report = verify(tmp_path / "out", model)
    assert report.ok
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]
    assert any("has no tokenizer" in remark for remark in report.remarks)
