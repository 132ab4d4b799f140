"""The KV cache of a whole model: one `LayerKVCache` a layer, and one count of tokens for all.

    cache = ModelKVCache(layers=32, max_tokens=4096, dtype="fp8")
    y = cache.append(i, k, v).attend(q, cache.first, scale)      in layer i; q [B, H, T, D], k and v [B, G, T, D]

The buffers are allocated by the first keys, which set the batch size, heads, head size and device. The sequences of a
batch end at the same place: a shorter one has padding on its left, and `first` says how much.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kv_cache.layer import DTYPES, LayerKVCache, check_settings
from octavo.kv_cache.length import Length
from octavo.kv_cache.prompts import prompt_attention

Pairs = Sequence[tuple[Tensor, Tensor]]  # of keys and of values, for each layer
Scales = Pairs | Mapping[str, tuple[Tensor, Tensor]]
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class UnservedError(ValueError):
    """The cache does not serve the attention of a model; the message says why."""


class Appended(NamedTuple):
    """One layer's cache, and the keys and values [B, G, T, D] just stored in it, which a prompt needs."""

    store: LayerKVCache
    keys: Tensor | None
    values: Tensor | None
    was_empty: bool  # whether the cache was empty before

    def attend(self, q: Tensor, first: Tensor | None, scale: float) -> Tensor:
        """Attention of the queries [B, H, T, D] of the tokens just stored. In BF16 a prompt sees unrounded keys."""
        if self.was_empty and q.shape[2] > 1 and not self.store.runs_fp8(q, first):
            assert self.keys is not None
            assert self.values is not None
            return prompt_attention(q, self.keys, self.values, first=first, scale=scale)
        return self.store.attend(q, first=first, scale=scale)


