"""Right folders of models that readers treat specially: every reader agrees, with a margin."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Folders, make_model
from torch import nn
from verify_examples import run_verify

import octavo
from octavo.artifact.files import read_json
from octavo.evaluation.metrics import EmbeddingQuality, LogitQuality
from octavo.hf.meta_model import MetaModel, compute_buffers, transformers_meta_model
from octavo.packing import pack
from octavo.verification import pipeline
from octavo.verification.pipeline import verify


def test_gemma2_whose_embedding_has_a_buffer_beside_its_weight(made: Folders) -> None:
    report = run_verify(made("gemma2", scheme="channel"), made("gemma2"))
    assert not report.findings
    transformers, octavo, _ = report.readers
    assert transformers.distance is not None
    assert transformers.distance < 1e-5
    assert octavo.outcome == "agrees"
    assert isinstance(report.quality, LogitQuality)
    assert report.quality.kl.value < 0.1
    assert report.quality.top1.value > 0.7


@pytest.mark.parametrize("name", ["bert masked", "roberta"])
def test_encoders_with_a_head_and_with_positions_that_begin_later(made: Folders, name: str) -> None:
    """transformers widens packed weights in a hook of the whole model, and an encoder's outputs are those of a part.

    RoBERTa's first position is 2, so 66 positions are for 64 tokens: the prompts are as long as the model can see.
    """
    report = run_verify(made(name, scheme="channel"), made(name))
    assert not report.findings
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]


def test_the_reference_convolves_in_float32(made: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, TF32 would move the reference by more than a reader of the scheme `weight` may differ."""
    seen = []

    def conv2d(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch.backends.cudnn.allow_tf32)
        return torch.conv2d(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "conv2d", conv2d)
    monkeypatch.setattr(pipeline, "try_readers", lambda *_: iter(()))
    verify(made("vit", scheme="weight"), made("vit"))
    assert seen == [False] * 4  # the references
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", ["t5", "t5 trunk", "t5 encoder", "bart", "bart trunk"])
def test_models_with_an_encoder_run_on_text(made: Folders, name: str) -> None:
    report = run_verify(made(name, scheme="channel"), made(name))
    assert not report.findings
    assert not report.remarks
    transformers, octavo, vllm = report.readers
    assert transformers.distance is not None
    assert transformers.distance < 1e-3
    assert (octavo.outcome, vllm.outcome) == ("agrees", "not run")
    assert isinstance(report.quality, LogitQuality if name in ("t5", "bart") else EmbeddingQuality)
    assert all(layer.output_sqnr is not None for layer in report.layers)  # every layer ran, of the decoder too


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_models_with_an_encoder_and_a_decoder_in_the_layout_fp8(made: Folders, name: str) -> None:
    report = verify(made(name, scheme="block", layout="fp8"), made(name))
    assert not report.findings
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]


def test_t5_packed_by_a_program_that_packs_every_layer(
    made: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' code casts the input of `wo` to the dtype of its weight, so `octavo.load` widens the weight."""
    with monkeypatch.context() as patch:
        patch.setattr(MetaModel, "kept_wide", lambda *_: [])
        packed = pack(made("t5 encoder"), tmp_path / "out", scheme="channel").packed
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in packed
    assert verify(tmp_path / "out", made("t5 encoder")).ok
    with pytest.warns(UserWarning, match=r"DenseReluDense.wo \(2 such layers\) is packed, and its weight is widened"):
        octavo.load(tmp_path / "out")


def test_jamba_whose_state_space_layers_read_a_weight_without_a_call(made: Folders) -> None:
    report = run_verify(made("jamba", scheme="channel"), made("jamba"))
    assert not report.findings
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]
    assert "model.layers.0.mamba.dt_proj" not in [layer.name for layer in report.layers]


def test_weights_that_are_filled_are_not_initialized_again(made: Folders) -> None:
    folder = made("gemma2")
    model = transformers_meta_model(read_json(folder / "config.json"), folder).model
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(torch.ones(embedding.weight.shape))
    with pytest.raises(RuntimeError, match="Gemma2TextScaledWordEmbedding would be initialized again"):
        compute_buffers(model, "cpu")
    assert torch.equal(embedding.weight, torch.ones_like(embedding.weight))


# OPT's decoder layers flatten their MLP's input to [T, K]; compressed-tensors then scales it as one tensor.
FLAT = [
    ("opt", {"scheme": "channel"}), ("gpt2", {"scheme": "channel"}), ("gpt2", {"scheme": "tensor"}),
    ("gpt2", {"pow2": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), FLAT)
def test_a_reader_that_scales_inputs_of_two_dimensions_as_one_tensor(
    made: Folders, name: str, options: dict[str, Any]
) -> None:
    report = verify(made(name, **options), made(name))
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


def test_a_model_whose_tensors_have_other_names_in_its_files(made: Folders) -> None:
    report = run_verify(made("gptneox", scheme="channel"), made("gptneox"))
    assert not report.findings
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]
