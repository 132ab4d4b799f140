"""Causal attention, and the KV cache that a decoder reads.

Token t attends to tokens 0..t, and the keys and values of a token never change once computed. So a decoder that emits
one token at a time saves K and V of every layer (Shazeer 2019, arXiv:1911.02150, section 2.4), and computes them for
the new tokens only. `octavo.kv_cache.ModelKVCache` is such a cache.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from octavo.nn.quantized_attention import GradientScales, attend_fp8


class StoredKeys(Protocol):
    """The keys and values of one layer that a cache holds, those of the new tokens included."""

    def attend(self, q: Tensor, first: Tensor | None, scale: float) -> Tensor:
        """Attention of the queries [B, heads, T, head_dim] of the T new tokens; returns the same shape."""


class KVCache(Protocol):
    """The keys and values of all layers, for inference.

    `first`, int32 [B], is the first token of each sequence that is not padding; None without padding.
    """

    first: Tensor | None

    @property
    def tokens(self) -> int:
        """The number of tokens stored, without waiting for the device."""

    def positions(self, tokens: Tensor) -> Tensor:
        """The positions of the next tokens [B, T] in their texts: int64 [1, T], or [B, T] with padding."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> StoredKeys:
        """Store k and v of T new tokens, [B, kv_heads, T, head_dim] each."""

    def rotate_append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, StoredKeys]:
        """Apply rotary embedding to q [B, T, heads * head_dim] and k, and store k and v, [B, T, kv_heads * head_dim]
        each. Returns the rotated q [B, heads, T, head_dim], and what `append` returns."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, fp8: GradientScales | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, where token t sees the tokens 0..t.

    q[B, heads, T, head_dim], k and v[B, kv_heads, T, head_dim] with heads a multiple of kv_heads (query head h reads
    key head h * kv_heads // heads). Each probability is dropped with the probability `dropout`. Returns
    [B, heads, T, head_dim] in q's dtype. With `fp8` it is computed in E4M3 (`octavo.nn.quantized_attention`), unless
    there is dropout or the text is short.
    """
    if fp8 is not None and fp8.takes(q, k, dropout):
        return attend_fp8(q, k, v, fp8)
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=gqa)
