"""Causal attention over keys and values that are cached between calls.

Token t attends to tokens 0..t, and the keys and values of a token never change once computed. So a decoder that
emits one token at a time keeps K and V of every layer (Shazeer 2019, arXiv:1911.02150, section 2.4) and computes them
for the new tokens only. With T new queries and S >= T keys in all, query i sits at position S - T + i and sees the
keys j <= S - T + i.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """Keys and values of `layers` layers, for up to `context` tokens. For inference: it is written in place.

    The first `append` to a layer allocates its buffers, [B, kv_heads, context, head_dim] each, with the batch, heads,
    dtype and device of the tensors that it gets.
    """

    def __init__(self, layers: int, context: int) -> None:
        if layers < 1 or context < 1:
            raise ValueError(f"KVCache needs layers >= 1 and context >= 1, got layers={layers}, context={context}")
        self.context = context
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._filled = [0] * layers

    @property
    def length(self) -> int:
        """Tokens that have passed through every layer: the position of the next token."""
        return min(self._filled)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v, [B, kv_heads, T, head_dim] each.

        Returns all keys and values of the layer, as views [B, kv_heads, S, head_dim].

        Raises:
            RuntimeError: the cache would exceed `context` tokens, or autograd records k or v.
            ValueError: the shape or the dtype is not that of the tokens before.
        """
        if k.requires_grad or v.requires_grad:
            raise RuntimeError("KVCache overwrites its buffers in place: call the model under torch.no_grad()")
        start = self._filled[layer]
        stop = start + k.shape[2]
        if stop > self.context:
            raise RuntimeError(
                f"KVCache of {self.context} tokens is full: it holds {start} and got {k.shape[2]} more; "
                "make a larger one, or start a new one from the most recent tokens"
            )
        keys = self._keys[layer] = _buffer(self._keys[layer], k, self.context)
        values = self._values[layer] = _buffer(self._values[layer], v, self.context)
        keys[:, :, start:stop] = k
        values[:, :, start:stop] = v
        self._filled[layer] = stop
        return keys[:, :, :stop], values[:, :, :stop]


def _buffer(buffer: Tensor | None, x: Tensor, context: int) -> Tensor:
    batch, heads, _, head_dim = x.shape
    if buffer is None:
        return x.new_empty(batch, heads, context, head_dim)
    # Assignment to a slice would broadcast a batch of one in silence.
    if buffer.shape[:2] != (batch, heads) or buffer.shape[3] != head_dim or buffer.dtype != x.dtype:
        raise ValueError(
            f"KVCache holds {buffer.dtype} [B, kv_heads, context, head_dim] = {tuple(buffer.shape)}, "
            f"got {x.dtype} {tuple(x.shape)}; use one cache for one batch"
        )
    return buffer


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, where the T queries are the last T of the S positions.

    q[B, heads, T, head_dim], k and v[B, kv_heads, S, head_dim] with heads a multiple of kv_heads (query head h reads
    key head h * kv_heads // heads). Each probability is dropped with the probability `dropout`. Returns
    [B, heads, T, head_dim] in q's dtype.
    """
    T, S = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if T == S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=gqa)
    # is_causal counts positions from the first key, which is wrong for queries that come after cached ones.
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(diagonal=S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa)
