"""The KV cache of one attention layer in BF16, E4M3 or INT8, and attention over it.

    keys, values: [B, G, S, D] for G heads of keys in up to S tokens        k ≈ keys * k_scale[g]

The scales come from the caller (a calibration, or a packed folder) or from a warm-up. The warm-up computes them from
the largest magnitude of the tokens seen so far, times a margin. If a later token of the warm-up needs a larger scale,
the stored tokens are cast again with it, which rounds them a second time. After the warm-up the scales are frozen and
stored bytes never change: a token's bytes depend on that token alone. Numbers beyond the range of a frozen scale
saturate, and are counted.

The buffers are allocated once and `length` is a tensor on the device, so one CUDA graph of a decoding step serves all
later steps, and no step waits for the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kv_cache.fp8_prompts import fp8_prompt_attention, is_faster_in_fp8
from octavo.kv_cache.length import Length
from octavo.kv_cache.prompts import prompt_attention
from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.ops import rotate_append
from octavo.ops.attention import LARGEST, MAX_ROWS, append_kv, cached_attention, from_stored, to_stored, widened

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
# A margin of 2 costs E4M3 no precision, since its numbers are as dense, relatively, in each binade. INT8 loses steps.
MARGINS = {"fp8": 2.0, "int8": 1.25}
GRANULARITIES = ("tensor", "head")


class LayerKVCache:
    """The keys and values of one layer, for inference: the buffers are overwritten in place.

    Args:
        shape: [B, G, S, D]: sequences, heads of keys, room for S tokens, head size.
        dtype: "fp8" (e4m3), "int8", or one that is not quantized: "bf16", "fp16", "fp32".
        scales: of keys and of values, float32 with one element or G, positive. None computes them in a warm-up.
        per: "tensor" or "head": one scale for all heads, or one a head, in a warm-up. The default is "head" for INT8
            and "tensor" for E4M3.
        margin: factor of the largest magnitude seen in a warm-up. The default is 2 for E4M3 and 1.25 for INT8.
        device: of the buffers.
        length: the count of tokens that the layers of a model share; its owner advances it. None makes one, which
            `append` advances.
        fp8_attention: whether long prompts attend in E4M3 where that is faster (`octavo.kv_cache.fp8_prompts`).

    Attributes:
        keys, values: the buffers [B, G, S, D]. The first `length` tokens are in use.
        k_scale, v_scale: float32 [G], or None in BF16.
        count: the number of tokens, as `Length`; `length` is its tensor, int64 on the device, no dimension.
        clipped: int64 [2], on the device: how many numbers of the keys and of the values saturated or were NaN.
        warming: whether the scales still grow.
        empty: whether no token is stored.

    Raises:
        ValueError: the dtype or the granularity is unknown, the scales do not fit, or scales are given for a dtype that
            has none.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str = "fp8",
        *,
        scales: tuple[Tensor, Tensor] | None = None,
        per: str | None = None,
        margin: float | None = None,
        device: torch.device | str = "cpu",
        length: Length | None = None,
        fp8_attention: bool = False,
    ) -> None:
        check_settings(dtype, per, margin)
        self.dtype, self.per = dtype, per or ("head" if dtype == "int8" else "tensor")
        self.margin = MARGINS.get(dtype, 1.0) if margin is None else margin
        self.max_tokens, self.fp8_attention = int(shape[2]), fp8_attention
        stored = DTYPES[dtype]
        self.keys, self.values = (torch.zeros(*shape, dtype=stored, device=device) for _ in range(2))
        self.count = Length(self.max_tokens, device) if length is None else length
        self._counts = length is None
        self.clipped = torch.zeros(2, dtype=torch.int64, device=device)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if stored in LARGEST:
            given = (None, None) if scales is None else scales
            self.k_scale, self.v_scale = (_scale(s, int(shape[1]), device) for s in given)
        elif scales is not None:
            raise ValueError(
                f"keys and values in {dtype} have no scales: leave scales out, or use dtype='fp8' or 'int8'"
            )
        self.warming = stored in LARGEST and scales is None
        # Whether one scale of E4M3 serves all heads, as attention in FP8 needs.
        one = self.per == "tensor" if scales is None else all(s.numel() == 1 for s in scales)
        self.one_scale = one and dtype == "fp8"
        self.empty = True

    @property
    def length(self) -> Tensor:
        return self.count.tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, scales included."""
        scales = (s for s in (self.k_scale, self.v_scale) if s is not None)
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values, *scales))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store the keys (after rotary embedding) and values of T new tokens, [B, G, T, D] each.

        Raises:
            RuntimeError: the cache has no room for the tokens, or autograd records them. The host does not see the
                replays of a CUDA graph; when those overrun the cache, `attend` returns NaN instead.
            ValueError: the shape or dtype is wrong.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("a cache overwrites its buffers in place: call the model under torch.no_grad()")
        if self._counts:
            self.count.advance(k.shape[2])
        if self.warming and k.numel():
            self._widen_scales(k, v)
        self.empty = False
        batch, heads, _, dim = self.keys.shape
        if self._plain(k) and k.shape == v.shape == (batch, heads, k.shape[2], dim):
            end = int(self.length)
            self.keys[:, :, end - k.shape[2] : end] = k
            self.values[:, :, end - k.shape[2] : end] = v
        else:
            append_kv(k, v, self.keys, self.values, self.k_scale, self.v_scale, self.length, self.clipped)

    def rotate_append(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, keep_k: bool, **norms: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`append` after rotary embedding, see `octavo.ops.rotate_append`."""
        if self._counts:
            self.count.advance(q.shape[1])
        buffers = self.keys, self.values, self.k_scale, self.v_scale, self.length
        if not self.warming:
            self.empty = False
            return rotate_append(q, k, v, cos, sin, *buffers, self.clipped, keep_k=keep_k, **norms)
        # The scales of a warm-up depend on the rotated keys, so keys and values are stored a second time with them.
        q, keys = rotate_append(q, k, v, cos, sin, *buffers, torch.zeros_like(self.clipped), keep_k=True, **norms)
        assert keys is not None
        values = v.view(*v.shape[:2], -1, keys.shape[3]).transpose(1, 2)
        self._widen_scales(keys, values)
        self.empty = False
        append_kv(keys, values, *buffers, self.clipped)
        return q, keys

    def attend(self, q: Tensor, *, first: Tensor | None = None, scale: float | None = None) -> Tensor:
        """Attention of the last T tokens' queries [B, H, T, D] over the stored ones (`octavo.ops.cached_attention`)."""
        if self._plain(q):
            end = int(self.length)
            k, v = self.keys[:, :, :end], self.values[:, :, :end]
            return prompt_attention(q, k, v, first=first, scale=q.shape[3] ** -0.5 if scale is None else scale)
        if self._is_piece(q):
            return self._attend_piece(q, first, q.shape[3] ** -0.5 if scale is None else scale)
        return cached_attention(
            q, self.keys, self.values, self.k_scale, self.v_scale, self.length, first=first, scale=scale
        )

    def _is_piece(self, q: Tensor) -> bool:
        """Whether q is a piece of a prompt, on a GPU, in code that may use the host's count of tokens."""
        rows = q.shape[1] // self.keys.shape[1] * q.shape[2]
        eager = rows > MAX_ROWS and q.is_cuda and not torch.compiler.is_compiling()
        return eager and not torch.cuda.is_current_stream_capturing()

    def _attend_piece(self, q: Tensor, first: Tensor | None, scale: float) -> Tensor:
        """PyTorch's attention over the tokens in use, so that no memory grows with the room of the cache.

        The result is NaN if replays of a CUDA graph moved the device's count of tokens away from the host's.
        """
        end = self.count.host
        k, v = self.keys[:, :, :end], self.values[:, :, :end]
        if self.one_scale and self.runs_fp8(q, first):
            scales = self.k_scale[:1], torch.where(self.length == end, self.v_scale[:1], torch.nan)  # type: ignore[index]
            return fp8_prompt_attention(q, k, v, scales, scale=scale)
        k, v = widened(k, self.k_scale, q.dtype), widened(v, self.v_scale, q.dtype)
        if self.runs_fp8(q, first):
            y = fp8_prompt_attention(q, k, v, scale=scale)
        else:
            y = prompt_attention(q, k, v, first=first, scale=scale)
        return y.masked_fill_(self.length != end, torch.nan)

    def runs_fp8(self, q: Tensor, first: Tensor | None) -> bool:
        """Whether the attention of the last T tokens [B, H, T, D] runs in FP8: T and the text are long enough."""
        return self.fp8_attention and self._is_piece(q) and is_faster_in_fp8(q, self.count.host, first)

    def freeze(self) -> None:
        """End the warm-up: the scales no longer change, and `reset` keeps them.

        Raises:
            RuntimeError: no token was stored, so there are no scales.
        """
        if self.warming and self.empty:
            raise RuntimeError("the warm-up saw no token: run a prompt through the model before scales are frozen")
        self.warming = False

    def reset(self) -> None:
        """Forget all tokens and the count of clipped numbers. Frozen scales stay; a warm-up starts again."""
        self.count.clear()
        self.clipped.zero_()
        self.empty = True
        if self.warming:
            for scale in (self.k_scale, self.v_scale):
                assert scale is not None
                scale.fill_(SMALLEST_SCALE)

    def crop(self, tokens: int) -> None:
        self.count.crop(tokens)

    def copy_prefix(self, prefix: "LayerKVCache", tokens: int, first: Tensor | None) -> None:
        """Begin each sequence at its token `first`, int32 [B], with the `tokens` tokens of `prefix`, a cache of one
        sequence of the same dtype, as far as they fit in the first `tokens` tokens. None stands for zeros."""
        for mine, theirs in ((self.keys, prefix.keys), (self.values, prefix.values)):
            source = _as_bytes(theirs)[0, :, :tokens]  # [G, T, D]
            if first is not None:
                place = (torch.arange(tokens, device=source.device) - first[:, None]).clamp_(min=0)  # [B, T]
                source = source[:, place].transpose(0, 1)  # [B, G, T, D]
            _as_bytes(mine)[:, :, :tokens] = source
        for scale, given in ((self.k_scale, prefix.k_scale), (self.v_scale, prefix.v_scale)):
            if scale is not None and given is not None:
                scale.copy_(given)
        self.empty = False

    def select(self, sequences: Tensor) -> None:
        """Keep the sequences with these indices, in this order. Another number of sequences needs new buffers."""
        for name in ("keys", "values"):
            data = _as_bytes(getattr(self, name))
            chosen = data.index_select(0, sequences.to(data.device))
            if chosen.shape == data.shape:
                data.copy_(chosen)
            else:
                setattr(self, name, chosen.view(DTYPES[self.dtype]))

    def _plain(self, x: Tensor) -> bool:
        """Whether x is stored as it is, on a CPU, where reading `length` costs nothing: PyTorch does all work."""
        return x.dtype == self.keys.dtype and x.device.type == "cpu" and not torch.compiler.is_compiling()

    def _widen_scales(self, k: Tensor, v: Tensor) -> None:
        """Raise the scales to cover the new tokens, and cast the stored tokens again with them."""
        largest = LARGEST[DTYPES[self.dtype]]
        for x, data, scale in ((k, self.keys, self.k_scale), (v, self.values, self.v_scale)):
            assert scale is not None
            amax = torch.linalg.vector_norm(x.detach(), torch.inf, (0, 2, 3), dtype=torch.float32)  # [G]
            amax = amax if self.per == "head" else amax.amax().expand_as(amax)
            needed = torch.maximum(scale, amax * self.margin / torch.full_like(amax, largest))
            needed = torch.where(needed.isfinite(), needed, torch.nan)
            if not self.empty:
                self._recast(data, scale, needed, k.shape[2])
            scale.copy_(needed)

    def _recast(self, data: Tensor, scale: Tensor, needed: Tensor, new: int) -> None:
        """Cast the stored tokens, all but the last `new`, from `scale` to `needed`."""
        if not _is_recorded(data):  # the host may wait, and knows the number of tokens
            if bool((needed == scale).all()):
                return
            data = data[:, :, : self.count.host - new]
        recast, _ = to_stored(from_stored(data) * scale.view(-1, 1, 1), needed, data.dtype)
        data.copy_(recast)


