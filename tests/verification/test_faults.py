"""Faults, each planted in a right folder: `verify` finds it, and names the tensor, the layer or the setting.

The folders have no checksums, so each is found by what the bytes and the settings mean.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import (
    cast_again,
    coded,
    cut,
    labelled,
    layers_swapped,
    moved,
    no_inputs,
    noisy,
    one_bit,
    put,
    replaced,
    rope,
    rows_swapped,
    scaled,
    setting,
    shifted_ids,
    swapped,
    thousandth,
    times,
    truncated,
)
from tiny_models import TEXT, make_model
from verify_examples import change_config, change_json, damaged

from octavo.calibration import calibrate
from octavo.evaluation import PromptOptions
from octavo.packing import pack
from octavo.verification import verify
from octavo.verification.verifier import Verification

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
Q, K, V, OUT = (f"{ATTENTION}.{leaf}_proj" for leaf in "qkvo")
DOWN, UP, GATE = (f"{MLP}.{leaf}_proj" for leaf in ("down", "up", "gate"))
EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w1"
ROUTER = "model.layers.0.block_sparse_moe.gate"
Models = Callable[[str], tuple[Path, Path, Path | None]]
# Name -> the model of tiny_models, its sizes, and options of `pack`.
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "channel": ("llama", WIDE, {"scheme": "channel"}),
    "tensor": ("llama", WIDE, {"scheme": "tensor", "share": False}),
    "block": ("llama", WIDE, {"scheme": "block"}),
    "mx": ("llama", WIDE, {"scheme": "mx"}),
    "static": ("llama", WIDE, {"scheme": "static", "kv_cache": "fp8"}),
    "biases": ("qwen2", {"tie_word_embeddings": False}, {"scheme": "channel"}),
    "softcap": ("gemma2", {}, {"scheme": "channel"}),
    "experts": ("mixtral", {}, {"scheme": "channel", "experts": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """models(name) is one of FOLDERS, MODEL, and its calibration if the folder has stored scales. Each is made once."""
    root = tmp_path_factory.mktemp("faults")
    (root / "text.txt").write_text(TEXT)

    def make(name: str) -> tuple[Path, Path, Path | None]:
        kind, sizes, options = FOLDERS[name]
        model, folder, calibration = root / kind, root / f"{name} packed", root / f"{name} calibrated"
        stores = options["scheme"] == "static"
        if not model.exists():
            make_model(model, kind, **sizes)
        if stores and not calibration.exists():
            calibrate(model, [str(root / "text.txt")], calibration, prompts=PromptOptions(16, 64))
        if not folder.exists():
            pack(model, folder, calibration=calibration if stores else None, **options)
        return folder, model, calibration if stores else None

    return make


W, SCALE = ".weight", ".weight_scale"
# What fails -> the folder, the damage, what a finding is about, and what its message says.
FAULTS: dict[str, tuple[str, Any, str, str]] = {
    # what c1755f76 missed
    "a row's scale +2 %": ("channel", scaled(DOWN, 1.02, 5), DOWN + W, "1 of 256 scales are not: [5, 0] is"),
    "a layer's scales +2 %": ("channel", scaled(DOWN, 1.02), DOWN + W, "256 of 256 scales are not"),
    "a tensor's scale +2 %": ("tensor", scaled(Q, 1.02), Q + W, "1 of 1 scales are not"),
    "a block's scale +2 %": ("block", scaled(DOWN, 1.02, (0, 1)), DOWN + W, "1 of 4 scales are not: [0, 1] is"),
    "a layer's scales +10 %": ("channel", scaled(DOWN, 1.1), DOWN + W, "256 of 256 scales are not"),
    "block scales transposed": ("block", replaced(OUT + SCALE, lambda s: s.T), OUT + W, "scales are not"),
    "1 byte in 1000 off by a code": (
        "channel", coded(DOWN, thousandth(lambda codes: codes ^ 1)), DOWN + W,
        "66 of 65536 bytes are not MODEL's weight / scale rounded to nearest: [",
    ),
    "1 sign in 1000": ("channel", coded(Q, thousandth(lambda codes: codes ^ 128)), Q + W, "66 of 65536 bytes are not"),
    "an exponent's bit": ("channel", coded(Q, one_bit), Q + W, "1 of 65536 bytes are not MODEL's weight / scale"),
    "all bytes off by a code": ("mx", coded(Q, lambda codes: codes.sub_((codes & 127).clamp(max=1))), Q + W, "are not"),
    "truncated": ("channel", cast_again(Q, truncated), Q + W, "scales are not"),
    "a checkpoint with 1 % of noise": ("channel", cast_again(Q, noisy(0.01)), Q + W, "bytes are not MODEL's"),
    "a checkpoint with 10 % of noise": ("channel", cast_again(Q, noisy(0.1)), Q + W, "bytes are not MODEL's"),
    "k_scale / 2": ("static", times(f"{ATTENTION}.k_scale", 0.5), f"{ATTENTION}.k_scale", "by the rule amax the"),
    "k_scale x 1.3": ("static", times(f"{ATTENTION}.k_scale", 1.3), f"{ATTENTION}.k_scale", "the calibration gives"),
    "v_scale x 10": ("static", times(f"{ATTENTION}.v_scale", 10), f"{ATTENTION}.v_scale", "the calibration gives"),
    "k_scale and v_scale swapped": (
        "static", swapped((f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale")), f"{ATTENTION}.k_scale",
        f"{ATTENTION}.v: keys and values are swapped",
    ),
    "input_scale +2 %": ("static", times(Q + ".input_scale", 1.02), f"{Q}.input_scale", "the calibration gives"),
    "input_scale / 4": ("static", times(Q + ".input_scale", 0.25), f"{Q}.input_scale", "the calibration gives"),
    "input_scale x 16": ("static", times(Q + ".input_scale", 16), f"{Q}.input_scale", "the calibration gives"),
    "rope_theta": ("channel", rope, "config.json", "rope_parameters.rope_theta is 100000.0, MODEL has 10000.0"),
    "rms_norm_eps": ("channel", setting(rms_norm_eps=1e-3), "config.json", "rms_norm_eps is 0.001, MODEL has 1e-06"),
    "hidden_act": ("channel", setting(hidden_act="gelu"), "config.json", "hidden_act is 'gelu', MODEL has 'silu'"),
    "head count": (
        "channel", setting(num_attention_heads=16, num_key_value_heads=16, head_dim=16), "config.json",
        "num_attention_heads is 16, MODEL has 8",
    ),
    "softcap": ("softcap", setting(attn_logit_softcapping=5.0), "config.json", "attn_logit_softcapping is 5.0, MODEL"),
    "tokenizer's ids shifted": ("channel", shifted_ids, "tokenizer.json", "256 entries are not MODEL's"),
    "eos of generation": (
        "channel", lambda folder: change_json(folder / "generation_config.json", lambda g: g.update(eos_token_id=7)),
        "generation_config.json", "eos_token_id is 7, MODEL has 0",
    ),
    "a label without inputs, a legal scheme": (
        "channel", no_inputs, "", "was packed by channel, and config.json says weight",
    ),
    # what it found
    "a row's scale +30 %": ("channel", scaled(DOWN, 1.3, 5), DOWN + W, "1 of 256 scales are not: [5, 0] is"),
    "an exponent of MX + 1": ("mx", moved(Q, 1), Q + W, "1 of 2048 scales are not: [9, 1] is"),
    "an exponent of MX - 1": ("mx", moved(Q, -1), Q + W, "1 of 2048 scales are not: [9, 1] is"),
    "rows swapped": ("channel", replaced(Q + W, rows_swapped), Q + W, "bytes are not MODEL's weight / scale"),
    "a weight too small": ("channel", replaced(DOWN + W, lambda w: w[:128]), DOWN + W, "must have shape [256, 256]"),
    "scales too few": ("channel", replaced(Q + SCALE, lambda s: s[:64]), Q + SCALE, "must have shape [256, 1]"),
    "labelled block": (
        "channel", labelled(strategy="block", block_structure=[64, 64]), Q + SCALE, "must have shape [4, 4]",
    ),
    "labelled tensor": ("channel", labelled(strategy="tensor"), Q + SCALE, "must have shape [1]"),
    "q and k swapped": ("channel", layers_swapped(Q, K), Q + W, "the bytes are not MODEL's weight"),
    "k and v swapped": ("channel", layers_swapped(K, V), K + W, "the bytes are not MODEL's weight"),
    "gate and up swapped": ("channel", layers_swapped(GATE, UP), UP + W, "the bytes are not MODEL's weight"),
    "layers swapped": (
        "channel", layers_swapped(DOWN, DOWN.replace("1", "0")), DOWN + W, "the bytes are not MODEL's weight",
    ),
    "experts swapped": (
        "experts", layers_swapped(EXPERT.format(1), EXPERT.format(2)), EXPERT.format(1) + W, "the bytes are not",
    ),
    "biases swapped": ("biases", swapped((Q + ".bias", K + ".bias")), Q + ".bias", "is not MODEL's, rounded to"),
    "a bias": ("biases", put(V + ".bias", 3, 1.0), V + ".bias", "is not MODEL's, rounded to"),
    "the head": ("channel", replaced("lm_head.weight", lambda w: w * 1.01), "lm_head.weight", "is not MODEL's"),
    "an element of a norm": ("channel", put("model.norm.weight", 4, 1.5), "model.norm.weight", "is not MODEL's"),
    "rows of the embedding": (
        "channel", replaced("model.embed_tokens.weight", rows_swapped), "model.embed_tokens.weight", "is not MODEL's",
    ),
    "the router": ("experts", replaced(ROUTER + W, rows_swapped), ROUTER + W, "is not MODEL's, rounded to"),
    "the head is not ignored": (
        "channel", lambda folder: change_config(folder, ignore=[]), "", "the list of ignored modules lacks lm_head",
    ),
    "a packed layer is ignored": (
        "channel", lambda folder: change_config(folder, ignore=["lm_head", Q]), Q + W, "list of ignored modules has",
    ),
    "status": (
        "channel", lambda folder: change_config(folder, quantization_status="frozen"), "config.json",
        "quantization_status must be",
    ),
    "a byte is NaN": ("channel", put(Q + W, (5, 5), 0xFF), Q + W, "must be finite: 1 of 65536 are NaN"),
    "a scale is NaN": ("channel", put(Q + SCALE, (3, 0), torch.nan), Q + SCALE, "1 of 256 are NaN"),
    "a scale is zero": ("channel", put(Q + SCALE, (3, 0), 0), Q + SCALE, "1 of 256 are zero"),
    "scales are reciprocal": ("channel", replaced(Q + SCALE, lambda s: 1 / s), Q + W, "the scale is reciprocal"),
    "e5m2": ("channel", replaced(Q + W, lambda w: w.float().to(torch.float8_e5m2)), Q + W, "must be F8_E4M3, it is"),
    "the file is cut": ("channel", cut, "model.safetensors", "is truncated or not a safetensors file"),
    "a head of its own is tied": ("channel", setting(tie_word_embeddings=True), "config.json", "tie_word_embeddings"),
    "the scheme of the KV cache removed": (
        "static", lambda folder: change_config(folder, kv_cache_scheme=None), f"{ATTENTION}.k_scale", "has no place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_named(
    models: Models, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verification, "try_readers", lambda self: None)
    kind, damage, where, message = FAULTS[name]
    folder, model, calibration = models(kind)
    bad = damaged(folder, tmp_path / "bad", lambda f: damage(f, *[model] * (damage.__code__.co_argcount - 1)))
    report = verify(bad, model, calibration=calibration)
    if where:
        found = [finding.message for finding in report.findings if finding.where == where]
        assert any(message in each for each in found), [str(finding) for finding in report.findings]
    else:  # a setting that some programs take: reported
        assert any(message in remark for remark in report.remarks), report.remarks


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_folders_are_right_before(models: Models, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verification, "try_readers", lambda self: None)
    folder, model, calibration = models(kind)
    report = verify(folder, model, calibration=calibration)
    assert (report.findings, report.remarks) == ([], [])
