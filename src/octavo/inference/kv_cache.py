"""The KV cache of a model in BF16, E4M3 or INT8: one `LayerKVCache` a layer, one count of tokens for all, and the
attention over it.

    cache = ModelKVCache(layers=32, max_tokens=4096, dtype="fp8")
    y = cache.append(i, k, v).attend(q, cache.first, scale)      in layer i; q [B, H, T, D], k and v [B, G, T, D]

    keys, values: [B, G, S, D] for G heads of keys in up to S tokens        k ≈ keys * k_scale[g]

The scales come from the caller (a calibration, or a packed folder) or from a warm-up. The warm-up computes them from
the largest magnitude of the tokens seen so far, times a margin. If a later token of the warm-up needs a larger scale,
the stored tokens are cast again with it, which rounds them a second time. After the warm-up the scales are frozen and
stored bytes never change: a token's bytes depend on that token alone. Numbers beyond the range of a frozen scale
saturate, and are counted.

The buffers are allocated once, by the first keys, which set the batch size, heads, head size and device. `length` is a
tensor on the device, so one CUDA graph of a decoding step serves all later steps, and no step waits for the device. The
sequences of a batch end at the same place: a shorter one has padding on its left, and `first` says how much.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.nn.attention_layers import quantize_heads
from octavo.numerics.formats import LARGEST
from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.ops import fp8_attention, fp8_attention_limit, rotate_append
from octavo.ops.attention import MAX_ROWS, append_kv, cached_attention, from_stored, to_stored, widened
from octavo.ops.dispatch import SHORTEST_PROMPT

Pairs = Sequence[tuple[Tensor, Tensor]]  # scales of keys and of values, for each layer
Scales = Pairs | Mapping[str, tuple[Tensor, Tensor]]

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# A margin of 2 costs E4M3 no precision, since its numbers are as dense, relatively, in each binade. INT8 loses steps.
MARGINS = {"fp8": 2.0, "int8": 1.25}
GRANULARITIES = ("tensor", "head")
ATTENTIONS = ("bf16", "fp8")


class UnservedError(ValueError):
    """The cache does not serve the attention of a model; the message says why."""


def check_settings(
    dtype: str | None, per: str | None = None, margin: float | None = None, attention: str = "bf16"
) -> None:
    """Raise a ValueError unless these are settings of a cache, and of the attention of prompts over it."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r} of keys and values: choose one of {', '.join(DTYPES)}")
    if per is not None and per not in GRANULARITIES:
        raise ValueError(f"scales must be per {' or per '.join(GRANULARITIES)}, got {per!r}")
    if margin is not None and not 1 <= margin < float("inf"):
        raise ValueError(f"the margin multiplies the largest magnitude seen and must be at least 1, got {margin}")
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")


class Length:
    """The number of tokens of a cache, which all layers of a model share. Kernels read `tensor`, int64 without
    dimensions. `host` is the same number without a wait for the device; replays of a CUDA graph do not change it.
    `first` is that of `ModelKVCache`, and `last`, int64 [1], the index of the last new token before padding on the
    right, or None without padding there."""

    def __init__(self, max_tokens: int, device: torch.device | str) -> None:
        self.max_tokens = max_tokens
        self.tensor: Tensor = torch.zeros((), dtype=torch.int64, device=device)
        self.host = 0
        self.first: Tensor | None = None
        self.last: Tensor | None = None

    def advance(self, tokens: int) -> None:
        """Count new tokens; a RuntimeError if there is no room. Compiled code does not check."""
        if not torch.compiler.is_compiling():
            if self.host + tokens > self.max_tokens:
                raise RuntimeError(
                    f"a cache of {self.max_tokens} tokens is full: it holds {self.host} and got {tokens} more; make a "
                    "larger one"
                )
            self.host += tokens
        self.tensor.add_(tokens)

    def crop(self, tokens: int) -> None:
        """Forget the last tokens."""
        self.tensor.sub_(tokens).clamp_(min=0)
        self.host = max(0, self.host - tokens)

    def clear(self) -> None:
        self.tensor.zero_()
        self.host = 0

    def unpadded(self, *new: Tensor) -> tuple[Tensor, ...]:
        """New keys or values [B, G, T, D], with zeros for the padding of a prompt: scales do not depend on it."""
        tokens = new[0].shape[2]
        if self.first is not None:  # with padding on the left, none is on the right
            at = torch.arange(tokens, device=self.first.device) + self.tensor - tokens
            real = (at >= self.first[:, None])[:, None]  # [B, 1, T]
        elif self.last is not None:
            real = torch.arange(tokens, device=self.last.device) <= self.last
        else:
            return new
        return tuple(torch.where(real[..., None], x, 0) for x in new)


