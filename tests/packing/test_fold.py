"""A folded model computes what its source computes; transformers in float64 is the judge."""

import json
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
import transformers
from calibration_examples import write_data, write_model
from metrics import distance
from packed_examples import LLAMA, lively, small_shards, write_run
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import open_theirs, outputs, with_slow
from verify_examples import change_tensors

from octavo.calibration import Calibration, calibrate
from octavo.calibration.calibrator import hash_model
from octavo.checkpoint.files import ArtifactError
from octavo.evaluation.prompts import PromptOptions
from octavo.inference.opening import load_packed
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig
from octavo.packing import pack
from octavo.packing.transforms import Change, fold, random_signs, rotated, scaled, smoothing_factors
from octavo.verification.verifier import verify

open_model = partial(open_theirs, dtype=torch.float64)


def make(root, name, **change):
    """A model with some channels of each norm, of the values and of `up` 30 times larger, as in large models."""

    def grow(tensors):
        for name, tensor in tensors.items():
            if name.endswith(("norm.weight", "v_proj.weight", "up_proj.weight", "fc1.weight", "value.weight")):
                tensor[3::11] *= 30

    folder = write_model(root / name, name, **change)
    change_tensors(folder, grow)
    return folder


def calibrated(folder, root):
    out = root / f"{folder.name} calibrated"
    calibrate(folder, write_data(root / "data.jsonl"), out, prompts=PromptOptions(40, 24))
    return out


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """decoder(name): a model and its calibration, made once. Llama has biases."""

    @cache
    def both(name):
        root = tmp_path_factory.mktemp(name)
        source = make(root, name, **({"attention_bias": True, "mlp_bias": True} if name == "llama" else {}))
        return source, calibrated(source, root)

    return both


def off(folded, source):
    """How far the outputs are apart in float64, relative."""
    found, truth = outputs(open_model(folded)), outputs(open_model(source))
    assert truth.std() > 0.1
    return distance(found, truth)


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", with_slow(["llama", "mistral", "qwen2", "qwen3"], ("llama", "qwen2")))
@pytest.mark.parametrize("how", ["smooth", "rotate", "both"])
def test_the_folded_model_computes_the_same(tmp_path, decoder, name, how):
    source, calibration = decoder(name)
    given: dict[str, Any] = {"smooth": calibration} if how != "rotate" else {}
    given |= {"rotate": True, "seed": 5} if how != "smooth" else {}
    seen: list[tuple[int, int]] = []
    report = fold(source, tmp_path / "out", dtype="float32", progress=lambda *at: seen.append(at[:2]), **given)
    assert off(tmp_path / "out", source) < 1e-5
    before, after = weights(source), weights(tmp_path / "out")
    changed = [key for key in after if key not in before or not torch.equal(before[key], after[key])]
    assert len(changed) == report.changed
    assert report.untied == (how != "smooth" and name != "llama")
    assert seen[-1] == (len(before), len(before))
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert record["source"] == file.metadata()["octavo_source"] == name
    rotated_by, smoothed_by = (record["folded"][part] for part in ("rotate", "smooth"))
    blocks = dict(zip(("stream_block", "head_block"), report.rotated or (), strict=False))
    assert rotated_by == ({"seed": 5} | blocks if how != "smooth" else None)
    if how == "both":
        assert smoothed_by["calibration"]["model_hash"] == hash_model(source)
        assert list(smoothed_by["factors"]) == [f"model.layers.{i}.mlp.up_proj" for i in range(3)]


