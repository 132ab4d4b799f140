"""Readers that misread a folder, and readers that are not there."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from verify_examples import change_config, make_model

from octavo.packing import pack
from octavo.runtime import PackedLinear, load_packed
from octavo.verification import readers
from octavo.verification.pipeline import verify
from octavo.verification.readers import (
    BF16,
    BF16_WITH_CACHE,
    FLOAT32,
    Probe,
    ReaderResult,
    next_logprobs,
    try_readers,
)
from octavo.verification.reference import distance


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(model, tmp_path_factory.mktemp("packed") / "out").folder


def outcomes(model: Path, packed: Path) -> dict[str, ReaderResult]:
    report = verify(packed, model)
    assert {finding.where for finding in report.findings if finding.kind == "reader"} == {
        reader.name for reader in report.readers if reader.outcome in ("disagrees", "failed")
    }
    return {reader.name: reader for reader in report.readers}


def test_one_that_misreads_a_scale(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = readers.fill

    def misread(*given: Any) -> Any:
        model = fill(*given)
        *_, layer = (module for module in model.modules() if isinstance(module, PackedLinear))
        layer.weight_scale.copy_(1 / layer.weight_scale)
        return model

    monkeypatch.setattr(readers, "fill", misread)
    found = outcomes(model, packed)
    assert found["transformers"].outcome == "agrees"
    assert found["octavo"].outcome == "disagrees"
    assert found["octavo"].distance is not None
    assert found["octavo"].distance > 0.5


def test_one_that_gives_nan(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nan(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.full((*ids.shape, 256), torch.nan)

    monkeypatch.setattr(readers, "fill", lambda *_: Nan())
    assert outcomes(model, packed)["octavo"].outcome == "disagrees"


def test_one_that_fails(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(readers, "fill", fail)
    found = outcomes(model, packed)["octavo"]
    assert (found.outcome, found.note) == ("failed", "RuntimeError: no kernel for this")


def test_what_transformers_finds_missing(packed: Path, tmp_path: Path) -> None:
    """Past our own check, which would have stopped it: a head that is named nowhere."""
    bad = shutil.copytree(packed, tmp_path / "bad")
    change_config(bad, ignore=[])
    theirs = next(iter(try_readers(probe_of(bad, {"quant_method": "compressed-tensors"}), "cpu")))
    assert theirs.outcome == "failed"
    assert theirs.note.startswith("missing_keys: lm_head.weight_scale")


def test_without_compressed_tensors(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        readers.importlib.util, "find_spec", lambda name: None if name == "compressed_tensors" else find(name)
    )
    report = verify(packed, model)
    assert report.ok
    assert (report.readers[0].outcome, report.readers[1].outcome) == ("not run", "agrees")
    assert "compressed-tensors, which is not installed" in report.readers[0].note


def probe_of(folder: Path, settings: dict[str, Any], unrounded: float = 0.1, bf16: float = 0.1) -> Probe:
    """Of random logits, from which the others are so far."""
    torch.manual_seed(0)
    reference, ids = torch.randn(1, 4, 256), torch.zeros(1, 4).long()
    others = (reference, (1 + unrounded) * reference, (1 + bf16) * reference)
    return Probe(folder, {}, settings, True, False, ids, reference, *others)


class FakeVllm:
    """What vLLM's engine answers, of our model; with `wrong` it shifts the tokens."""

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong
        self.SamplingParams = dict
        self.LLM = self.make

    def make(self, model: str, **settings: Any) -> Any:
        assert settings == {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 33}
        self.model = load_packed(model).model
        return self

    def generate(self, asked: list[dict[str, list[int]]], sampling: dict[str, Any]) -> list[Any]:
        assert sampling == {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}
        results = []
        for row in (entry["prompt_token_ids"] for entry in asked):
            ids = torch.tensor([row])
            logs = next_logprobs(self.model(ids.roll(1) if self.wrong else ids).detach().float(), ids)[0].tolist()
            entries = [{token: SimpleNamespace(logprob=log)} for token, log in zip(row[1:], logs, strict=True)]
            results.append(SimpleNamespace(prompt_logprobs=[None, *entries]))
        return results


@pytest.mark.parametrize("wrong", [False, True])
def test_vllm_where_it_is_installed(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(readers.importlib.util, "find_spec", lambda name: name == "vllm" or find(name))
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm(wrong))  # type: ignore[arg-type]
    found = outcomes(model, packed)["vllm"]
    assert found.version == "of unknown version"
    assert found.outcome == ("disagrees" if wrong else "agrees")


@pytest.mark.parametrize(("cache", "factors"), [(False, BF16), (True, BF16_WITH_CACHE)])
def test_vllm_alone_is_allowed_more_over_a_cache_in_eight_bits(
    packed: Path, monkeypatch: pytest.MonkeyPatch, cache: bool, factors: tuple[float, float]
) -> None:
    probe, fake = replace(probe_of(packed, {}), cache=cache), FakeVllm(False)
    fake.model, fake.LLM = lambda ids: probe.reference, lambda **settings: fake
    monkeypatch.setitem(sys.modules, "vllm", fake)  # type: ignore[arg-type]
    found = readers._vllm(probe, "1", "cpu")
    assert found.outcome == "agrees"
    assert found.tolerance == probe.tolerance(factors, lambda logits: next_logprobs(logits, probe.ids))
    assert probe.tolerance(BF16_WITH_CACHE) > probe.tolerance(BF16)


def test_vllm_is_not_run_on_a_folder_without_a_tokenizer() -> None:
    found = readers._vllm(probe_of(Path("gone"), {}), "1", "cpu")
    assert (found.outcome, found.note) == ("not run", "it needs a tokenizer, and the folder has none")


def test_layouts_of_vllm_alone_are_not_given_to_transformers() -> None:
    for settings in ({"quant_method": "modelopt"}, {"quant_method": "fp8", "activation_scheme": "static"}):
        theirs = next(iter(try_readers(probe_of(Path("gone"), settings), "cpu")))
        assert (theirs.outcome, theirs.note) == ("not run", "it does not read this layout; vLLM does")


def test_tolerances_can_fail() -> None:
    probe = probe_of(Path("gone"), {}, 0.04, 0.1)
    assert probe.tolerance(FLOAT32) == pytest.approx(0.05, abs=2e-4)
    assert probe.tolerance(BF16) == pytest.approx(0.15, abs=2e-4)
    assert probe_of(Path("gone"), {}, 3, 9).tolerance(BF16) == 0.5
    assert probe.tolerance(BF16_WITH_CACHE) == pytest.approx(0.2, abs=2e-4)
    moved = probe.reference + 7  # the same distribution of tokens
    assert probe.judge("x", "1", moved, FLOAT32, "").outcome == "agrees"
    assert probe.judge("x", "1", probe.reference * 1.06, FLOAT32, "").outcome == "disagrees"
    assert probe.judge("x", "1", probe.reference[:, :3], FLOAT32, "").outcome == "disagrees"


def test_what_is_compared_has_a_tolerance_of_its_own() -> None:
    """The square of a token's largest logit moves by more than twice as much as the logits do."""
    probe = probe_of(Path("gone"), {}, 0.04, 0.1)

    def largest(logits: torch.Tensor) -> torch.Tensor:
        return logits.amax(-1).square()

    exact, bf16 = largest(probe.reference), largest(probe.bf16)
    found = probe.judge("x", "1", bf16, BF16, "", largest)
    assert found.tolerance == pytest.approx(1.5 * distance(bf16, exact), abs=2e-4)
    assert found.tolerance > 2 * probe.tolerance(BF16)
