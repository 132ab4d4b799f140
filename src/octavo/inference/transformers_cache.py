"""A KV cache for models of transformers, in BF16, E4M3 or INT8, and an attention that reads its bytes.

    cache = QuantizedKVCache.for_model(model, max_tokens=4096, dtype="fp8")
    model.generate(**inputs, **{CACHE: cache})  # CACHE is "cache", and before transformers 5.24 "past_key_values"

transformers passes the return value of `update` to the attention that the model's configuration names. For this cache
that is the attention "octavo", and `update` returns the layer's cache, not tensors: the stored bytes are widened in the
kernel's registers (`octavo.ops.cached_attention`). A prompt into an empty cache attends to its own unrounded keys and
values, with PyTorch's attention. A long text into a cache that is not empty widens the keys and values of one layer at
a time.

It serves Llama, Mistral, Qwen2, Qwen3 and models with the same attention: causal over all tokens, with left padding or
none. Importing this module imports transformers; `import octavo` does not import it.
"""

import inspect
import threading
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from octavo.calibration.calibrator import Calibration
from octavo.inference import kv_cache as caches
from octavo.inference.kv_cache import DTYPES, Appended, LayerKVCache, ModelKVCache, Pairs, Scales, UnservedError
from octavo.inference.packed_linear import ServedAttention
from octavo.numerics.formats import LARGEST
from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.ops import cached_attention
from octavo.util import cache_argument

CACHE = cache_argument()


class QuantizedKVCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a cache, as transformers calls it."""

    is_compileable = is_croppable = True
    is_sliding = False

    def __init__(self, cache: ModelKVCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer

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

    get_max_cache_shape = get_max_length  # its name in the first releases of transformers 5


class QuantizedKVCache(Cache):  # type: ignore[misc]
    """A cache of fixed size for the argument `CACHE`. The model's attention must be "octavo"; `for_model` sets it.

    `max_tokens` is the room for each sequence, prompt and padding included; `dtype` is "fp8" (e4m3), "int8", "bf16",
    "fp16", "fp32", or None for that of the first keys. `scales` are pairs (of keys, of values), float32 with one
    element or one a head, a pair for each layer in order or by the name of its attention. None computes them in a
    warm-up (`per`, `margin`: see `octavo.inference.kv_cache.LayerKVCache`), in which padding counts. The `warm_up`
    "prompt" freezes them after the first prompt; "manual" lets them grow until `freeze()`, and casts the stored tokens
    again each time. An UnservedError if not all layers attend to all tokens; a ValueError for settings or scales that
    do not fit.
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
        layers, pairs, freezes = text.num_hidden_layers, caches.pairs_in_order(scales), warm_up == "prompt"
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

    def reset(self) -> None:
        self.model_cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        self.model_cache.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for store in self.stores:
            store.select(beam_idx)

    def freeze(self) -> None:
        """End the warm-up of every layer: the scales no longer change, and `reset` keeps them."""
        self.model_cache.freeze()


def scales_from_calibration(
    calibration: Calibration, dtype: str = "fp8", *, heads: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """The scales of keys and values for a `QuantizedKVCache`: a pair, float32 [heads or 1], by the name of its
    attention, in the order of the layers. A scale maps the amax of the calibration to the largest number of `dtype`,
    "fp8" or "int8". `heads` is the number of heads of keys, for one scale a head; None gives one scale for all. A
    ValueError for another dtype, or a calibration without keys and values."""
    if DTYPES.get(dtype) not in LARGEST:
        raise ValueError(f"dtype must be 'fp8' or 'int8', got {dtype!r}: bf16 has no scales")
    sites, found = calibration.sites, {}
    for name in (site.removesuffix(".k") for site, seen in sites.items() if seen.kind == "key"):
        amax = (sites[f"{name}.{kind}"].channel_amax.view(heads or 1, -1).amax(1) for kind in "kv")
        k, v = ((a / LARGEST[DTYPES[dtype]]).clamp(min=SMALLEST_SCALE) for a in amax)
        found[name] = (k, v)
    if not found:
        raise ValueError("the calibration has no keys and values: calibrate again with this version of octavo")
    return found


def _check_model(config: Any, max_tokens: int) -> None:
    if getattr(config, "attn_logit_softcapping", None):
        raise UnservedError("QuantizedKVCache serves attention without a softcap (attn_logit_softcapping)")
    key_dim, value_dim = (getattr(config, name, None) for name in ("qk_head_dim", "v_head_dim"))
    if key_dim != value_dim or getattr(config, "kv_lora_rank", None):  # DeepSeek's latents, whatever its heads
        raise UnservedError("QuantizedKVCache serves keys and values of one size, and no latents (kv_lora_rank)")
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "cross_attention_layers", None):  # of Mllama, which names no kinds
        kinds.add("cross_attention")
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise UnservedError(
            f"QuantizedKVCache serves attention over all tokens; the model has layers of the kind {sorted(other)}"
        )
    window = caches.sliding_window(config)
    if window is not None and max_tokens > window:
        raise UnservedError(
            f"the model attends to a sliding window of {window} tokens, this cache to all of its {max_tokens}: use "
            f"max_tokens={window} or less, or transformers' own cache"
        )