@pytest.mark.parametrize("name", with_slow(["llama", "qwen2", "opt", "bert", "bert masked"]))
def test_smoothing_is_exact_to_the_bit(tmp_path, name):
    """Factors are powers of two: in BF16, with BF16's roundings on the way, nothing changes."""
    source = make(tmp_path, name)
    plain = tmp_path / "plain"
    open_model(source, dtype=torch.bfloat16).save_pretrained(plain)
    (plain / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (plain / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    report = fold(plain, tmp_path / "out", smooth=calibrated(plain, tmp_path))
    assert len(report.smoothed) == 3 * (1 if "bert" in name else 4)
    assert any(low < high for low, high in report.smoothed.values())
    before, after = open_model(plain, dtype=torch.bfloat16), open_model(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(outputs(before), outputs(after))


@pytest.mark.parametrize(
    ("change", "part"), [({"activation_function": "gelu"}, "fc1"), ({"do_layer_norm_before": False}, "norm")]
)
def test_neither_across_gelu_nor_norms_that_come_after(tmp_path, change, part):
    source = make(tmp_path, "opt", **change)
    report = fold(source, tmp_path / "out", smooth=calibrated(source, tmp_path), dtype="float32")
    assert not any(part in name for name in report.smoothed)
    assert off(tmp_path / "out", source) < 1e-5


def test_factors_are_smoothquants(tmp_path):
    """Of q, k, v's norm, and of v, whose heads are shared: computed here from weights and what the calibration saw."""
    source = make(tmp_path, "llama")
    calibration = calibrated(source, tmp_path)
    fold(source, tmp_path / "out", smooth=calibration, alpha=0.7, dtype="float32")
    before, after = weights(source), weights(tmp_path / "out")
    layer, sites = "model.layers.1", Calibration.load(calibration).sites
    x = sites[f"{layer}.input_layernorm.output"].channel_amax
    w = torch.cat([before[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv"]).abs().amax(0)
    exact = x.double() ** 0.7 / w.double() ** 0.3
    factors = (before[f"{layer}.input_layernorm.weight"] / after[f"{layer}.input_layernorm.weight"]).double()
    assert ((factors / exact).log2().abs() <= 0.5 + 1e-6).all()
    assert torch.equal(factors.log2(), factors.log2().round())
    assert factors.max() / factors.min() >= 4
    o_proj = f"{layer}.self_attn.o_proj"
    read = sites[f"{o_proj}.input"].channel_amax, before[f"{o_proj}.weight"].abs().amax(0)
    x, w = (amax.double().view(2, 2, 8).amax(1, keepdim=True) for amax in read)  # two heads share one of v
    factors = after[f"{o_proj}.weight"].abs().amax(0) / read[1]
    assert ((factors.view(2, 2, 8) / (x**0.7 / w**0.3)).log2().abs() <= 0.5 + 1e-6).all()


def test_rotation_spreads_planted_outliers(tmp_path):
    source = make(tmp_path, "llama")
    fold(source, tmp_path / "out", rotate=True)

    def ratio(folder):
        statistics = Calibration.load(calibrated(folder, tmp_path)).sites["model.layers.1.mlp.gate_proj.input"]
        return float(statistics.channel_amax.max() / statistics.channel_amax.median())

    assert ratio(tmp_path / "out") < 0.3 * ratio(source)


def test_bf16_is_off_by_its_rounding(tmp_path):
    source = make(tmp_path, "mistral")
    report = fold(source, tmp_path / "out", rotate=True)
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert report.rotated == (32, 8)
    rounded = outputs(open_model(source, dtype=torch.bfloat16).double())
    truth = outputs(open_model(source))
    assert 0 < off(tmp_path / "out", source) < 2 * distance(rounded, truth)


def test_it_packs_and_loads_like_any_other(tmp_path):
    source = make(tmp_path, "qwen3")
    truth = outputs(open_model(source))
    with small_shards(20_000):
        fold(source, tmp_path / "folded", rotate=True)
    assert (tmp_path / "folded" / "model.safetensors.index.json").is_file()
    noise = []
    for folder in (source, tmp_path / "folded"):
        pack(folder, tmp_path / f"{folder.name} packed")
        noise.append(distance(outputs(load_packed(tmp_path / f"{folder.name} packed").model), truth))
    assert 0 < noise[1] < 2 * noise[0]
    said = [json.loads((tmp_path / name / "octavo.json").read_text()) for name in ("folded", "folded packed")]
    assert said[0]["folded"] == said[1]["folded"]  # so that verify does not take it for another model
    assert verify(tmp_path / "folded packed", source).ok


def test_a_run_is_rotated(tmp_path):
    llama = lively(Llama(LlamaConfig(**LLAMA)))
    run = write_run(tmp_path / "run", llama, llama.config.to_hf())
    reports = [fold(run, tmp_path / f"out {seed}", rotate=True, seed=seed, dtype="float32") for seed in (0, 1)]
    assert reports[0].untied
    outs = [open_model(report.folder) for report in reports]
    truth = outputs(llama.double())
    assert all(distance(outputs(model), truth) < 1e-5 for model in outs)
    assert not torch.equal(outs[0].lm_head.weight, outs[1].lm_head.weight)


def test_what_cannot_be_folded(tmp_path):
    llama, opt = write_model(tmp_path / "llama", "llama"), write_model(tmp_path / "opt", "opt")
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    odd = write_model(tmp_path / "odd", "llama", hidden_size=33, **heads)
    other = write_model(tmp_path / "other", "llama", initializer_range=0.1)
    scored = transformers.LlamaForSequenceClassification(transformers.AutoConfig.from_pretrained(llama))
    scored.save_pretrained(tmp_path / "scored")
    gpt2 = lively(GPT2(GPT2Config(256, 2, 64, 4, 48)))
    run = write_run(tmp_path / "run", gpt2, gpt2.config.to_hf(), model="gpt2")
    calibration = calibrated(other, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    for folder, settings, error, message in (
        (llama, {}, ValueError, "--smooth with a calibration of the model, --rotate, or both"),
        (llama, {"rotate": True, "dtype": "float16"}, ValueError, "choose one of bfloat16, float32"),
        (llama, {"smooth": calibration, "alpha": 1.5}, ValueError, "alpha must be between 0 and 1, got 1.5"),
        (llama, {"smooth": calibration}, ValueError, "is a calibration of another model"),
        (opt, {"rotate": True}, ArtifactError, "OPTForCausalLM has LayerNorm, whose mean"),
        (odd, {"rotate": True}, ArtifactError, "width 33 is odd"),
        (tmp_path / "scored", {"rotate": True}, ArtifactError, "LlamaForSequenceClassification cannot be folded; supp"),
        (run, {"rotate": True}, ArtifactError, "octavo's GPT-2"),
    ):
        with pytest.raises(error, match=message):
            fold(folder, tmp_path / "out", **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    with pytest.raises(FileExistsError):
        fold(llama, opt, rotate=True)


# ---- The steps of folding as matrices: scipy's Hadamard matrices, and diagonal ones


def matrix(size, runs):
    """What one run of `size` after the other, each in blocks of the largest power of two, is multiplied by."""
    order = size & -size
    return scipy.linalg.block_diag(*[scipy.linalg.hadamard(order) / np.sqrt(order)] * (runs * size // order))


@pytest.mark.parametrize(("size", "runs"), [(1, 3), (2, 1), (8, 1), (8, 5), (32, 2), (96, 1), (6, 4), (512, 1)])
def test_rotated_is_hadamards_matrix(size, runs):
    x = torch.randn(5, runs * size, dtype=torch.float64)
    assert np.allclose(rotated(size)(x).numpy(), x.numpy() @ matrix(size, runs), rtol=0, atol=1e-13)
    signs = random_signs(size, 3)
    turned = rotated(size, signs)(x).numpy()
    expected = x.numpy() * np.tile(signs.numpy(), runs) @ matrix(size, runs)
    assert np.allclose(turned, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_changes_along_both_sides(dtype, monkeypatch):
    """In parts of a few rows, the last of them short."""
    monkeypatch.setattr("octavo.packing.transforms._PART", 100)
    torch.manual_seed(1)
    w, s = torch.randn(24, 32), torch.rand(32) + 0.5
    change = Change([scaled(s), rotated(32)], [rotated(8)])
    expected = matrix(8, 3).T @ (w.double().numpy() * s.double().numpy() @ matrix(32, 1))
    found = change.apply(w, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    error = np.abs(found.double().numpy() - expected) / np.abs(expected).max()
    assert error.max() < (1e-6 if dtype == torch.float32 else 2**-8)
    bias = torch.randn(24)
    assert np.allclose(change.apply(bias, torch.float32).numpy(), bias.numpy() @ matrix(8, 3), rtol=0, atol=1e-6)


def test_factors():
    """SmoothQuant's, to the nearest power of two; 1 where a channel is dead."""
    x, w = torch.tensor([100.0, 1.0, 0.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert smoothing_factors(x, w, 0.5).tolist() == [8.0, 1.0, 1.0, 1.0]  # sqrt(100) = 10
    assert smoothing_factors(x, w, 1.0).tolist() == [128.0, 1.0, 1.0, 1.0]
    assert smoothing_factors(x, w * 100, 0.0).tolist() == [2**-7, 2**-7, 1.0, 1.0]
