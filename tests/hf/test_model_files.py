"""The tensors of a folder under the names of the model, compared with those that transformers loads."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import make_model, open_theirs
from torch import nn
from verify_examples import change_settings, change_tensors

from octavo.checkpoint.files import ArtifactError
from octavo.hf import meta_model
from octavo.hf.meta_model import IMAGES, SOUNDS, TOKENS, arguments_of, has_decoder, image_shape, random_inputs
from octavo.hf.source import open_source
from octavo.inference.opening import open_model
from octavo.packing import convert_layout, pack, unpack
from octavo.train.config import Config
from octavo.train.model import CPU, META, open_language_model
from octavo.util import open_config
from octavo.verification import verify


@pytest.mark.parametrize("name", ["vit", "dinov2", "swin", "gptneox"])
def test_renamed_tensors_are_those_that_transformers_loads(made, name):
    folder, theirs = made(name), open_theirs(made(name), torch.bfloat16).state_dict()
    source = open_source(folder)
    assert not source.specs.keys() <= load_file(folder / "model.safetensors").keys()  # some are renamed
    assert source.specs.keys() <= theirs.keys()
    assert source.left_out == []
    for tensor in source.specs:
        torch.testing.assert_close(source.get(tensor), theirs[tensor], rtol=0, atol=0)


KEY = "vit.encoder.layer.1.attention.attention.key.weight"
SAME = {"vit.layers.1.attention.k_proj.weight": torch.zeros(128, 128)}


@pytest.mark.parametrize(
    ("name", "change", "config", "message"),
    [
        ("vit", lambda t: t.pop(KEY), {}, r"tensor vit\.layers\.1\.attention\.k_proj\.weight is missing \(1 in all"),
        ("vit", lambda t: t.update(SAME), {}, r"lacks vit\.layers\..*, and has vit\.encoder\.layer"),
        ("vit trunk", lambda t: None, {"architectures": ["ViTForImageClassification"]}, "lacks"),
    ],
)
def test_a_folder_of_other_tensors_is_refused(tmp_path, name, change, config, message):
    """By the names of the model; two tensors of one name are not renamed."""
    folder = make_model(tmp_path, name)
    change_tensors(folder, change)
    change_settings(folder / "config.json", **config)
    with pytest.raises(ArtifactError, match=message):
        open_source(folder)


# ---- A config.json of a stranger: it chooses no code, and no more layers than its files can fill


REPOSITORY = "someone/kernels-that-run-code"
CHOICES = {
    "attn_implementation": REPOSITORY,
    "_attn_implementation": REPOSITORY,
    "experts_implementation": "sonicmoe",
    "_experts_implementation": "sonicmoe",
    "auto_map": {"AutoConfig": "someone/code--configuration.Config"},
}


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_of_code_is_neither_followed_nor_passed_on(made, tmp_path, monkeypatch, key):
    """By octavo, by training, and by transformers where `verify` opens the folder with it. Nothing can be fetched."""
    for name in ("get_kernel", "load_and_register_attn_kernel"):
        said = f"kernels are fetched by {name}"
        monkeypatch.setattr(f"transformers.integrations.hub_kernels.{name}", Mock(side_effect=AssertionError(said)))
    model = shutil.copytree(made("llama"), tmp_path / "model")
    change_settings(model / "config.json", **{key: CHOICES[key]})
    pack(model, tmp_path / "packed")
    assert open_model(model).model.config._attn_implementation == "sdpa"
    for write, source in ((unpack, tmp_path / "packed"), (convert_layout, tmp_path / "packed")):
        write(source, tmp_path / write.__name__)
    for made in ("packed", "unpack", "convert_layout"):
        assert key not in json.loads((tmp_path / made / "config.json").read_text())
    trained = [open_language_model(Config(model=str(model), context=8), tmp_path / "new", at) for at in (META, CPU)]
    assert [each.config._attn_implementation for each in trained] == ["sdpa", "sdpa"]
    change_settings(tmp_path / "packed" / "config.json", **{key: CHOICES[key]})
    assert "transformers" in [each.name for each in verify(tmp_path / "packed").readers if each.outcome == "agrees"]


def test_parts_of_a_model_make_no_choice_either(tmp_path):
    config = transformers.LlavaConfig().to_dict()
    for part in (config, config["text_config"], config["vision_config"]):
        part["attn_implementation"] = part["_attn_implementation"] = REPOSITORY
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_config(tmp_path)
    parts = (opened, opened.text_config, opened.vision_config)
    assert [part._attn_implementation for part in parts] == [None] * 3


COUNTS: list[tuple[str, str, dict]] = [
    ("llama", "num_hidden_layers", {"num_hidden_layers": 10**9}),
    ("qwen2", "max_window_layers", {"num_hidden_layers": 2, "max_window_layers": 10**9}),
    ("mixtral", "num_local_experts", {"num_local_experts": 10**9}),
    ("bert", "num_hidden_layers", {"text_config": {"num_hidden_layers": 10**9}}),
    ("bert", "depths", {"vision_config": {"depths": [2, 10**9]}}),
]


@pytest.mark.parametrize(("name", "key", "change"), COUNTS)
def test_no_more_layers_than_tensors(made, tmp_path, name, key, change):
    model = shutil.copytree(made(name), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    message = rf"config.json: {key} must be at most the number of tensors, \d+; got 1,000,000,000"
    for act in (
        lambda: meta_model.read_meta_model(config | change, model),
        lambda: open_model(model),
        lambda: pack(model, tmp_path / "o"),
        lambda: open_language_model(Config(model=str(model)), tmp_path / "new", META),
    ):
        with pytest.raises(ArtifactError, match=message):
            act()


def test_a_run_without_tensors_beside_its_config(packed, tmp_path):
    run = shutil.copytree(packed["llama"].run, tmp_path / "run")
    open_source(run)
    change_settings(run / "model" / "config.json", num_hidden_layers=10**9)
    with pytest.raises(ArtifactError, match="num_hidden_layers must be at most the number of tensors"):
        open_source(run)


# ---- What a model takes: its main input, the shape of its images, and the arguments of a call


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def on_meta(name: str, **settings):
    cls = getattr(transformers, name)
    with torch.device("meta"):
        return cls(cls.config_class(**settings))


@pytest.mark.parametrize(
    ("name", "expected", "decodes"),
    [
        ("LlamaForCausalLM", TOKENS, False),
        ("BertModel", TOKENS, False),
        ("T5ForConditionalGeneration", TOKENS, True),
        ("T5EncoderModel", TOKENS, False),
        ("BartForConditionalGeneration", TOKENS, True),
        ("ViTForImageClassification", IMAGES, False),
        ("CLIPVisionModel", IMAGES, False),
        ("ResNetModel", IMAGES, False),  # has no get_input_embeddings
        ("WhisperForConditionalGeneration", SOUNDS, True),  # its embedding is of the text that it writes
        ("WhisperForAudioClassification", SOUNDS, False),  # an encoder with the configuration of a whole model
        ("Speech2TextModel", None, True),
        ("Wav2Vec2Model", None, False),
        ("ASTModel", None, False),
    ],
)
def test_what_a_model_takes(name, expected, decodes):
    model = on_meta(name)
    assert (meta_model.main_input(model), has_decoder(model)) == (expected, decodes)
    # The few classes of a sound differ too much by chance.
    assert name != "WhisperForAudioClassification" or meta_model.measured_part(model, False) is model.encoder


def test_the_shape_of_an_image_is_the_configurations():
    assert image_shape(on_meta("ViTModel", **TINY, image_size=[16, 24], patch_size=8, num_channels=1)) == (1, 16, 24)
    assert image_shape(on_meta("Dinov2Model", **TINY, image_size=28)) == (3, 28, 28)
    settings = transformers.SiglipConfig(vision_config={**TINY, "image_size": 32}, text_config=TINY)
    with torch.device("meta"):  # a configuration of two parts
        assert image_shape(transformers.SiglipForImageClassification(settings)) == (3, 32, 32)
    with pytest.raises(ArtifactError, match="of a ResNetModel must state num_channels and image_size, got 3 and None"):
        image_shape(on_meta("ResNetModel"))
    assert arguments_of(on_meta("HieraModel"), torch.zeros(2, 3, 8, 8))["noise"].shape == (2, 49)


def test_a_decoder_behind_an_encoder_is_given_the_same_tokens():
    model = on_meta("BartModel", vocab_size=300, d_model=32, eos_token_id=2)
    given = random_inputs(model, 64)
    assert given[:, -1].tolist() == [2, 2]
    arguments = arguments_of(model, given)
    assert list(arguments) == [TOKENS, "decoder_input_ids"]
    assert all(torch.equal(ids, given) for ids in arguments.values())


def test_tokens_are_those_of_the_embedding_and_fit_the_context():
    model = on_meta("BertModel", **TINY, vocab_size=7)
    given = random_inputs(model, 5)
    assert given.shape == (2, 5)
    assert given.max() < 7
    assert random_inputs(model, 1000).shape == (2, 32)
    assert list(arguments_of(model, given)) == [TOKENS]


def test_models_of_images_and_text_generate_from_text_or_run_on_both_alone():
    assert meta_model.predicts_tokens(on_meta("LlavaForConditionalGeneration"))
    with pytest.raises(ArtifactError, match="SiglipModel takes images with text, and is run on neither alone"):
        random_inputs(on_meta("SiglipModel"), 8)


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "FalconH1ForCausalLM", "PaliGemmaForConditionalGeneration"])
def test_buffers_are_computed_by_the_nearest_model_or_a_module_above(name):
    model = on_meta(name)
    meta_model.compute_buffers(model, "cpu")
    assert not any(buffer.isnan().any() for buffer in model.buffers() if not buffer.is_meta)


# ---- causal or not, by what a model computes


@pytest.mark.parametrize("decoder", [False, True])
def test_one_class_of_transformers_is_causal_or_not_by_its_settings(decoder):
    config = transformers.BertConfig(vocab_size=50, **TINY, is_decoder=decoder)
    assert meta_model.is_causal(transformers.BertLMHeadModel(config), 50) is decoder


class Shifted(nn.Module):
    """Sees one token ahead, through a small weight."""

    def __init__(self, weight):
        super().__init__()
        self.embed, self.weight = nn.Embedding(2, 4), weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return x + self.weight * x.roll(-1, dims=1)


def test_a_small_leak_counts_and_the_mode_is_given_back():
    assert not meta_model.is_causal(Shifted(1e-3), 2)
    assert meta_model.is_causal(Shifted(0.0), 2)
    model = Shifted(0.0)
    for training in (True, False):
        model.train(training)
        assert meta_model.is_causal(model, 2)
        assert model.training is training


def test_dropout_does_not_disturb_the_answer():
    model = nn.Sequential(nn.Embedding(4, 8), nn.Dropout(0.5))
    state = torch.get_rng_state()
    assert meta_model.is_causal(model, 4)
    assert torch.equal(torch.get_rng_state(), state)
