"""The forward pass over new tokens and a cache of fixed size, for models of `octavo.models` and of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octavo.kv_cache.model import ModelKVCache, Pairs, sliding_window
from octavo.models.decoder import Decoder


class Forward(Protocol):
    """A model with a cache. A call takes tokens [B, T], stores their keys and values, and returns logits [B, V] of the
    last one."""

    cache: ModelKVCache

    def __call__(self, tokens: Tensor) -> Tensor: ...


class KeyShape(NamedTuple):
    """Sizes of the keys of one token: layers, heads of keys, elements of a head; and their dtype in the model."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int, dtype: torch.dtype | None) -> int:
        """Bytes of the keys and values of `tokens` tokens, stored in `dtype`; None stands for their own."""
        return 2 * tokens * self.layers * self.heads * self.head_dim * (dtype or self.dtype).itemsize


class DecoderForward:
    """A model of `octavo.models` with a cache."""

    def __init__(self, model: Decoder, max_tokens: int, dtype: str | None, scales: Pairs | None) -> None:
        self.model = model
        self.cache = ModelKVCache(model.config.layers, max_tokens, dtype, scales=scales, freezes=False)

    def __call__(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, self.cache)
        return logits[:, -1]


def make_forward(model: Any, max_tokens: int, dtype: str | None, scales: Pairs | None) -> Forward:
    """The forward pass of a language model over an empty cache. The scales of a warm-up grow until they are frozen.

    Raises:
        UnservedError: the attention of the model is of a kind that the cache does not serve.
        ValueError: the scales do not fit.
    """
    if isinstance(model, Decoder):
        return DecoderForward(model, max_tokens, dtype, scales)
    from octavo.generation.transformers_forward import TransformersForward

    return TransformersForward(model, max_tokens, dtype, scales)


def most_tokens(model: Any) -> int | None:
    """The tokens that a cache of the model may hold: those of its sliding window, or any number, None."""
    if isinstance(model, Decoder):
        return None
    return sliding_window(model.config.get_text_config(decoder=True))


def key_shape(model: Any) -> KeyShape:
    """The sizes of a model's keys."""
    if isinstance(model, Decoder):
        shape: Any = model.config
        heads, kv_heads, dim, layers = shape.heads, getattr(shape, "kv_heads", None), None, shape.layers
        width = shape.width
    else:
        config = model.config.get_text_config(decoder=True)
        heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        dim, width, layers = getattr(config, "head_dim", None), config.hidden_size, config.num_hidden_layers
    return KeyShape(layers, kv_heads or heads, dim or width // heads, key_dtype(model))


def key_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that the keys of a model have: that of autocast, or of its parameters."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


@contextmanager
def uncached_autocast(device: torch.device) -> Iterator[None]:
    """Autocast as it is, without its cache of cast weights: a CUDA graph must not read memory that autocast frees."""
    kind = device.type
    if kind == "cpu" or not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
        yield
