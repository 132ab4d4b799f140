"""What a model takes: token ids or images. A model with an encoder and a decoder takes the same ids for both.

The class of a model of transformers names its main input (`main_input_name`), and its configuration says how large an
image is. Everything that runs a model on prompts or on random inputs asks here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.artifact.files import ArtifactError
from octavo.models.decoder import Decoder

TOKENS, IMAGES = "input_ids", "pixel_values"


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
    """The main input of a model: `TOKENS`, `IMAGES`, or None if it takes neither alone.

    Args:
        model: of `octavo.models` or of transformers. It needs no weights.
    """
    if token_embedding(model) is not None:
        return None if not isinstance(model, Decoder) and _takes_sound(model) else TOKENS
    return IMAGES if model.main_input_name == IMAGES and not model.config.is_encoder_decoder else None


def _takes_sound(model: Any) -> bool:
    """Whether the embedding is of the texts that a model of sounds writes, as Whisper's."""
    return str(model.main_input_name) in ("input_features", "input_values")


def has_decoder(model: Any) -> bool:
    """Whether a model has an encoder and a decoder, as T5 and BART."""
    return not isinstance(model, Decoder) and bool(model.config.is_encoder_decoder)


def image_shape(model: Any) -> tuple[int, int, int]:
    """The channels, the height and the width of the images that a model of transformers takes.

    Raises:
        ArtifactError: its configuration does not state them.
    """
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
    """The arguments of a model of transformers for its main input.

    Args:
        model: of transformers; takes token ids or images.
        inputs: token ids int64 [B, T], or images [B, channels, height, width], which get the dtype of the model.

    Returns:
        The main input by its name. A decoder behind an encoder is given the same ids.
    """
    if inputs.is_floating_point():
        return {IMAGES: inputs.to(model.dtype)}
    return {TOKENS: inputs} | ({"decoder_input_ids": inputs} if has_decoder(model) else {})


def random_inputs(model: Any, context: int, seed: int = 0) -> Tensor:
    """Two random inputs: token ids int64 [2, T] of up to 32 tokens, or normal images [2, channels, height, width].

    Args:
        model: takes token ids or images.
        context: the most tokens.
        seed: of the numbers.

    Raises:
        ArtifactError: see `image_shape`.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = token_embedding(model)
    if embedding is None:
        return torch.randn(2, *image_shape(model), generator=generator)
    ids = torch.randint(embedding.num_embeddings, (2, min(32, context)), generator=generator)
    if has_decoder(model) and isinstance(end := model.config.eos_token_id, int):
        ids[:, -1] = end  # where classifiers such as BART's read their class
    return ids