class LayerKVCache:
    """The keys and values of one layer, for inference: the buffers, `shape` [B, G, S, D], are overwritten in place.

    `count` is that of all layers of a model: its owner advances it before new tokens are stored. `scales` are those of
    keys and of values, float32 with one element or G, positive; None computes them in a warm-up, `per` "tensor" or
    "head", with a `margin` over the largest magnitude seen. With `fp8_attention`, long prompts attend in E4M3 where
    that is faster.

    The first `length` tokens of `keys` and `values` are in use; `k_scale` and `v_scale` are float32 [G], or None in
    BF16. `clipped`, int64 [2] on the device, counts the numbers of the keys and of the values that saturated or were
    NaN. While `warming`, the scales grow. `empty` says that no token is stored.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str,
        count: Length,
        *,
        scales: tuple[Tensor, Tensor] | None = None,
        per: str | None = None,
        margin: float | None = None,
        fp8_attention: bool = False,
    ) -> None:
        self.dtype, self.per = dtype, per or ("head" if dtype == "int8" else "tensor")
        self.margin = MARGINS.get(dtype, 1.0) if margin is None else margin
        self.count, self.fp8_attention = count, fp8_attention
        stored, device = DTYPES[dtype], count.tensor.device
        self.keys, self.values = (torch.zeros(*shape, dtype=stored, device=device) for _ in range(2))
        self.clipped = torch.zeros(2, dtype=torch.int64, device=device)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if stored in LARGEST:
            given = (None, None) if scales is None else scales
            self.k_scale, self.v_scale = (_scale(s, int(shape[1]), device) for s in given)
        elif scales is not None:
            raise ValueError(f"keys and values in {dtype} have no scales: leave scales out, or use 'fp8' or 'int8'")
        self.warming = stored in LARGEST and scales is None
        # True if one scale of E4M3 serves all heads, as attention in FP8 needs.
        one = self.per == "tensor" if scales is None else all(s.numel() == 1 for s in scales)
        self.one_scale = one and dtype == "fp8"
        self.empty = True

    @property
    def length(self) -> Tensor:
        return self.count.tensor

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """Keys, values, their scales and the length, as the operations take them."""
        return self.keys, self.values, self.k_scale, self.v_scale, self.count.tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, scales included."""
        return sum(t.nbytes for t in self.buffers[:4] if t is not None)

    def append(self, k: Tensor, v: Tensor) -> "Appended":
        """Store the keys (after rotary embedding) and values of T new tokens, [B, G, T, D] each, which are counted.

        A RuntimeError if autograd records the tokens. The host does not see the replays of a CUDA graph; when those
        overrun the cache, `attend` returns NaN.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("a cache overwrites its buffers in place: call the model under torch.no_grad()")
        appended = Appended(self, k, v, self.empty)
        if self.warming and k.numel():
            k, v = self.count.unpadded(k, v)
            self._widen_scales(k, v)
        self.empty = False
        batch, heads, _, dim = self.keys.shape
        if self._plain(k) and k.shape == v.shape == (batch, heads, k.shape[2], dim):
            end = int(self.length)
            self.keys[:, :, end - k.shape[2] : end] = k
            self.values[:, :, end - k.shape[2] : end] = v
        else:
            append_kv(k, v, *self.buffers, self.clipped)
        return appended

    def rotate_append(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **norms: Any
    ) -> tuple[Tensor, "Appended"]:
        """Rotated queries, and what `append` returns after rotary embedding, see `octavo.ops.rotate_append`."""
        was_empty = self.empty
        clipped = torch.zeros_like(self.clipped) if self.warming else self.clipped
        keep_k = self.warming or (was_empty and q.shape[1] > 1)
        q, keys = rotate_append(q, k, v, cos, sin, *self.buffers, clipped, keep_k=keep_k, **norms)
        if keys is None:
            self.empty = False
            return q, Appended(self, None, None, was_empty)
        values = v.view(*v.shape[:2], -1, keys.shape[3]).transpose(1, 2)
        if self.warming:  # its scales depend on the rotated keys, so both are stored a second time with them
            return q, self.append(keys, values)
        self.empty = False
        return q, Appended(self, keys, values, was_empty)

    def attend(self, q: Tensor, first: Tensor | None, scale: float) -> Tensor:
        """Attention of the last T tokens' queries [B, H, T, D] over the stored ones (`octavo.ops.cached_attention`)."""
        if self._plain(q):
            end = int(self.length)
            return prompt_attention(q, self.keys[:, :, :end], self.values[:, :, :end], first=first, scale=scale)
        if self._is_piece(q):
            return self._attend_piece(q, first, scale)
        return cached_attention(q, *self.buffers, first=first, scale=scale)

    def _is_piece(self, q: Tensor) -> bool:
        """True if q is a piece of a prompt, on a GPU, in code that may use the host's count of tokens."""
        rows = q.shape[1] // self.keys.shape[1] * q.shape[2]
        eager = rows > MAX_ROWS and q.is_cuda and not torch.compiler.is_compiling()
        return eager and not torch.cuda.is_current_stream_capturing()

    def _attend_piece(self, q: Tensor, first: Tensor | None, scale: float) -> Tensor:
        """PyTorch's attention over the tokens in use, so that no memory grows with the room of the cache.

        The result is NaN if replays of a CUDA graph moved the device's count of tokens away from the host's.
        """
        end, fp8 = self.count.host, self.runs_fp8(q, first)
        k, v = self.keys[:, :, :end], self.values[:, :, :end]
        if self.one_scale and fp8:
            scales = self.k_scale[:1], torch.where(self.length == end, self.v_scale[:1], torch.nan)  # type: ignore[index]
            return fp8_prompt_attention(q, k, v, scales, scale=scale)
        k, v = widened(k, self.k_scale, q.dtype), widened(v, self.v_scale, q.dtype)
        y = fp8_prompt_attention(q, k, v, scale=scale) if fp8 else prompt_attention(q, k, v, first=first, scale=scale)
        return y.masked_fill_(self.length != end, torch.nan)

    def runs_fp8(self, q: Tensor, first: Tensor | None) -> bool:
        """True if the attention of the last T tokens [B, H, T, D] runs in FP8: T and the text are long enough."""
        return self.fp8_attention and self._is_piece(q) and is_faster_in_fp8(q, self.count.host, first)

    def restart(self) -> None:
        """Forget all tokens; the counts, which are on the device, stay. Frozen scales stay; a warm-up starts again."""
        self.empty = True
        if self.warming:
            for scale in (self.k_scale, self.v_scale):
                assert scale is not None
                scale.fill_(SMALLEST_SCALE)

    def part(self, sequences: slice, new: int) -> "LayerKVCache":
        """A view of the cache of some sequences, whose `new` next tokens are counted already. Not for a warm-up, whose
        scales follow from all sequences."""
        part = copy(self)
        part.keys, part.values = self.keys[sequences], self.values[sequences]
        part.empty, self.empty = self.count.host == new, False
        return part

    def select(self, sequences: Tensor) -> None:
        """Keep the sequences with these indices, in this order. Another number of sequences needs new buffers."""
        for name in ("keys", "values"):
            data = getattr(self, name).view(torch.uint8)  # indexing takes integers on every device
            chosen = data.index_select(0, sequences.to(data.device))
            if chosen.shape == data.shape:
                data.copy_(chosen)
            else:
                setattr(self, name, chosen.view(DTYPES[self.dtype]))

    def _plain(self, x: Tensor) -> bool:
        """True if x is stored as it is, on a CPU, where reading `length` costs nothing: PyTorch does all work."""
        return x.dtype == self.keys.dtype and x.device.type == "cpu" and not torch.compiler.is_compiling()

    def _widen_scales(self, k: Tensor, v: Tensor) -> None:
        """Raise the scales to cover the new tokens, and cast the stored tokens again with them."""
        largest = LARGEST[DTYPES[self.dtype]]
        recorded = torch.compiler.is_compiling() or (k.is_cuda and torch.cuda.is_current_stream_capturing())
        for x, data, scale in ((k, self.keys, self.k_scale), (v, self.values, self.v_scale)):
            assert scale is not None
            amax = torch.linalg.vector_norm(x.detach(), torch.inf, (0, 2, 3), dtype=torch.float32)  # [G]
            amax = amax if self.per == "head" else amax.amax().expand_as(amax)
            needed = torch.maximum(scale, amax * self.margin / torch.full_like(amax, largest))
            needed = torch.where(needed.isfinite(), needed, torch.nan)
            if not self.empty:
                if not recorded:  # the host may wait, and knows the number of tokens
                    if bool((needed == scale).all()):
                        continue
                    data = data[:, :, : self.count.host - k.shape[2]]
                recast, _ = to_stored(from_stored(data) * scale.view(-1, 1, 1), needed, data.dtype)
                data.copy_(recast)
            scale.copy_(needed)


