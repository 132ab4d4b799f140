"""octavo calibrate and pack, with a budget, smoothing and rotation: what they say that they made."""

import json
import re
import shutil

import pytest
import torch
from other_writers import know_caches
from safetensors.torch import load_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from verify_examples import change_tensors

from octavo.calibration.calibrator import Calibration

OPTIONS = ("--samples", 30, "--context", 24, "--batch", 4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama, one channel of whose first block is far larger than the others."""
    folder = make_model(tmp_path_factory.mktemp("models") / "tiny", "llama")
    change_tensors(folder, lambda tensors: tensors["model.layers.0.input_layernorm.weight"][5].fill_(200))
    return folder


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """Without the number of heads of its keys, which published ones do not state either."""
    return make_model(tmp_path_factory.mktemp("models") / "opt", "opt", num_key_value_heads=...)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking. " * 40)
    return path


def rows(out):
    """The first two columns of what is printed below the first line."""
    lines = [line.split("  ", 1) for line in out.splitlines() if "  " in line]
    return [(first, rest.strip()) for first, rest in lines]


# --- calibrate


def test_calibrate(printed, llama, data, tmp_path):
    out = printed("calibrate", llama, tmp_path / "out", "--data", data, *OPTIONS)
    found = Calibration.load(tmp_path / "out")
    assert found.prompts == 30
    assert f"30 prompts, 720 tokens, {len(found.sites)} sites" in out
    lines = out[out.index("the 10 sites with the largest outliers") :].splitlines()
    assert lines[1].split() == ["site", "amax", "99.99%", "ratio", "outlier", "channels"]
    shown = [line.split() for line in lines[2:] if line.strip()]
    ratios = [statistics.amax / statistics.percentile(99.99) for statistics in found.sites.values()]
    assert [float(row[3]) for row in shown] == pytest.approx(sorted(ratios, reverse=True)[:10], abs=0.006)
    assert all(found.sites[row[0]].amax == pytest.approx(float(row[1]), rel=1e-3) for row in shown)
    assert found.sites["model.layers.0.self_attn.q_proj.input"].outlier_channels().tolist() == [5]


def test_it_says_what_it_skipped_and_lacked(printed, llama, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("Folded three times. " * 40)
    (texts / "latin.txt").write_bytes(b"pli\xe9 " * 40)
    out = printed("calibrate", llama, tmp_path / "out", "--data", texts, "--samples", 2, "--context", 8)
    assert "read 1 file (800 bytes); skipped 1: 1 not UTF-8 (latin.txt)" in out.splitlines()
    read = Calibration.load(tmp_path / "out").settings["data"]
    assert read["skipped"] == {"not UTF-8": {"count": 1, "bytes": 200, "examples": ["latin.txt"]}}
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "three", "one")))
    out = printed("calibrate", llama, tmp_path / "few", "--data", lines, *OPTIONS)
    assert "2 prompts (30 asked for, the data has no more), 8 tokens" in out


# --- pack


def test_sizes_stand_together(printed, opt, tmp_path):
    said = dict(rows(printed("pack", opt, tmp_path / "out", "--skip", "*.fc2")))
    assert {"linear layers packed", "speed", "left in BF16", "the whole folder"} <= said.keys()
    weights, scales = 2 * (4 * 128 * 128 + 256 * 128), 2 * 4 * (4 * 128 + 256)
    sizes = f"{(weights + scales) / 1e6:.2f} MB with scales, 0.516 of {2 * weights / 1e6:.2f} MB in BF16"
    assert said["size of packed layers"] == sizes


def test_a_cache_of_opt_opens_in_transformers(octavo, printed, opt, data, tmp_path, monkeypatch):
    """OPT's config.json does not state num_key_value_heads, which compressed-tensors makes the cache by."""
    know_caches(monkeypatch)
    assert "num_key_value_heads" not in json.loads((opt / "config.json").read_text())
    options = ("--data", data, "--samples", 4, "--context", 32)
    printed("calibrate", opt, tmp_path / "calibrated", *options)
    cached = ("--calibration", tmp_path / "calibrated", "--kv-cache", "fp8", "--rule", "mse")
    out = printed("pack", opt, tmp_path / "out", *cached)
    assert dict(rows(out))["KV cache"] == "scales of keys and values in e4m3, for 2 attention layers"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == 4
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.isfinite(opened(torch.arange(20)[None]).logits).all()
    assert octavo("verify", tmp_path / "out", "--against", opt, *options)[0] == 0
    printed("pack", opt, tmp_path / "plain")
    assert "num_key_value_heads" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_a_model_without_a_tokenizer(printed, opt, tmp_path):
    source = shutil.copytree(opt, tmp_path / "source", ignore=shutil.ignore_patterns("tokenizer*"))
    out = printed("pack", source, tmp_path / "out")
    assert dict(rows(out))["no tokenizer"] == "the source has none, and octavo generate needs one"


def test_a_budget(printed, qwen, data, tmp_path):
    options = ("--data", data, "--samples", 6, "--context", 24)
    out = printed("pack", qwen, tmp_path / "all", "--budget", "kl=9", *options)
    record = json.loads((tmp_path / "all" / "octavo.json").read_text())["budget"]
    assert "asked for kl=9, measured kl=" in out
    assert record["kept_in_bf16"] == []
    assert (record["data"]["read"]["files"], record["data"]["read"]["skipped"]) == (1, {})
    limit = record["limits"][0]["measured"] / 3
    out = printed("pack", qwen, tmp_path / "out", "--budget", f"kl={limit}", *options)
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())["budget"]
    shown = [line.split() for line in out.splitlines() if line.startswith("model.layers")]
    kept = [row[0] for row in shown if row[-1] == "BF16"]
    assert len(kept) == len(record["kept_in_bf16"]) > 0
    assert [row[0] for row in shown[: len(kept)]] == kept
    assert f"measured kl={record['limits'][0]['measured']:.4g}" in out
    layers = sum(len(group) for group in record["kept_in_bf16"])
    assert re.search(rf"left in BF16 +{layers} by the budget, in the table below", out)


def test_smooth_and_rotate(printed, qwen, data, tmp_path):
    options = ("--samples", 8, "--context", 24)
    printed("calibrate", qwen, tmp_path / "calibrated", "--data", data, *options)
    words = ("--smooth", tmp_path / "calibrated", "--alpha", 0.6, "--rotate")
    out = printed("pack", qwen, tmp_path / "out", *words)
    assert f"folded {qwen} into {tmp_path / 'out'}" in out
    assert re.search(r"tensors smoothed +2, by factors of ", out)
    assert "residual stream in blocks of 128, heads in blocks of 32" in out
    assert "has its own weight now" in out
    assert json.loads((tmp_path / "out" / "octavo.json").read_text())["folded"]["smooth"]["alpha"] == 0.6
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
