"""The tensors of a folder under the names of the model, compared with those that transformers loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packed_examples import Example
from safetensors.torch import load_file, save_file
from tiny_models import Folders, make_model, open_theirs
from torch import nn

from octavo.checkpoint.files import ArtifactError
from octavo.hf.inputs import (
    IMAGES,
    SOUNDS,
    TOKENS,
    arguments_of,
    has_decoder,
    image_shape,
    main_input,
    random_inputs,
    token_embedding,
)
from octavo.hf.meta_model import read_meta_model
from octavo.hf.source import open_source
from octavo.inference.opening import open_model
from octavo.models import GPT2, GPT2Config
from octavo.packing import convert_layout, pack, unpack
from octavo.train.config import Config
from octavo.train.model import describe_language_model, open_language_model
from octavo.util import open_config
from octavo.verification import verify


@pytest.mark.parametrize("name", ["vit", "dinov2", "swin", "gptneox"])
def test_renamed_tensors_are_those_that_transformers_loads(made: Folders, name: str) -> None:
    folder, theirs = made(name), open_theirs(made(name), torch.bfloat16).state_dict()
    source = open_source(folder)
    assert not source.specs.keys() <= load_file(folder / "model.safetensors").keys()  # some are renamed
    assert source.specs.keys() <= theirs.keys()
    assert source.left_out == []
    for tensor in source.specs:
        torch.testing.assert_close(source.get(tensor), theirs[tensor], rtol=0, atol=0)


def test_a_tensor_that_is_missing_has_the_name_of_the_model(tmp_path: Path) -> None:
    path = make_model(tmp_path, "vit") / "model.safetensors"
    tensors = load_file(path)
    del tensors["vit.encoder.layer.1.attention.attention.key.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"tensor vit\.layers\.1\.attention\.k_proj\.weight is missing \(1 in all"):
        open_source(tmp_path)


def test_two_tensors_of_one_name_are_not_renamed(tmp_path: Path) -> None:
    path = make_model(tmp_path, "vit") / "model.safetensors"
    tensors = load_file(path)
    tensors["vit.layers.1.attention.k_proj.weight"] = torch.zeros(128, 128)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"lacks vit\.layers\..*, and has vit\.encoder\.layer"):
        open_source(tmp_path)


def test_a_folder_that_says_another_class_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "vit trunk") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["ViTForImageClassification"]}))
    with pytest.raises(ArtifactError, match="lacks"):
        open_source(tmp_path)


# ---- A config.json of a stranger: it chooses no code, and no more layers than its files can fill


REPOSITORY = "someone/kernels-that-run-code"
CHOICES: dict[str, Any] = {
    "attn_implementation": REPOSITORY,
    "_attn_implementation": REPOSITORY,
    "experts_implementation": "sonicmoe",
    "_experts_implementation": "sonicmoe",
    "auto_map": {"AutoConfig": "someone/code--configuration.Config"},
}


@pytest.fixture
def folder(made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """folder(name, key, ...): a copy of a model with that choice. Kernels of the hub cannot be fetched here."""

    def copy(name: str, key: str, **how: Any) -> Path:
        path = shutil.copytree(made(name, **how), tmp_path / "model")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {key: CHOICES[key]}))
        return path

    def fetch(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"kernels are fetched: {args}")

    for name in ("get_kernel", "load_and_register_attn_kernel"):
        monkeypatch.setattr(f"transformers.integrations.hub_kernels.{name}", fetch)
    return copy


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_of_code_is_neither_followed_nor_passed_on(folder: Callable[..., Path], tmp_path: Path, key: str):
    model = folder("llama", key)
    pack(model, tmp_path / "packed")
    assert open_model(model).model.config._attn_implementation == "sdpa"
    for write, source in ((unpack, tmp_path / "packed"), (convert_layout, tmp_path / "packed")):
        write(source, tmp_path / write.__name__)
    for made in ("packed", "unpack", "convert_layout"):
        assert key not in json.loads((tmp_path / made / "config.json").read_text())


def trained(folder: Path) -> Any:
    config = Config(model=str(folder), context=8)
    described, model = describe_language_model(config, folder / "new"), open_language_model(config, folder / "new")
    return described.config._attn_implementation, model.config._attn_implementation


OPENED: dict[str, Callable[[Path], Any]] = {
    "train": trained,
    "verify": lambda folder: verify(folder, folder.with_name("plain")),
}


@pytest.mark.parametrize("name", OPENED)
def test_transformers_itself_is_given_no_choice(folder: Callable[..., Path], made: Callable[..., Path], name: str):
    packed = {"scheme": "channel"} if name == "verify" else {}
    model = folder("llama", "_attn_implementation", **packed)
    (model.with_name("plain")).symlink_to(made("llama"))
    found = OPENED[name](model)
    if name == "verify":
        assert {reader.name: reader.outcome for reader in found.readers}["transformers"] == "agrees"
    if name == "train":
        assert found == ("sdpa", "sdpa")


def test_parts_of_a_model_make_no_choice_either(tmp_path: Path) -> None:
    config = transformers.LlavaConfig().to_dict()
    for part in (config, config["text_config"], config["vision_config"]):
        part["attn_implementation"] = part["_attn_implementation"] = REPOSITORY
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_config(tmp_path)
    parts = (opened, opened.text_config, opened.vision_config)
    assert [part._attn_implementation for part in parts] == [None] * 3


COUNTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "num_hidden_layers", {"num_hidden_layers": 10**9}),
    ("qwen2", "max_window_layers", {"num_hidden_layers": 2, "max_window_layers": 10**9}),
    ("mixtral", "num_local_experts", {"num_local_experts": 10**9}),
    ("bert", "num_hidden_layers", {"text_config": {"num_hidden_layers": 10**9}}),
    ("bert", "depths", {"vision_config": {"depths": [2, 10**9]}}),
    ("opt", "num_hidden_layers", {"num_hidden_layers": 10**9}),
]


@pytest.mark.parametrize(("name", "key", "change"), COUNTS)
def test_no_more_layers_than_tensors(made: Callable[..., Path], tmp_path: Path, name: str, key: str, change) -> None:
    model = shutil.copytree(made(name), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    message = rf"config.json: {key} must be at most the number of tensors, \d+; got 1,000,000,000"
    for act in (
        read_meta_model,
        lambda config, folder: open_model(folder),
        lambda _, folder: pack(folder, tmp_path / "o"),
    ):
        with pytest.raises(ArtifactError, match=message):
            act(config | change, model)
    with pytest.raises(ArtifactError, match=message):
        describe_language_model(Config(model=str(model)), tmp_path / "new")


def test_a_run_without_tensors_beside_its_config(packed: dict[str, Example], tmp_path: Path) -> None:
    run = shutil.copytree(packed["llama"].run, tmp_path / "run")
    open_source(run)
    config = json.loads((run / "model" / "config.json").read_text())
    (run / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(ArtifactError, match="num_hidden_layers must be at most the number of tensors"):
        open_source(run)


# ---- What a model takes: its main input, the shape of its images, and the arguments of a call


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def on_meta(name: str, **settings: Any) -> Any:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        return cls(cls.config_class(**settings))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LlamaForCausalLM", TOKENS),
        ("BertModel", TOKENS),
        ("T5EncoderModel", TOKENS),
        ("BartForConditionalGeneration", TOKENS),
        ("ViTForImageClassification", IMAGES),
        ("Dinov2Model", IMAGES),
        ("CLIPVisionModel", IMAGES),
        ("ResNetModel", IMAGES),  # has no get_input_embeddings
        ("WhisperForConditionalGeneration", SOUNDS),  # its embedding is of the text that it writes
        ("Speech2TextModel", None),
        ("Wav2Vec2Model", None),
        ("ASTModel", None),
    ],
)
def test_the_main_input_of_a_model(name: str, expected: str | None) -> None:
    assert main_input(on_meta(name)) == expected


def test_the_main_input_of_octavos_own_models() -> None:
    with torch.device("meta"):
        model = GPT2(GPT2Config(256, 1, 32, 2, 16))
    assert main_input(model) == TOKENS
    assert isinstance(token_embedding(model), nn.Embedding)


def test_the_shape_of_an_image_is_the_configurations() -> None:
    assert image_shape(on_meta("ViTModel", **TINY, image_size=[16, 24], patch_size=8, num_channels=1)) == (1, 16, 24)
    assert image_shape(on_meta("Dinov2Model", **TINY, image_size=28)) == (3, 28, 28)
    settings = transformers.SiglipConfig(vision_config={**TINY, "image_size": 32}, text_config=TINY)
    with torch.device("meta"):  # a configuration of two parts
        assert image_shape(transformers.SiglipForImageClassification(settings)) == (3, 32, 32)


def test_a_configuration_without_the_size_of_images() -> None:
    with pytest.raises(ArtifactError, match="of a ResNetModel must state num_channels and image_size, got 3 and None"):
        image_shape(on_meta("ResNetModel"))


def test_images_get_the_dtype_of_the_model() -> None:
    model = on_meta("ViTModel", **TINY).bfloat16()
    given = random_inputs(model, 64)
    assert given.shape == (2, 3, 224, 224)
    [(name, images)] = arguments_of(model, given).items()
    assert (name, images.dtype) == (IMAGES, torch.bfloat16)
    assert torch.equal(random_inputs(model, 64), given)
    assert not torch.equal(random_inputs(model, 64, seed=1), given)


def test_a_decoder_behind_an_encoder_is_given_the_same_tokens() -> None:
    model = on_meta("BartModel", vocab_size=300, d_model=32, eos_token_id=2)
    given = random_inputs(model, 64)
    assert given[:, -1].tolist() == [2, 2]
    arguments = arguments_of(model, given)
    assert list(arguments) == [TOKENS, "decoder_input_ids"]
    assert all(torch.equal(ids, given) for ids in arguments.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("T5ForConditionalGeneration", True),
        ("T5EncoderModel", False),
        ("BartModel", True),
        ("WhisperModel", True),
        ("WhisperForAudioClassification", False),  # an encoder, whose configuration is that of a model with a decoder
        ("BertModel", False),
    ],
)
def test_models_with_a_decoder(name: str, expected: bool) -> None:
    assert has_decoder(on_meta(name)) == expected


def test_sounds_come_with_tokens_for_the_decoder() -> None:
    model = on_meta("WhisperModel", num_mel_bins=20, max_source_positions=30)
    given = random_inputs(model, 64)
    assert given.shape == (2, 20, 60)
    arguments = arguments_of(model, given)
    assert list(arguments) == [SOUNDS, "decoder_input_ids"]
    assert arguments["decoder_input_ids"].shape == (2, 8)
    assert torch.equal(arguments["decoder_input_ids"], arguments_of(model, given)["decoder_input_ids"])


def test_tokens_are_those_of_the_embedding_and_fit_the_context() -> None:
    model = on_meta("BertModel", **TINY, vocab_size=7)
    given = random_inputs(model, 5)
    assert given.shape == (2, 5)
    assert given.max() < 7
    assert random_inputs(model, 1000).shape == (2, 32)
    assert list(arguments_of(model, given)) == [TOKENS]