def _scale(given: Tensor | None, heads: int, device: torch.device | str) -> Tensor:
    if given is None:
        return torch.full((heads,), SMALLEST_SCALE, device=device)
    scale = given.detach().to(device=device, dtype=torch.float32).flatten()
    if scale.numel() not in (1, heads) or not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(
            f"a scale of keys or values must have one element or {heads}, each positive and finite, got "
            f"{given.tolist()}"
        )
    return scale.expand(heads).clone()


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
        return self.store.attend(q, first, scale)

    def __getattr__(self, name: str) -> Any:
        """Nothing: the code of some models takes it for a tensor, in front of their attention."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnservedError(f"the code of the model reads its keys or values itself ({name})")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        return cls.__getattr__(function, function.__name__)


class ModelKVCache:
    """The KV caches of the layers of a model, for inference.

    `max_tokens` is the room for each sequence, prompt and padding included. The other settings are those of
    `LayerKVCache`: a `dtype` of None takes that of the first keys, and `scales` has one pair a layer, in order. The
    scales of a warm-up are frozen after the first tokens, unless `freezes` is False: then `freeze` does it.

    `stores` is empty, and `length` None, before the first keys; the first layer advances `length`. `first`, int32 [B],
    is the first token of each sequence that is not padding, or None without padding; `last` that of `Length`. The
    first keys read `fp8_attention`.

    Where the prompts of a batch come one group of sequences after the other (`begin`), `sequences` are those of the
    group. `only_last` says that no logits but those of the last token are asked for: the last layer computes no other
    output.
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
        check_settings(dtype, per, margin)
        if scales is not None and len(scales) != layers:
            raise ValueError(f"the model has {layers} layers, and scales were given for {len(scales)}")
        self.layers, self.max_tokens, self.dtype, self.freezes = layers, max_tokens, dtype, freezes
        self.scales, self.per, self.margin, self.fp8_attention = scales, per, margin, False
        self.stores: list[LayerKVCache] = []
        self.length: Length | None = None
        self.batch: int | None = None  # sequences of the buffers; None takes those of the first keys
        self.sequences: slice | None = None
        self.only_last = False
        self.first: Tensor | None = None
        self.last: Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens stored, as the host knows it."""
        return 0 if self.length is None else self.length.host

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    def append(self, layer: int, k: Tensor, v: Tensor) -> Appended:
        """`LayerKVCache.append` in one layer. A RuntimeError too if the cache has no room."""
        if not self.stores:
            self._allocate(k, v)
        store = self._counted(layer, k.shape[2])
        appended = store.append(k, v)
        if self.freezes:
            store.warming = False
        return appended

    def rotate_append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **norms: Any
    ) -> tuple[Tensor, Appended]:
        """Rotate the queries [B, T, H * D] and keys of new tokens, and store keys and values [B, T, G * D], with one
        kernel (`octavo.ops.rotate_append`). Returns the rotated queries [B, H, T, D], and what `append` returns."""
        if not self.stores:
            self._allocate(*(x.view(*x.shape[:2], -1, cos.shape[-1]).transpose(1, 2) for x in (k, v)))
        store = self._counted(layer, q.shape[1])
        q, appended = store.rotate_append(q, k, v, cos, sin, **norms)
        if self.freezes:
            store.warming = False
        return q, appended

    def positions(self, tokens: Tensor) -> Tensor:
        """The positions of the next tokens [B, T] in their texts: int64 [1, T], or [B, T] with padding."""
        start = torch.zeros((), dtype=torch.int64, device=tokens.device) if self.length is None else self.length.tensor
        if tokens.shape[1] == 1 and self.first is not None:  # a step, in two launches of four
            return (start.view(1, 1) - self.first[:, None]).clamp_(min=0)
        positions = start + torch.arange(tokens.shape[1], device=tokens.device)[None]
        return positions if self.first is None else (positions - self.first[:, None]).clamp_(min=0)

    def begin(self, sequences: slice | None) -> None:
        """The next tokens are the first ones of these sequences; with None, the next ones of all sequences."""
        self.sequences = sequences
        if sequences is not None and self.length is not None:
            self.length.clear()

    @property
    def has_warm_up(self) -> bool:
        """True if the scales follow from the prompts, of all sequences together."""
        return self.dtype is not None and DTYPES[self.dtype] in LARGEST and self.scales is None

    def freeze(self) -> None:
        """End the warm-up of every layer: the scales no longer change, and `reset` keeps them."""
        if not self.stores or any(store.warming and store.empty for store in self.stores):
            raise RuntimeError("the warm-up saw no token: run a prompt through the model before scales are frozen")
        for store in self.stores:
            store.warming = False

    def reset(self, *, scales: bool = False) -> None:
        """Forget all tokens and the count of clipped numbers; with `scales`, those of a warm-up too."""
        self.first = self.last = self.sequences = None
        if self.length is not None:  # two launches for all layers
            self.length.clear()
            torch._foreach_zero_([store.clipped for store in self.stores])
        for store in self.stores:
            store.warming |= scales and self.scales is None and store.k_scale is not None
            store.restart()

    def set_host_count(self, tokens: int) -> None:
        """Tell the host how many tokens are stored, after a capture or before a replay of a CUDA graph."""
        assert self.length is not None
        self.length.host = tokens
        for store in self.stores:
            store.empty = not tokens

    def crop(self, tokens: int) -> None:
        """Forget the last tokens."""
        if self.length is not None:
            self.length.crop(tokens)

    def _counted(self, layer: int, new: int) -> LayerKVCache:
        """The layer's cache. The first layer counts the `new` tokens of a forward pass."""
        if layer == 0:
            assert self.length is not None
            self.length.advance(new)
            self.length.first, self.length.last = self.first, self.last
        store = self.stores[layer]
        return store if self.sequences is None else store.part(self.sequences, new)

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        heads, _, dim = k.shape[1:]
        batch = k.shape[0] if self.batch is None else self.batch
        if v.shape[3] != dim:
            raise UnservedError(f"keys and values must have the same head size, got {dim} and {v.shape[3]}")
        # Buffers of inference mode could not be written outside of it later.
        with nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False):
            self.length = Length(self.max_tokens, k.device)
            self.stores = [
                LayerKVCache(
                    (batch, heads, self.max_tokens, dim),
                    self.dtype or NAMES[k.dtype],
                    self.length,
                    scales=None if self.scales is None else self.scales[i],
                    per=self.per,
                    margin=self.margin,
                    fp8_attention=self.fp8_attention,
                )
                for i in range(self.layers)
            ]
        if not torch.compiler.is_compiling():  # as transformers' own caches do, so that CUDA graphs may write to them
            for store in self.stores:
                for t in (*store.buffers, store.clipped):
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


