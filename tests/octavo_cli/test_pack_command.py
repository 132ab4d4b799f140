"""What octavo pack says that it made, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from octavo.models.tokenizer import ByteTokenizer

SIZES = {"vocab_size": 256, "hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 64, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "opt"
    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(num_hidden_layers=2, max_position_embeddings=64, **SIZES)).save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 20)
    return path


def rows(out: str) -> list[tuple[str, str]]:
    """The first two columns of what is printed below the first line."""
    lines = [line.split("  ", 1) for line in out.splitlines() if "  " in line]
    return [(first, rest.strip()) for first, rest in lines]


def test_sizes_stand_together(octavo: Any, model: Path, tmp_path: Path) -> None:
    code, out, err = octavo("pack", model, tmp_path / "out", "--skip", "*.fc2")
    assert (code, err) == (0, "")
    named = [name for name, _ in rows(out)]
    assert named == ["linear layers packed", "size of packed layers", *["left in BF16"] * 3, "the whole folder"]
    said = dict(rows(out))["size of packed layers"]
    weights, scales = 2 * (4 * 64 * 64 + 96 * 64), 2 * 4 * (4 * 64 + 96)
    assert said == f"{(weights + scales) / 1e6:.2f} MB with scales, 0.531 of {2 * weights / 1e6:.2f} MB in BF16"


def test_a_cache_of_opt_opens_in_transformers(octavo: Any, model: Path, text: Path, tmp_path: Path) -> None:
    """OPT's config.json does not state num_key_value_heads, which compressed-tensors makes the cache by."""
    assert "num_key_value_heads" not in json.loads((model / "config.json").read_text())
    options = ("--data", text, "--samples", 4, "--context", 32)
    assert octavo("calibrate", model, tmp_path / "calibrated", *options)[0] == 0
    cached = ("--calibration", tmp_path / "calibrated", "--kv-cache", "fp8", "--rule", "mse")
    code, out, err = octavo("pack", model, tmp_path / "out", *cached)
    assert (code, err) == (0, "")
    assert dict(rows(out))["KV cache"] == "scales of keys and values in e4m3, for 2 attention layers"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == 4
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.isfinite(opened(torch.arange(20)[None]).logits).all()
    assert octavo("verify", tmp_path / "out", "--against", model, *options)[0] == 0
    assert octavo("pack", model, tmp_path / "plain")[0] == 0
    assert "num_key_value_heads" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_a_model_without_a_tokenizer(octavo: Any, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((model / name).read_bytes())
    code, out, _ = octavo("pack", source, tmp_path / "out")
    assert code == 0
    assert dict(rows(out))["no tokenizer"] == "the source has none, and octavo generate needs one"
    assert "no tokenizer" not in octavo("pack", model, tmp_path / "whole")[1]


def test_a_rule_that_nothing_follows(refused: Any, model: Path, tmp_path: Path) -> None:
    for words, message in (
        (("--rule", "mse"), "the rule mse chooses scales from a calibration, and none is given: give --calibration"),
        (("--rule", "max"), "unknown rule 'max' for a scale: choose one of amax, percentile, mse"),
        (("--rule", "max", "--calibration", tmp_path), "unknown rule 'max'"),
    ):
        assert message in refused("pack", model, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()
