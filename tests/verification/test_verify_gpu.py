"""Verification gives the same results on a GPU as on the CPU."""

from pathlib import Path

import pytest
from tiny_models import make_model, write_text

from octavo.evaluation import PromptOptions
from octavo.evaluation.metrics import LogitQuality
from octavo.packing import pack
from octavo.verification.pipeline import verify
from octavo.verification.result import Report

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "scheme"), [("llama", "channel"), ("mistral", "block"), ("qwen2", "tensor")])
def test_the_same_on_both(tmp_path: Path, name: str, scheme: str) -> None:
    text = write_text(tmp_path / "text.txt")
    pack(make_model(tmp_path / "model", name), tmp_path / "out", scheme=scheme)

    def run(device: str) -> Report:
        return verify(
            tmp_path / "out", tmp_path / "model", [str(text)], prompts=PromptOptions(8, 512, 4), device=device
        )

    cpu, gpu = run("cpu"), run("cuda")
    assert not gpu.findings
    assert isinstance(cpu.quality, LogitQuality)
    assert isinstance(gpu.quality, LogitQuality)
    assert isinstance(gpu.int8, LogitQuality)
    assert gpu.quality.reference_perplexity.value == pytest.approx(cpu.quality.reference_perplexity.value, rel=1e-4)
    assert gpu.quality.kl.value == pytest.approx(cpu.quality.kl.value, rel=0.1)  # roundings at a tie differ
    assert gpu.int8.kl.value < gpu.quality.kl.value
    for here, there in zip(cpu.layers, gpu.layers, strict=True):
        assert there.weight_sqnr == here.weight_sqnr
        assert there.output_sqnr == pytest.approx(here.output_sqnr, abs=0.1)
    assert {reader.name: reader.outcome for reader in gpu.readers}["octavo"] == "agrees"


OTHERS = [("vit", "channel"), ("vit", "weight"), ("swin", "channel"), ("t5", "channel"), ("bart", "int8")]


@pytest.mark.parametrize(("name", "scheme"), OTHERS)
def test_models_of_images_and_with_a_decoder_agree_on_a_gpu(tmp_path: Path, name: str, scheme: str) -> None:
    pack(make_model(tmp_path / "model", name), tmp_path / "out", scheme=scheme)
    report = verify(tmp_path / "out", tmp_path / "model", device="cuda")
    assert not report.findings
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]
