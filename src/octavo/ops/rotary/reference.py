"""Rotary embedding and the storing of keys and values in plain PyTorch. The kernel must equal it, and a CPU runs it.

A pair (x[i], x[i + D/2]) of a head is turned by the angle of its token's position (Su et al., arXiv:2104.09864):

    y = x * cos + (-x[D/2:], x[:D/2]) * sin

With cos and sin in x's dtype each step is rounded to it, as in transformers' `apply_rotary_pos_emb`. With cos and sin
in float32 the result is rounded once. A norm of each head may come first (Qwen3): x / rms(x), rounded, times its
weight, rounded.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention.reference import append_kv_reference


def rotate_append_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    clipped: Tensor,
    keep_k: bool,
) -> tuple[Any, Any]:
    """q [B, T, H, D] and k [B, T, G, D] (or None), rotated; k and v are stored too."""
    q, k, v = (_heads(x, keys.shape[3]) for x in (q, k, v))
    q, k = (_rotate(_norm(x, weight, eps), cos, sin) for x, weight in ((q, q_norm), (k, k_norm)))
    append_kv_reference(k, v, keys, values, k_scale, v_scale, length, clipped)
    return q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous() if keep_k else None


def _heads(x: Tensor, dim: int) -> Tensor:
    """[B, T, n * D] -> [B, n, T, D]."""
    return x.reshape(*x.shape[:2], x.shape[2] // dim, dim).transpose(1, 2)


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The mean and the root in float64: no order of summation changes the number that is rounded to float32."""
    if weight is None:
        return x
    rstd = 1 / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return weight * (x.float() * rstd.float()).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for all heads
    wide = x.to(cos.dtype)
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)
