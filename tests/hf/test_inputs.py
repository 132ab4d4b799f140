"""What a model takes: its main input, the shape of its images, and the arguments of a call."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from octavo.artifact.files import ArtifactError
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
from octavo.models import GPT2, GPT2Config

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