class ModelKVCache:
    """The KV caches of the layers of a model, for inference.

    Args:
        layers: number of layers.
        max_tokens: room for each sequence, prompt and padding included.
        dtype: as of `LayerKVCache`; None takes that of the first keys.
        scales, per, margin: as of `LayerKVCache`; `scales` one pair a layer, in order or by the name of its attention.
        freezes: whether the scales of a warm-up are frozen after the first tokens. If not, `freeze` does it.

    Attributes:
        stores: one `LayerKVCache` a layer; empty before the first keys.
        length: the number of tokens, or None before the first keys. The first layer advances it.
        first: int32 [B], the first token of each sequence that is not padding; None without padding.
        fp8_attention: as of `LayerKVCache`; to be set before the first keys.

    Raises:
        ValueError: the settings do not fit each other, or the scales are of another number of layers.
    """

    def __init__(
        self,
        layers: int,
        max_tokens: int,
        dtype: str | None = None,
        *,
        scales: Pairs | None = None,
        per: str | None = None,
        margin: float | None = None,
        freezes: bool = True,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"a cache needs room for at least one token, got max_tokens={max_tokens}")
        if dtype is not None:
            check_settings(dtype, per, margin)
        if scales is not None and len(scales) != layers:
            raise ValueError(f"the model has {layers} layers, and scales were given for {len(scales)}")
        self.layers, self.max_tokens, self.dtype, self.freezes = layers, max_tokens, dtype, freezes
        self.scales, self.per, self.margin, self.fp8_attention = scales, per, margin, False
        self.stores: list[LayerKVCache] = []
        self.length: Length | None = None
        self.first: Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens stored, as the host knows it."""
        return 0 if self.length is None else self.length.host

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    def append(self, layer: int, k: Tensor, v: Tensor) -> Appended:
        """Store the keys (after rotary embedding) and values of T new tokens, [B, G, T, D] each.

        Raises:
            RuntimeError: the cache has no room for the tokens, or autograd records them.
            ValueError: the shape or dtype is wrong.
        """
        if not self.stores:
            self._allocate(k, v)
        store = self._counted(layer, k.shape[2])
        was_empty = store.empty
        store.append(k, v)
        if self.freezes and store.warming:
            store.freeze()
        return Appended(store, k, v, was_empty)

    def rotate_append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **norms: Any
    ) -> tuple[Tensor, Appended]:
        """Apply rotary embedding to the queries and keys of new tokens, and store keys and values, with one kernel.

        Args:
            q, k, v: [B, T, H * D] and twice [B, T, G * D].
            cos, sin, norms: as in `octavo.ops.rotate_append`.

        Returns:
            The rotated queries [B, H, T, D], and what `append` returns.
        """
        if not self.stores:
            self._allocate(*(x.view(*x.shape[:2], -1, cos.shape[-1]).transpose(1, 2) for x in (k, v)))
        store = self._counted(layer, q.shape[1])
        was_empty = store.empty
        q, keys = store.rotate_append(q, k, v, cos, sin, keep_k=was_empty and q.shape[1] > 1, **norms)
        if self.freezes and store.warming:
            store.freeze()
        batch, _, tokens, dim = q.shape
        values = v.view(batch, tokens, -1, dim).transpose(1, 2) if was_empty else None
        return q, Appended(store, keys, values, was_empty)

    def positions(self, tokens: Tensor) -> Tensor:
        """The positions of the next tokens [B, T] in their texts: int64 [1, T], or [B, T] with padding."""
        start = self.length.tensor if self.length is not None else 0
        positions = start + torch.arange(tokens.shape[1], device=tokens.device)[None]
        return positions if self.first is None else (positions - self.first[:, None]).clamp_(min=0)

    def freeze(self) -> None:
        """End the warm-up of every layer: the scales no longer change, and `reset` keeps them."""
        if not self.stores:
            raise RuntimeError("the warm-up saw no token: run a prompt through the model before scales are frozen")
        for store in self.stores:
            store.freeze()

    def reset(self, *, scales: bool = False) -> None:
        """Forget all tokens and the count of clipped numbers; with `scales`, those of a warm-up too."""
        self.first = None
        for store in self.stores:
            store.warming |= scales and self.scales is None and store.k_scale is not None
            store.reset()

    def crop(self, tokens: int) -> None:
        """Forget the last tokens."""
        if self.length is not None:
            self.length.crop(tokens)

    def copy_prefix(self, prefix: "ModelKVCache", batch: int) -> None:
        """Begin each of `batch` sequences, after its padding, with the tokens of `prefix`, a cache of one sequence.

        The sequences of this empty cache then have as many tokens as the prefix, padding included: those with padding
        lack the last tokens of the prefix.
        """
        tokens = prefix.tokens
        if not self.stores:
            self._allocate(*(t.expand(batch, -1, -1, -1) for t in (prefix.stores[0].keys, prefix.stores[0].values)))
        assert self.length is not None
        self.length.advance(tokens)
        for mine, theirs in zip(self.stores, prefix.stores, strict=True):
            mine.copy_prefix(theirs, tokens, self.first)

    def _counted(self, layer: int, new: int) -> LayerKVCache:
        """The layer's cache. The first layer counts the `new` tokens of a forward pass."""
        if layer == 0:
            assert self.length is not None
            self.length.advance(new)
        return self.stores[layer]

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        batch, heads, _, dim = k.shape
        if v.shape[3] != dim:
            raise UnservedError(f"keys and values must have the same head size, got {dim} and {v.shape[3]}")
        # Buffers of inference mode could not be written outside of it later.
        with nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False):
            self.length = Length(self.max_tokens, k.device)
            self.stores = [
                LayerKVCache(
                    (batch, heads, self.max_tokens, dim),
                    self.dtype or NAMES[k.dtype],
                    scales=None if self.scales is None else self.scales[i],
                    per=self.per,
                    margin=self.margin,
                    device=k.device,
                    length=self.length,
                    fp8_attention=self.fp8_attention,
                )
                for i in range(self.layers)
            ]
        if not torch.compiler.is_compiling():  # as transformers' own caches do, so that CUDA graphs may write to them
            for store in self.stores:
                for t in (store.keys, store.values, store.k_scale, store.v_scale, store.length, store.clipped):
                    if t is not None:
                        torch._dynamo.mark_static_address(t)


def sliding_window(config: Any) -> int | None:
    """The tokens that layers of a model of transformers attend to, by its text config; None if all attend to all."""
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    return window if not kinds or "sliding_attention" in kinds else None


def pairs_in_order(scales: Scales | None) -> Pairs | None:
    """The scales in the order of the layers: by the numbers in names such as model.layers.11.self_attn."""
    if not isinstance(scales, Mapping):
        return scales
    return [scales[name] for name in sorted(scales, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])]