# ---- The attention "octavo" for models of transformers, and its mask.
#
# It works with `QuantizedKVCache`, with another cache, and without a cache. transformers' own masks have an entry for
# each pair of query and key. This mask is the index of the first token in each sequence that is not padding: enough for
# left padding, and a decoding step need not build it. Importing this module imports transformers.


ATTENTION = "octavo"
_PASSES: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()  # of a model: each changes what others read


def register_attention() -> None:
    """Register "octavo" as an attention, and its mask, in transformers."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, left_padding)


def _attention(
    module: Any, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls; returns [B, T, H, D]."""
    if kwargs.get("dropout") or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UnservedError("the attention 'octavo' has no dropout, no softcap and no sinks: use 'sdpa' or 'eager'")
    if attention_mask is not None and (attention_mask.dtype, *attention_mask.shape[1:]) != (torch.int32, 1, 1, 1):
        raise ValueError(
            "the attention 'octavo' takes a two-dimensional attention_mask (left padding), not a mask of queries by "
            "keys: use 'sdpa' or 'eager'"
        )
    first = None if attention_mask is None else attention_mask.flatten()
    scale = query.shape[3] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
    if isinstance(key, Appended):
        y = key.attend(query, first, scale)
    elif key.shape[2] == query.shape[2]:  # no cache
        y = caches.prompt_attention(query, key, value, first=first, scale=scale)
    else:  # another cache
        length = torch.full((), key.shape[2], dtype=torch.int64, device=key.device)
        y = cached_attention(query, key.contiguous(), value.contiguous(), None, None, length, first=first, scale=scale)
    return y.transpose(1, 2).contiguous(), None


