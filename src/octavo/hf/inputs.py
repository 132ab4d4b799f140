"""What a model takes: token ids, images, or the spectrograms of sounds. A decoder behind an encoder takes tokens too.

The class of a model of transformers names its main input (`main_input_name`), and its configuration says how large it
is. Everything that runs a model on prompts or on random inputs asks here.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.files import ArtifactError
from octavo.models.decoder import Decoder

TOKENS, IMAGES, SOUNDS = "input_ids", "pixel_values", "input_features"
DECODER_TOKENS = "decoder_input_ids"
DECODED = 8  # tokens of a decoder behind an encoder of sounds
KINDS = {TOKENS: "text", IMAGES: "images", SOUNDS: "sounds"}


def token_embedding(model: Any) -> nn.Embedding | None:
    """The single embedding of tokens of a model; None if it has none, as a model of images."""
    if isinstance(model, Decoder):
        return model.embedding
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def main_input(model: Any) -> str | None:
    """The main input of a model, which needs no weights: `TOKENS`, `IMAGES`, `SOUNDS`, or None if it takes another, or
    several."""
    if isinstance(model, Decoder):
        return TOKENS
    named = model.main_input_name
    if named == SOUNDS:
        return SOUNDS if _spectrogram(model) else None
    if token_embedding(model) is not None:
        return None if named == "input_values" else TOKENS
    return IMAGES if named == IMAGES and not model.config.is_encoder_decoder else None


def has_decoder(model: Any) -> bool:
    """True if a model has an encoder and a decoder, which takes tokens, as T5, BART and Whisper."""
    if isinstance(model, Decoder) or not model.config.is_encoder_decoder:
        return False
    return DECODER_TOKENS in inspect.signature(model.forward).parameters


def _spectrogram(model: Any) -> tuple[int, int] | None:
    """The bands and the frames of the spectrograms that Whisper takes; None for a model that states neither."""
    bands, positions = (getattr(model.config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    # The second convolution of Whisper's encoder has a stride of 2.
    return (bands, 2 * positions) if isinstance(bands, int) and isinstance(positions, int) else None


def image_shape(model: Any) -> tuple[int, int, int]:
    """The channels, the height and the width of the images that a model of transformers takes; an ArtifactError if its
    configuration does not state them."""
    config = getattr(model.config, "vision_config", model.config)
    channels, size = getattr(config, "num_channels", None), getattr(config, "image_size", None)
    sides = [size, size] if isinstance(size, int) else size
    if not isinstance(channels, int) or not isinstance(sides, Sequence) or len(sides) != 2:
        raise ArtifactError(
            f"the config.json of a {type(model).__name__} must state num_channels and image_size, got {channels!r} and "
            f"{size!r}: add those of the images that the model is to see"
        )
    return channels, int(sides[0]), int(sides[1])


def arguments_of(model: Any, inputs: Tensor) -> dict[str, Tensor]:
    """The arguments of a model of transformers for its main input. `inputs` are token ids int64 [B, T], or images [B,
    channels, height, width] or spectrograms [B, bands, frames]. The last two get the dtype of the model.

    A decoder behind an encoder is given the same ids; behind an encoder of sounds, `DECODED` tokens that depend on
    nothing but the vocabulary.
    """
    if not inputs.is_floating_point():
        return {TOKENS: inputs} | ({DECODER_TOKENS: inputs} if has_decoder(model) else {})
    given = {model.main_input_name: inputs.to(model.dtype)}
    embedding = token_embedding(model) if has_decoder(model) else None
    if embedding is None:
        return given
    ids = _random_ids(embedding, (len(inputs), DECODED), torch.Generator().manual_seed(0))
    return given | {DECODER_TOKENS: ids.to(inputs.device)}


def random_inputs(model: Any, context: int, seed: int = 0) -> Tensor:
    """Two random inputs. Token ids int64 [2, T] have up to 32 tokens, and no more than `context`. Images [2, channels,
    height, width] and spectrograms [2, bands, frames] are normally distributed."""
    generator = torch.Generator().manual_seed(seed)
    embedding = token_embedding(model)
    spectrogram = _spectrogram(model) if main_input(model) == SOUNDS else None
    if spectrogram is not None:
        return torch.randn(2, *spectrogram, generator=generator)
    if embedding is None:
        return torch.randn(2, *image_shape(model), generator=generator)
    ids = _random_ids(embedding, (2, min(32, context)), generator)
    if has_decoder(model) and isinstance(end := model.config.eos_token_id, int):
        ids[:, -1] = end  # where classifiers such as BART's read their class
    return ids


def _random_ids(embedding: nn.Embedding, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(embedding.num_embeddings, shape, generator=generator)


# ---- The outputs that quality is measured on: the logits of a model that predicts tokens, else the last hidden states.


def model_outputs(model: Any, inputs: Tensor, logits: bool, **options: Any) -> Tensor:
    """Run a model on its main input (`arguments_of`), with further arguments `options`. The result is float32: the
    logits [B, T, V], or without `logits` (see `predicts_tokens`) the last hidden states, such as [B, T, width]. A model
    with an encoder and a decoder gives the hidden states of its decoder."""
    part = measured_part(model, logits)
    result = part(inputs, **options) if isinstance(model, Decoder) else part(**arguments_of(model, inputs), **options)
    if isinstance(result, Tensor):
        return result.float()
    hidden = None if logits else getattr(result, "last_hidden_state", None)
    chosen: Tensor = result.logits if hidden is None else hidden  # some classifiers have no part below their head
    return chosen.float()


def measured_part(model: Any, logits: bool) -> Any:
    """The module whose outputs are measured: the model, or without `logits` the part below its head."""
    return model if logits else getattr(model, "base_model", model)


def is_language_model(model: Any) -> bool:
    """True if a model predicts the next token of its input: any of `octavo.models`, and of transformers by the name of
    its class. The model needs no weights. Training, which has them, asks `octavo.models.decoder.is_causal` instead."""
    if isinstance(model, Decoder):
        return True
    return names_language_model((*(model.config.architectures or ()), type(model).__name__)[0])


def names_language_model(architecture: str) -> bool:
    """True if a class of transformers, such as "LlamaForCausalLM", predicts the next token."""
    return architecture.endswith(("ForCausalLM", "LMHeadModel"))


def predicts_tokens(model: Any) -> bool:
    """True if a model gives logits of tokens: a language model, or an encoder and a decoder with an output head."""
    return is_language_model(model) or (has_decoder(model) and model.get_output_embeddings() is not None)
