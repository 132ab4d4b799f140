"""Models of images, packed: what transformers and `octavo.load` compute, against the dequantized weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from packed_bytes import dequantized
from tiny_models import IMAGE_MODELS, Folders, make_model, open_theirs, outputs
from torch import Tensor

import octavo
from octavo.artifact.files import ArtifactError
from octavo.calibration import calibrate
from octavo.evaluation import Budget
from octavo.packing import pack, pack_frozen, pack_within
from octavo.runtime import PackedLinear
from octavo.verification import verify

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))
BROKEN_READER = "dinov2"  # transformers 5.23 opens no quantized folder of its type


def compute(model: Any, images: Tensor = IMAGES) -> Tensor:
    return outputs(model, images.to(model.dtype))


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_the_packed_model_is_that_of_its_bytes(made: Folders, name: str) -> None:
    folder = made(name, scheme="weight")
    loaded, required = octavo.load(folder), compute(dequantized(made(name), folder))
    assert type(loaded).__name__ == IMAGE_MODELS[name][0]
    assert sum(isinstance(m, PackedLinear) for m in loaded.modules()) >= 12
    assert distance(compute(loaded), required) < 0.02  # BF16
    if name != BROKEN_READER:
        assert distance(compute(open_theirs(folder, torch.float32)), required) < 1e-5


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_verify_runs_every_reader_on_images(made: Folders, name: str) -> None:
    report = verify(made(name, scheme="channel"), made(name))
    transformers, ours, vllm = report.readers
    assert ours.outcome == "agrees", ours
    assert vllm.outcome == "not run"
    assert not report.remarks  # that there is no tokenizer is none
    if name == BROKEN_READER:
        assert transformers.outcome == "failed"
        assert "one to many" in transformers.note
    else:
        assert report.ok
        assert transformers.distance is not None
        assert transformers.distance < 1e-5


@pytest.mark.parametrize(
    "options", [{"scheme": "block", "layout": "fp8"}, {"scheme": "mx"}, {"scheme": "group64"}, {"scheme": "int8"}]
)
def test_other_schemes_and_layouts(made: Folders, options: dict[str, Any]) -> None:
    report = verify(made("vit", **options), made("vit"))
    assert report.ok, report.findings
    assert [reader.outcome for reader in report.readers[:2]] == ["agrees", "agrees"]


def test_static_scales_from_images(made: Folders, tmp_path: Path) -> None:
    scales = octavo.freeze_scales(octavo.load(made("vit", scheme="channel")), [IMAGES, IMAGES * 2])
    report = pack(made("vit"), tmp_path / "out", input_scales=scales)
    assert set(report.packed.values()) == {"static"}
    assert verify(tmp_path / "out", made("vit")).ok
    exact = compute(open_theirs(made("vit"), torch.float32))
    assert distance(compute(octavo.load(tmp_path / "out")), exact) < 0.1


def test_the_settings_of_the_images_are_copied(made: Folders, tmp_path: Path) -> None:
    shutil.copytree(made("vit"), tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    report = pack(tmp_path / "model", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text()) == {"image_mean": [0.5, 0.5, 0.5]}
    assert not report.lacks_tokenizer
    assert report.skipped == {"classifier": "an output head or router (classifier)"}


def test_a_wrong_scale_is_found_by_the_weights_of_the_model(made: Folders, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "vit", seed=1)
    report = verify(made("vit", scheme="channel"), other)
    assert not report.ok
    assert report.not_run


def test_what_runs_on_text_says_that_the_model_takes_images(made: Folders, tmp_path: Path) -> None:
    model, out, text = made("vit"), tmp_path / "out", [str(tmp_path)]
    refused = pytest.raises(
        ArtifactError, match=r"a ViTForImageClassification takes images, and .* run a model on text"
    )
    with refused:
        pack(model, out, scheme="static")
    with refused:
        pack(model, out, kv_cache="fp8")
    with refused:
        pack_frozen(model, out, text)
    with refused:
        pack_within(model, out, [Budget.parse("cosine=0.99")], text)
    with refused:
        calibrate(model, text, out)
    with refused:
        verify(made("vit", scheme="channel"), model, text)
    assert not out.exists()