def _is_recorded(t: Tensor) -> bool:
    """Whether the work on `t` is compiled, or captured as a CUDA graph."""
    return torch.compiler.is_compiling() or (t.is_cuda and torch.cuda.is_current_stream_capturing())


def check_settings(dtype: str, per: str | None, margin: float | None) -> None:
    """Raise a ValueError unless these are settings of a cache."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r} of keys and values: choose one of {', '.join(DTYPES)}")
    if per is not None and per not in GRANULARITIES:
        raise ValueError(f"scales must be per {' or per '.join(GRANULARITIES)}, got {per!r}")
    if margin is not None and not 1 <= margin < float("inf"):
        raise ValueError(f"the margin multiplies the largest magnitude seen and must be at least 1, got {margin}")


def _scale(given: Tensor | None, heads: int, device: torch.device | str) -> Tensor:
    """One scale a head, float32 [heads]."""
    if given is None:
        return torch.full((heads,), SMALLEST_SCALE, device=device)
    scale = given.detach().to(device=device, dtype=torch.float32).flatten()
    if scale.numel() not in (1, heads) or not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(
            f"a scale of keys or values must have one element or {heads}, each positive and finite, got "
            f"{given.tolist()}"
        )
    return scale.expand(heads).clone()


def _as_bytes(data: Tensor) -> Tensor:
    """Eight-bit floats as integers, which indexing takes on every device; other dtypes unchanged."""
    return data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data
