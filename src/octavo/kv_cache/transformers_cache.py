"""A KV cache for models of transformers, in BF16, E4M3 or INT8, and an attention that reads its bytes.

    cache = QuantizedKVCache.for_model(model, max_tokens=4096, dtype="fp8")
    model.generate(**inputs, past_key_values=cache)

transformers passes the return value of `update` to the attention that the model's configuration names. For this cache
that is the attention "octavo", and `update` returns the layer's cache, not tensors: the stored bytes are widened in the
kernel's registers (`octavo.ops.cached_attention`). A prompt into an empty cache attends to its own unrounded keys and
values, with PyTorch's attention. A long text into a cache that is not empty widens the keys and values of one layer at
a time.

It serves Llama, Mistral, Qwen2, Qwen3 and models with the same attention: causal over all tokens, with left padding or
none. Importing this module imports transformers; `import octavo` does not import it.
"""

from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from octavo.calibration.folder import Calibration
from octavo.kv_cache.layer import DTYPES, LayerKVCache
from octavo.kv_cache.model import Appended, ModelKVCache, Scales, UnservedError, pairs_in_order, sliding_window
from octavo.kv_cache.transformers_attention import ATTENTION, register_attention
from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.ops.attention import LARGEST


class QuantizedKVCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a cache, as transformers calls it."""

    is_compileable = True
    is_sliding = False

    def __init__(self, cache: ModelKVCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer

    @property
    def store(self) -> LayerKVCache | None:
        return self.cache.stores[self.layer] if self.cache.stores else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: `ModelKVCache` allocates all layers at once."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Appended, Appended]:
        """Store the keys and values of new tokens, [B, G, T, D]."""
        appended = self.cache.append(self.layer, key_states, value_states)
        self.is_initialized = True
        return appended, appended

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.max_tokens, 0

    def get_seq_length(self) -> Any:
        """The number of tokens stored: 0, or a tensor on the device."""
        return 0 if self.cache.length is None else self.cache.length.tensor

    def get_max_length(self) -> int:
        return self.cache.max_tokens

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in the first releases of transformers 5."""
        return self.cache.max_tokens

    @property
    def batch_size(self) -> int:
        return -1 if self.store is None else self.store.keys.shape[0]

    def reset(self) -> None:
        if self.store is not None:
            self.store.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        if self.layer == 0:  # all layers share one count
            self.cache.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            rows = torch.arange(self.batch_size, device=self.store.keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            self.store.select(indices)


class QuantizedKVCache(Cache):  # type: ignore[misc]
    """A cache of fixed size for `past_key_values`. The model's attention must be "octavo"; `for_model` sets it.

    Args:
        config: of the model.
        max_tokens: room for each sequence, prompt and padding included.
        dtype: "fp8" (e4m3), "int8", "bf16", "fp16" or "fp32"; None takes that of the first keys.
        scales: pairs (of keys, of values), one pair a layer in order, or by the name of its attention. Each is float32
            with one element or one a head, as in `scales_from_calibration` and packed folders. None computes them in a
            warm-up, in which padding counts.
        per, margin: of a warm-up, see `octavo.kv_cache.layer.LayerKVCache`.
        warm_up: "prompt" freezes the scales after the first prompt. "manual" lets them grow until `freeze()`, and casts
            the stored tokens again each time they grow.

    Raises:
        UnservedError: the model has layers that do not attend to all tokens, or a sliding window shorter than the
            cache.
        ValueError: the settings do not fit each other, or the scales are of another number of layers.
    """

    def __init__(
        self,
        config: Any,
        max_tokens: int,
        dtype: str | None = "fp8",
        *,
        scales: Scales | None = None,
        per: str | None = None,
        margin: float | None = None,
        warm_up: str = "prompt",
    ) -> None:
        if warm_up not in ("prompt", "manual"):
            raise ValueError(f"warm_up must be 'prompt' or 'manual', got {warm_up!r}")
        text = config.get_text_config(decoder=True)
        _check_model(text, max_tokens)
        register_attention()
        self.config = text
        layers, pairs, freezes = text.num_hidden_layers, pairs_in_order(scales), warm_up == "prompt"
        self.model_cache = ModelKVCache(
            layers, max_tokens, dtype, scales=pairs, per=per, margin=margin, freezes=freezes
        )
        super().__init__(layers=[QuantizedKVCacheLayer(self.model_cache, i) for i in range(layers)])

    @classmethod
    def for_model(cls, model: Any, max_tokens: int, dtype: str = "fp8", **settings: Any) -> Self:
        """A cache for `model`, whose attention is set to "octavo". The other arguments are those of the class."""
        cache = cls(model.config, max_tokens, dtype, **settings)
        model.set_attn_implementation(ATTENTION)
        return cache

    @property
    def stores(self) -> list[LayerKVCache]:
        """The caches of the layers that hold tokens."""
        return self.model_cache.stores

    @property
    def clipped(self) -> Tensor:
        """The count of numbers of keys and of values that saturated or were NaN, int64 [layers, 2]."""
        return torch.stack([store.clipped for store in self.stores])

    @property
    def nbytes(self) -> int:
        return self.model_cache.nbytes

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store the keys and values of new tokens, and return what the attention "octavo" reads."""
        if self.config._attn_implementation != ATTENTION:
            raise RuntimeError(
                f"the attention {self.config._attn_implementation!r} cannot read these keys and values: call "
                f"model.set_attn_implementation({ATTENTION!r}), or make the cache with QuantizedKVCache.for_model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def freeze(self) -> None:
        """End the warm-up of every layer: the scales no longer change, and `reset` keeps them."""
        self.model_cache.freeze()


def scales_from_calibration(
    calibration: Calibration, dtype: str = "fp8", *, heads: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """The scales of keys and values for a `QuantizedKVCache`.

    Args:
        calibration: of the model, made by `octavo calibrate`.
        dtype: "fp8" or "int8". A scale maps the calibrated amax to the dtype's largest number.
        heads: the number of heads of keys, for one scale a head. None gives one scale for all heads.

    Returns:
        The pair (of keys, of values), float32 [heads or 1], by the name of its attention, in the order of the layers.

    Raises:
        ValueError: the dtype has no scales, or the calibration has no keys and values.
    """
    if DTYPES.get(dtype) not in LARGEST:
        raise ValueError(f"dtype must be 'fp8' or 'int8', got {dtype!r}: bf16 has no scales")
    sites, found = calibration.sites, {}
    for name in (site.removesuffix(".k") for site, seen in calibration.observed.items() if seen.kind == "key"):
        amax = (sites[f"{name}.{kind}"].channel_amax.view(heads or 1, -1).amax(1) for kind in "kv")
        k, v = ((a / LARGEST[DTYPES[dtype]]).clamp(min=SMALLEST_SCALE) for a in amax)
        found[name] = (k, v)
    if not found:
        raise ValueError("the calibration has no keys and values: calibrate again with this version of octavo")
    return found


def _check_model(config: Any, max_tokens: int) -> None:
    if getattr(config, "attn_logit_softcapping", None):
        raise UnservedError("QuantizedKVCache serves attention without a softcap (attn_logit_softcapping)")
    key_dim, value_dim = (getattr(config, name, None) for name in ("qk_head_dim", "v_head_dim"))  # of DeepSeek
    if key_dim != value_dim:
        raise UnservedError(f"keys and values must have the same head size, got {key_dim} and {value_dim}")
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise UnservedError(
            f"QuantizedKVCache serves attention over all tokens; the model has layers of the kind {sorted(other)}"
        )
    window = sliding_window(config)
    if window is not None and max_tokens > window:
        raise UnservedError(
            f"the model attends to a sliding window of {window} tokens, this cache to all of its {max_tokens}: use "
            f"max_tokens={window} or less, or transformers' own cache"
        )
