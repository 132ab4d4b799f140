"""Whisper, packed: an encoder of sounds and a decoder of tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from packed_bytes import dequantized
from tiny_models import IDS, Folders, open_theirs, outputs
from torch import Tensor

import octavo
from octavo.artifact.files import ArtifactError
from octavo.packing import pack, pack_frozen
from octavo.verification import verify

SPECTROGRAMS = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(5))


def compute(model: Any) -> Tensor:
    return outputs(lambda ids: model(input_features=SPECTROGRAMS.to(model.dtype), decoder_input_ids=ids))


def test_the_packed_model_is_that_of_its_bytes(made: Folders) -> None:
    folder = made("whisper", scheme="weight")
    required = compute(dequantized(made("whisper"), folder))
    assert distance(compute(octavo.load(folder)), required) < 0.03  # BF16
    assert distance(compute(open_theirs(folder, torch.float32)), required) < 1e-5


@pytest.mark.parametrize("options", [{"scheme": "channel"}, {"scheme": "block", "layout": "fp8"}])
def test_verify_runs_every_reader_on_sounds(made: Folders, options: dict[str, Any]) -> None:
    report = verify(made("whisper", **options), made("whisper"))
    assert report.ok, report.findings
    assert [reader.outcome for reader in report.readers] == ["agrees", "agrees", "not run"]


def test_generate_is_transformers_own(made: Folders) -> None:
    folder, how = made("whisper", scheme="weight"), {"max_new_tokens": 8, "do_sample": False}
    required = dequantized(made("whisper"), folder).generate(SPECTROGRAMS, **how)
    assert torch.equal(octavo.load(folder).float().generate(SPECTROGRAMS, **how), required)


def test_static_scales_from_sounds(made: Folders, tmp_path: Path) -> None:
    batch = {"input_features": SPECTROGRAMS.bfloat16(), "decoder_input_ids": IDS}
    scales = octavo.freeze_scales(octavo.load(made("whisper", scheme="channel")), [batch])
    assert set(pack(made("whisper"), tmp_path / "out", input_scales=scales).packed.values()) == {"static"}
    exact = compute(open_theirs(made("whisper"), torch.float32))
    assert distance(compute(octavo.load(tmp_path / "out")), exact) < 0.1


def test_text_is_refused(made: Folders, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="a WhisperForConditionalGeneration takes sounds, and octavo calibrate"):
        pack_frozen(made("whisper"), tmp_path / "out", [str(tmp_path)])