# ---- PyTorch's attention of a prompt, or of a piece of it, to the tokens up to it.


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, *, first: Tensor | None = None, scale: float) -> Tensor:
    """PyTorch's attention [B, H, T, D] of the last T tokens of a text, q, to those up to them, k and v [B, G, S, D].

    `first`, int32 [B], is the first token of each sequence that is not padding. A token before it sees only itself. A
    negative one makes the result NaN. `scale` is multiplied into q @ k^T.
    """
    (new, tokens), gqa = (q.shape[2], k.shape[2]), q.shape[1] != k.shape[1]
    if first is None and new in (1, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, scale=scale, enable_gqa=gqa)
    has_flash = q.is_cuda and q.element_size() == 2 and q.shape[3] <= 256
    if first is None and has_flash and not torch.compiler.is_compiling():  # without a mask in memory
        from torch.nn.attention.bias import causal_lower_right  # imports TorchDynamo: about a second

        aligned = causal_lower_right(new, tokens)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=aligned, scale=scale, enable_gqa=gqa)
    if gqa and q.device.type != "cpu":
        # With a mask, enable_gqa takes PyTorch's slow path, so keys and values are repeated for each query head.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        gqa = False
    j = torch.arange(tokens, device=q.device)
    position = j[tokens - new :].unsqueeze(1)
    mask = j <= position  # [T, S]
    if first is not None:
        mask = mask & (j >= first.view(-1, 1, 1, 1)) | (j == position)  # [B, 1, T, S]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return y if first is None else y.masked_fill((first < 0).view(-1, 1, 1, 1), torch.nan)


# ---- Attention of long prompts in E4M3 (`octavo.ops.fp8_attention`), where that is faster than PyTorch's in BF16.


FEWEST = 1024  # queries: with fewer, BF16 is faster than FP8 with its casts


def is_faster_in_fp8(q: Tensor, tokens: int, first: Tensor | None) -> bool:
    """True if the attention of queries [B, H, T, D] to `tokens` tokens is faster in FP8. It takes no padding."""
    long = first is None and tokens >= SHORTEST_PROMPT and q.shape[2] >= FEWEST
    return long and not fp8_attention_limit(q.device, q.shape[3])


def fp8_prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None, *, scale: float
) -> Tensor:
    """`prompt_attention` in E4M3, without padding; a view of contiguous [B, T, H, D].

    q is quantized here with one scale. So are k and v, unless they are E4M3 as a cache stores them: then `scales` are
    those of keys and of values, float32 with one element each.
    """
    q_data, q_scale = quantize_heads(q)
    if scales is None:
        (k, k_scale), (v, v_scale) = quantize_heads(k), quantize_heads(v)
    else:
        k_scale, v_scale = scales
    return fp8_attention(q_data, k, v, q_scale, k_scale, v_scale, scale=scale, dtype=q.dtype).y
