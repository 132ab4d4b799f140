"""The keys and values of one attention layer, kept as BF16, E4M3 or INT8, and attention over them.

    keys, values: [B, G, S, D] for G heads of keys in up to S tokens        k ≈ keys * k_scale[g]

Scales are given (by a calibration, or a packed folder), or found in a warm-up: from the largest magnitude of the tokens
seen so far, times a margin. When a later token of the warm-up needs a larger scale, what is stored is cast again under
it, a second rounding; when the warm-up is over scales are frozen, and nothing stored ever changes: a token's bytes
depend on that token alone. What exceeds a frozen scale saturates, and is counted.

Memory is taken once and `length` lives on the device, so that a CUDA graph of a step serves every later step, and no
step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.ops.attention import append_kv, cached_attention
from octavo.ops.attention.reference import LARGEST, from_stored, to_stored

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
MARGINS = {"bf16": 1.0, "fp8": 2.0, "int8": 1.25}  # a binade of E4M3 costs no precision; INT8 pays for each part
GRANULARITIES = ("tensor", "head")


class LayerKVCache:
    """Keys and values of one layer. For inference: it is written in place.

    Args:
        shape: [B, G, S, D], the last S tokens' room included.
        dtype: "bf16", "fp8" (e4m3) or "int8".
        scales: of keys and of values, float32 with one element or G, positive; None finds them in a warm-up.
        per: "tensor" or "head": what shares a scale that is found. "head" by default for INT8, "tensor" for E4M3.
        margin: of a scale that is found, over the largest magnitude seen; 2 by default for E4M3, 1.25 for INT8.
        device: of the buffers.

    Attributes:
        keys, values: the buffers, of which the first `length` tokens count.
        k_scale, v_scale: float32 [G], or None in BF16.
        length: int64, no dimension, on the device.
        clipped: int64 [2], on the device: how many numbers of the keys and of the values saturated, or were NaN.

    Raises:
        ValueError: an unknown dtype or granularity, scales that do not fit, or that BF16 does not have.
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
    ) -> None:
        check_settings(dtype, per, margin)
        self.dtype, self.per = dtype, per or ("head" if dtype == "int8" else "tensor")
        self.margin = MARGINS[dtype] if margin is None else margin
        self.max_tokens = int(shape[2])
        stored = DTYPES[dtype]
        self.keys, self.values = (torch.zeros(*shape, dtype=stored, device=device) for _ in range(2))
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.clipped = torch.zeros(2, dtype=torch.int64, device=device)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if stored in LARGEST:
            given = (None, None) if scales is None else scales
            self.k_scale, self.v_scale = (_scale(s, int(shape[1]), device) for s in given)
        elif scales is not None:
            raise ValueError("keys and values in bf16 have no scales: leave them out, or take dtype='fp8' or 'int8'")
        self.warming = stored in LARGEST and scales is None
        self.empty = True
        self._seen = 0  # of `length`, as far as the host knows: replays of a CUDA graph go by it

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, scales included."""
        scales = (s for s in (self.k_scale, self.v_scale) if s is not None)
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values, *scales))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store the keys (after their rotation) and values of T new tokens, [B, G, T, D] each.

        Raises:
            RuntimeError: there is no room for them; after replays of a CUDA graph, which the host does not see,
                `attend` gives NaN instead. Or autograd records them.
            ValueError: another shape or dtype.
        """
        self._check_room(k.shape[2])
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("a cache overwrites its buffers in place: call the model under torch.no_grad()")
        if self.warming and k.numel():
            self._widen_scales(k, v)
        self.length.add_(k.shape[2])
        append_kv(k, v, self.keys, self.values, self.k_scale, self.v_scale, self.length, self.clipped)
        self.empty = False

    def attend(self, q: Tensor, *, first: Tensor | None = None, scale: float | None = None) -> Tensor:
        """Attention of the newest tokens' queries [B, H, T, D] over all that is stored: `ops.cached_attention`."""
        return cached_attention(
            q, self.keys, self.values, self.k_scale, self.v_scale, self.length, first=first, scale=scale
        )

    def freeze(self) -> None:
        """End the warm-up: from now on no scale changes, and `reset` keeps them.

        Raises:
            RuntimeError: no token has been seen, so that there is no scale to keep.
        """
        if self.warming and self.empty:
            raise RuntimeError("the warm-up saw no token: run a prompt through the model before scales are frozen")
        self.warming = False

    def reset(self) -> None:
        """Forget the tokens, and what was clipped; scales stay where they are frozen, else the warm-up begins anew."""
        self.length.zero_()
        self.clipped.zero_()
        self.empty, self._seen = True, 0
        if self.warming:
            for scale in (self.k_scale, self.v_scale):
                assert scale is not None
                scale.fill_(SMALLEST_SCALE)

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens."""
        self.length.sub_(tokens).clamp_(min=0)
        self._seen = max(0, self._seen - tokens)

    def select(self, sequences: Tensor) -> None:
        """Keep these sequences, by their indices in the batch, in this order: of another number, in new memory."""
        for name in ("keys", "values"):
            data = getattr(self, name).view(torch.uint8) if self.dtype == "fp8" else getattr(self, name)
            chosen = data.index_select(0, sequences.to(data.device))
            if chosen.shape == data.shape:
                data.copy_(chosen)
            else:
                setattr(self, name, chosen.view(DTYPES[self.dtype]))

    def _check_room(self, new: int) -> None:
        if torch.compiler.is_compiling():
            return
        if self._seen + new > self.max_tokens:
            raise RuntimeError(
                f"a cache of {self.max_tokens} tokens is full: it holds {self._seen} and got {new} more; make a larger "
                "one"
            )
        self._seen += new

    def _widen_scales(self, k: Tensor, v: Tensor) -> None:
        """Raise the scales to what new tokens need; cast what is stored again under them."""
        largest = LARGEST[DTYPES[self.dtype]]
        for x, data, scale in ((k, self.keys, self.k_scale), (v, self.values, self.v_scale)):
            assert scale is not None
            amax = x.detach().abs().amax((0, 2, 3)).float()  # [G]; NaN passes through it and poisons the scale
            amax = amax if self.per == "head" else amax.amax().expand_as(amax)
            needed = torch.maximum(scale, amax * self.margin / torch.full_like(amax, largest))
            needed = torch.where(needed.isfinite(), needed, torch.nan)
            if not self.empty:
                again, _ = to_stored(from_stored(data) * scale.view(-1, 1, 1), needed, data.dtype)
                data.copy_(again)
            scale.copy_(needed)


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, *, first: Tensor | None = None, scale: float) -> Tensor:
    """Causal attention of T tokens among themselves, not read from a cache: what a prompt needs.

    Args:
        q: [B, H, T, D].
        k, v: [B, G, T, D].
        first: int32 [B], the first token that counts in each sequence; those before it see themselves alone.
        scale: of the products.

    Returns:
        [B, H, T, D] in q's dtype.
    """
    if first is None:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))  # masks and gqa: PyTorch's slow way
    at = torch.arange(q.shape[2], device=q.device)
    seen = (at <= at.unsqueeze(1)) & (at >= first.view(-1, 1, 1, 1)) | (at == at.unsqueeze(1))  # [B, 1, T, T]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return y.masked_fill((first < 0).view(-1, 1, 1, 1), torch.nan)


def check_settings(dtype: str, per: str | None, margin: float | None) -> None:
    """Raise ValueError unless these describe a cache."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r} of keys and values: choose one of {', '.join(DTYPES)}")
    if per is not None and per not in GRANULARITIES:
        raise ValueError(f"scales are per {' or per '.join(GRANULARITIES)}, got {per!r}")
    if margin is not None and not 1 <= margin < float("inf"):
        raise ValueError(f"a margin over the largest magnitude seen is at least 1, got {margin}")


def _scale(given: Tensor | None, heads: int, device: torch.device | str) -> Tensor:
    """A scale of each head, float32 [heads]."""
    if given is None:
        return torch.full((heads,), SMALLEST_SCALE, device=device)
    scale = given.detach().to(device=device, dtype=torch.float32).flatten()
    if scale.numel() not in (1, heads) or not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(
            f"a scale of keys or values has one element or {heads}, each positive and finite, got {given.tolist()}"
        )
    return scale.expand(heads).clone()
