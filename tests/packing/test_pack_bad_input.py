"""Sources and options that cannot be packed, and tensors that no model has."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Folders, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from verify_examples import change_tensors

from octavo.artifact.files import ArtifactError
from octavo.packing import PackOptions, pack


@pytest.fixture
def llama(made: Folders) -> Path:
    return made("llama")


def changed(source: Path, target: Path, change: Callable[[Tensor], object]) -> Path:
    """A copy with another down_proj."""
    shutil.copytree(source, target)
    change_tensors(target, lambda tensors: change(tensors["model.layers.1.mlp.down_proj.weight"]))
    return target


def test_what_the_model_has_no_place_for_is_left_out(llama: Path, tmp_path: Path) -> None:
    old, name = shutil.copytree(llama, tmp_path / "old"), "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(old, lambda tensors: tensors.update({name: torch.ones(16)}))
    assert pack(old, tmp_path / "out").left_out == [name]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"scheme": "rowwise"}, "unknown scheme 'rowwise': choose one of channel, tensor, static, block, mx, group32"),
        ({"layout": "gptq"}, "unknown layout 'gptq': choose one of compressed-tensors, fp8"),
        ({"layout": "fp8"}, "the layout fp8 holds the scheme block alone, not channel"),
        ({"layers": {"*.nothing": "block"}}, r"'\*.nothing' matches no packed layer"),
        ({"skip": ["*.nothing"]}, "matches no linear layer"),
        ({"scheme": "static"}, "stores scales of inputs: give --calibration"),
        ({"step": 3}, "is a model, not a run of octavo train"),
        (
            {"skip": ["*.1.*.k_proj"]},
            "layers.1.self_attn: layers that readers run as one GEMM need one scheme, they have q_proj channel, "
            "k_proj BF16, v_proj channel: name all of them in --skip or --layer",
        ),
        ({"layers": {"*.gate_proj": "block"}}, "layers.0.mlp: .* they have gate_proj block, up_proj channel"),
    ],
)
def test_what_cannot_be_asked_for(llama: Path, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(llama, tmp_path / "out", **how)
    assert not list(tmp_path.iterdir())


def test_keywords_replace_fields_of_the_options(llama: Path, tmp_path: Path) -> None:
    report = pack(
        llama, tmp_path / "out", PackOptions(scheme="block", layout="fp8"), scheme="channel", layout="modelopt"
    )
    assert set(report.packed.values()) == {"channel"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'schme'"):
        pack(llama, tmp_path / "other", schme="block")


def test_sizes_that_a_scheme_cannot_have(tmp_path: Path) -> None:
    make_model(tmp_path / "source", "llama", num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"k_proj: \[64, 128\] is no multiple of 128 x 128") as error:
        pack(tmp_path / "source", tmp_path / "out", scheme="block")
    named = re.findall(r"--layer '(\S+)=channel'", str(error.value))
    assert named == ["*.q_proj", "*.k_proj", "*.v_proj"]  # q, which fits, is fused with them
    assert "and 3 other layers cannot be packed either" in str(error.value)
    report = pack(tmp_path / "source", tmp_path / "out", scheme="block", layers=dict.fromkeys(named, "channel"))
    assert sorted(report.packed.values()) == ["block"] * 8 + ["channel"] * 6


def test_sources_that_cannot_be_packed(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(llama, tmp_path / "packed")
    with pytest.raises(ArtifactError, match="is quantized already"):
        pack(tmp_path / "packed", out)
    bad = changed(llama, tmp_path / "nan", lambda t: t.fill_(torch.nan))
    with pytest.raises(ArtifactError, match="down_proj.weight holds inf or NaN"):
        pack(bad, out)
    config = json.loads((llama / "config.json").read_text())
    other = changed(llama, tmp_path / "other", lambda t: t)
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 384}))
    with pytest.raises(ArtifactError, match="is not of the model that its config.json describes.*must have shape"):
        pack(other, out)
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_tensors_under_names_that_transformers_replaces(llama: Path, tmp_path: Path) -> None:
    old = shutil.copytree(llama, tmp_path / "old")
    change_tensors(old, lambda tensors: tensors.update({"embed_out.weight": tensors.pop("lm_head.weight")}))
    with pytest.raises(
        ArtifactError, match=r"lacks lm_head.weight \(1 in all\), and has embed_out.weight.*with the new names"
    ):
        pack(old, tmp_path / "out")


def test_a_model_whose_context_is_not_stated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "architectures": ["BloomForCausalLM"]}')
    with pytest.raises(ArtifactError, match="must state max_position_embeddings, got None: add the most tokens"):
        pack(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ({"model_type": "speech_to_text", "architectures": ["Speech2TextModel"]}, "Speech2TextModel"),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]}, "Wav2Vec2Model"),  # has no embedding at all
    ],
)
def test_a_model_of_unknown_inputs_cannot_be_packed(tmp_path: Path, described: dict[str, Any], name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ArtifactError, match=f"describes a {name}, whose inputs Octavo does not know"):
        pack(tmp_path, tmp_path / "out")


def test_a_config_without_the_class_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ArtifactError, match="must state architectures, the class of a model that is not causal"):
        pack(tmp_path, tmp_path / "out")