def left_padding(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """The mask of the attention "octavo": the index of each sequence's first token, int32 [B, 1, 1, 1], or None.

    A mask other than left padding is an error. Reading the mask on the host would make every decoding step on a GPU
    wait; there, such a mask gives -1 instead, and attention returns NaN.
    """
    # Qwen2-MoE without a sliding window has one of 0, and asks for its mask although no layer reads it.
    whole = local_size is not None and (kv_length <= local_size or local_size == 0)
    causal = mask_function is causal_mask_function or whole
    if use_vmap or not causal:
        raise UnservedError(
            "the attention 'octavo' is causal over all tokens, without sliding windows, chunks or packed sequences: "
            "use 'sdpa' or 'eager'"
        )
    if attention_mask is None:
        return None
    pos = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    first = attention_mask.int().argmax(1)
    wrong = ((pos >= first.unsqueeze(1)) & (pos < q_offset + q_length) & ~attention_mask.bool()).any(1)
    # The host may read the mask on a CPU, or in a prompt, but not while a graph is captured or compiled.
    if not torch.compiler.is_compiling() and (
        attention_mask.device.type == "cpu" or (q_length > 1 and not torch.cuda.is_current_stream_capturing())
    ):
        if bool(wrong.any()):
            raise ValueError(
                "the attention 'octavo' takes padding on the left only: each row of attention_mask must be zeros, then "
                "ones (tokenizer.padding_side = 'left')"
            )
        if not bool(first.any()):
            return None
    return torch.where(wrong, -1, first).int().view(-1, 1, 1, 1)


# ---- The forward pass of a model of transformers over a cache of fixed size.


class TransformersForward:
    """A causal language model of transformers with a cache; an UnservedError if the cache does not serve it."""

    def __init__(self, model: Any, max_tokens: int, dtype: str | None, scales: Pairs | None) -> None:
        if model.config.is_encoder_decoder or not model._supports_attention_backend:
            raise UnservedError(f"{type(model).__name__} does not take an attention from outside")
        if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
            raise UnservedError(f"{type(model).__name__} has attention sinks, which the cache does not serve")
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.lock = _PASSES.setdefault(model, threading.Lock())
        self.passed = QuantizedKVCache(model.config, max_tokens, dtype, scales=scales, warm_up="manual")
        self.cache = self.passed.model_cache
        self.keeps = model._supports_logits_to_keep()  # as indices too, whose rows are contiguous
        last = self.config.num_hidden_layers - 1
        self.ends_early = any(isinstance(m, ServedAttention) and m.layer_idx == last for m in model.modules())
        rope = str(getattr(self.config, "rope_parameters", None))
        self.row_by_row = "dynamic" not in rope and "longrope" not in rope  # which change with the length of a text
        self.rotary: Any = getattr(model.base_model, "rotary_emb", None) if self.row_by_row else None
        self.table: Tensor | None = None  # cos and sin of all positions [2, P, D]

    def __call__(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        # transformers passes a mask of four dimensions on as it is; the attention "octavo" reads it as first tokens.
        first = None if self.cache.first is None else self.cache.first.view(-1, 1, 1, 1)
        self.cache.only_last = self.ends_early and (kept is None or len(kept) == 0)
        if kept is None and not self.cache.only_last and tokens.shape[1] > 1:  # the head multiplies a slice by sequence
            kept = torch.tensor([tokens.shape[1] - 1], device=tokens.device)
        with self.lock:
            before, self.config._attn_implementation = self.config._attn_implementation, ATTENTION
            rotary = None if self.rotary is None or "forward" in vars(self.rotary) else self.rotary  # as hooks set it
            if rotary is not None:
                rotary.forward = self._rotate
            try:
                output = self.model(
                    input_ids=tokens,
                    attention_mask=first,
                    position_ids=self.cache.positions(tokens),
                    use_cache=True,
                    **{CACHE: self.passed},
                    **({"logits_to_keep": 1 if kept is None else kept} if self.keeps else {}),
                )
            finally:
                self.config._attn_implementation = before
                if rotary is not None:
                    del rotary.forward
        return output.logits if self.keeps or kept is None else output.logits.index_select(1, kept)

    def _rotate(self, x: Tensor, position_ids: Tensor, *args: Any, **keywords: Any) -> Any:
        """The model's cos and sin of positions [B, T], by one lookup in place of ten operations."""
        own: Any = type(self.rotary).forward
        if args or keywords or position_ids.ndim != 2 or torch.compiler.is_compiling():
            return own(self.rotary, x, position_ids, *args, **keywords)
        if self.table is None or self.table.dtype != x.dtype:
            with torch.inference_mode(False), torch.no_grad():  # a later generation may run outside of inference mode
                tables = own(self.rotary, x, torch.arange(self.cache.max_tokens, device=x.device)[None])
            if {table.shape[:2] for table in tables} != {(1, self.cache.max_tokens)}:  # complex ones, of DeepSeek-V2
                rotary, self.rotary = self.rotary, None
                return own(rotary, x, position_ids)
            self.table = torch.cat(tables)
        return self.table.index_select(1, position_ids.flatten()).view(2, *position_ids.shape, -1).unbind()


# ---- The cache that a model of transformers makes for itself, for models and lengths that ours does not serve.


class OwnCacheSession:
    """A session as the engine calls it (`octavo.inference.session.Session`). A prompt is one forward pass."""

    def __init__(self, model: Any) -> None:
        if CACHE not in (takes := inspect.signature(model.forward).parameters):
            raise UnservedError(f"{type(model).__name__} takes no cache: octavo.load(FOLDER).generate runs it")
        self.model, self.takes = model, takes
        self.keeps = model._supports_logits_to_keep()
        self.cache: Any = None
        self.end = 0
        self.first: Tensor | None = None  # [B, 1], the first token of each row that is not padding; None if none is

    def prefill(self, prompts: Any, piece: int | None = None) -> Tensor:
        """Logits [B, V] after the prompts. An UnservedError if the model cannot leave their padding out."""
        if any(prompts.padding) and "attention_mask" not in self.takes:
            name = type(self.model).__name__
            raise UnservedError(f"{name} takes no attention_mask: give prompts of one length, or one at a time")
        self.first, self.cache, self.end = prompts.first[:, None] if any(prompts.padding) else None, None, 0
        if self.model._supports_default_dynamic_cache():  # RecurrentGemma returns none of its own
            self.cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return self._forward(prompts.ids)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the tokens [B]."""
        return self._forward(tokens[:, None])

    def _forward(self, tokens: Tensor) -> Tensor:
        start, self.end = self.end, self.end + tokens.shape[1]
        # As an index: the head would multiply a slice as one product for each sequence.
        last = torch.tensor([tokens.shape[1] - 1], device=tokens.device)
        padded = {"logits_to_keep": last} if self.keeps else {}
        if self.first is not None:
            padded["attention_mask"] = (torch.arange(self.end, device=tokens.device) >= self.first).long()
            if "position_ids" in self.takes:
                padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, start:]
        output = self.model(input_ids=tokens, use_cache=True, **{CACHE: self.cache}, **padded)
        self.cache = output.get(CACHE, self.cache)
        return output.logits[:, -1]
