"""Models with an encoder and a decoder, packed: T5 and BART."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from packed_bytes import dequantized
from safetensors.torch import load_file
from tiny_models import IDS, Folders, open_theirs, outputs, write_text
from torch import Tensor

import octavo
from octavo.artifact.files import ArtifactError
from octavo.calibration import calibrate
from octavo.evaluation import Budget, PromptOptions
from octavo.packing import pack_frozen, pack_within
from octavo.runtime import PackedLinear
from octavo.verification import verify

NAMES = ["t5", "t5 trunk", "bart", "bart trunk"]


def compute(model: Any) -> Tensor:
    """The outputs of the decoder, which is given other tokens than the encoder."""
    return outputs(lambda ids: model(input_ids=ids, decoder_input_ids=ids.flip(1)))


@pytest.mark.parametrize("name", NAMES)
def test_the_packed_model_is_that_of_its_bytes(made: Folders, name: str) -> None:
    folder = made(name, scheme="weight")
    required = compute(dequantized(made(name), folder))
    assert distance(compute(octavo.load(folder)), required) < 0.03  # BF16
    assert distance(compute(open_theirs(folder, torch.float32)), required) < 1e-5


@pytest.mark.parametrize(("name", "packed"), [("t5", 32), ("t5 encoder", 10), ("bart", 32)])
def test_layers_that_transformers_quantizes_in_no_way_stay_in_bf16(made: Folders, name: str, packed: int) -> None:
    stored = load_file(made(name, scheme="channel") / "model.safetensors")
    kept = [tensor for key, tensor in stored.items() if key.endswith(".wo.weight")]
    assert {t.dtype for t in kept} <= {torch.bfloat16}
    assert len(kept) == {"t5": 4, "t5 encoder": 2, "bart": 0}[name]
    model = octavo.load(made(name, scheme="channel"))
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == packed


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generate_is_transformers_own(made: Folders, name: str, beams: int) -> None:
    folder, how = made(name, scheme="weight"), {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    ids = IDS[:, :9]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is no faster loop that it could run on
        text = octavo.load(folder).float().generate(ids, attention_mask=torch.ones_like(ids), **how)
    required = dequantized(made(name), folder).generate(ids, attention_mask=torch.ones_like(ids), **how)
    assert torch.equal(text, required)


@pytest.mark.parametrize("options", [{"kv_cache": "fp8"}, {"attention": "fp8"}])
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_options_of_a_language_model_are_refused(made: Folders, name: str, options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"holds a (T5|Bert)\w+, and kv_cache and attention are for the text"):
        octavo.load(made(name, scheme="channel"), **options)  # type: ignore[arg-type]


def test_static_scales_from_text(made: Folders, tmp_path: Path) -> None:
    report = pack_frozen(
        made("t5"), tmp_path / "out", [str(write_text(tmp_path / "text.txt"))], prompts=PromptOptions(8, 64)
    )
    assert set(report.packed.values()) == {"static"}
    assert verify(tmp_path / "out", made("t5")).ok


def test_a_budget_of_kl(made: Folders, tmp_path: Path) -> None:
    text = [str(write_text(tmp_path / "text.txt"))]
    report, kept = pack_within(
        made("bart"), tmp_path / "out", [Budget.parse("kl=1e-3")], text, prompts=PromptOptions(8, 64)
    )
    assert 0 < len(report.packed) < 32
    assert len(report.packed) + len(kept.skip) == 32
    measured = verify(
        tmp_path / "out", made("bart"), text, prompts=PromptOptions(8, 64), budgets=[Budget.parse("kl=1e-3")]
    )
    assert measured.ok, measured.findings


def test_calibration_is_refused(made: Folders, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="BartModel cannot be calibrated, it has an encoder and a decoder"):
        calibrate(made("bart trunk"), [str(write_text(tmp_path / "text.txt"))], tmp_path / "out")
