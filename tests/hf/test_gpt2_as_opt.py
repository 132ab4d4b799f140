"""Folders of transformers' GPT-2: calibrated, packed and unpacked as OPT, against GPT2LMHeadModel itself."""

import json
import shutil

import pytest
import torch
from metrics import distance
from safetensors.torch import load_file, save_file
from tiny_models import make_model, open_theirs, outputs, same_bytes, write_text

from octavo.calibration import calibrate
from octavo.checkpoint.files import ArtifactError
from octavo.hf.stored_tensors import Conv1DReader, config_as_opt
from octavo.packing import pack

WAYS = {
    "as published": {},
    "untied, another MLP": {"tie_word_embeddings": False, "n_inner": 384, "activation_function": "gelu"},
    "ours": {"activation_function": "gelu"},  # our GPT-2 runs it
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpt2")
    return {name: make_model(root / name, "gpt2", **changed) for name, changed in WAYS.items()}


@pytest.mark.parametrize("name", WAYS)
def test_what_is_read_is_the_same_function(folders, tmp_path, name):
    where = folders[name] / "config.json"
    (tmp_path / "config.json").write_text(json.dumps(config_as_opt(json.loads(where.read_text()), where)))
    reader = Conv1DReader(folders[name])
    tensors = {key: reader.get(key) for key in reader.specs}
    stated = {key: (spec.dtype, spec.shape) for key, spec in reader.specs.items()}
    assert {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()} == stated
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    opt, original = open_theirs(tmp_path, torch.float32), open_theirs(folders[name], torch.float32)
    assert distance(outputs(opt), outputs(original)) < 1e-6


def test_files_of_the_first_release(folders, tmp_path):
    """No "transformer." before the names, the causal masks stored, the tied head stored."""
    source = folders["as published"]
    old = shutil.copytree(source, tmp_path / "old")
    tensors = load_file(source / "model.safetensors")
    older = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    older |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    older |= {"lm_head.weight": older["wte.weight"].clone(), "extra.weight": torch.ones(2)}
    save_file(older, old / "model.safetensors", {"format": "pt"})
    assert pack(old, tmp_path / "a").left_out == ["extra.weight"]
    pack(source, tmp_path / "b")
    assert same_bytes(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True.*has False only"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False.*has True only"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "GPT2LMHeadModel is supported, got GPT2ForSeq"),
        ({"n_head": None}, "must state n_head"),
    ],
)
def test_what_opt_is_not(folders, tmp_path, changed, message):
    model = shutil.copytree(folders["as published"], tmp_path / "model")
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changed))
    for act in (pack, lambda model, out: calibrate(model, [str(write_text(tmp_path / "text.txt"))], out)):
        with pytest.raises(ArtifactError, match=message):
            act(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
