"""Rotary embedding of queries and keys: its gradient, and the storing in a cache in the same pass.

A pair (x[i], x[i + D/2]) of a head is turned by the angle of its token's position (Su et al., arXiv:2104.09864):

    y = x * cos + (-x[D/2:], x[:D/2]) * sin

With cos and sin in x's dtype each step is rounded to it, as in transformers' `apply_rotary_pos_emb`. With cos and sin
in float32 the result is rounded once. A norm of each head may come first (Qwen3): x / rms(x), rounded, times its
weight, rounded.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention import MAX_DIM, append_kv_reference, check_cache, stores
from octavo.ops.launching import Cache, Turn, has_kernels
from octavo.ops.registration import FLOATS, check_tensor, operation


def rotate_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    clipped: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    keep_k: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Apply rotary embedding to the queries and keys of new tokens, and store keys and values in place: one kernel.

    Returns the rotated queries [B, H, T, D] and, if `keep_k`, the rotated keys [B, G, T, D]. They are views of
    contiguous [B, T, H, D] and [B, T, G, D]: so the result of PyTorch's attention becomes [B, T, H * D] without a copy.

    Args:
        q, k, v: [B, T, H * D] of float32, bfloat16 or float16, and [B, T, G * D] of the same dtype.
        cos, sin: [B or 1, T, D] of q's dtype or float32, each of the D / 2 angles twice.
        keys, values, k_scale, v_scale, length, clipped: as in `append_kv`.
        q_norm, k_norm: [D] of q's dtype, the weights of a root-mean-square norm of each head, which comes first.
        eps: of the norms, rounded to float32.
    """
    stored = keys, values, k_scale, v_scale, length, clipped
    q, k = _rotate_append(q, k, v, cos, sin, q_norm, k_norm, eps, *stored, keep_k)
    return q.transpose(1, 2), k.transpose(1, 2) if keep_k else None


def rotate_append_reference(
    q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: Cache, clipped: Tensor, keep_k: bool
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D] and k [B, T, G, D] (or None), rotated; k and v are stored too."""
    cos, sin, q_norm, k_norm, eps = turn
    eps = float(np.float32(eps))  # Triton rounds it so: the reference takes the same number
    q, k, v = (torch.unflatten(x, 2, (-1, cache.keys.shape[3])).transpose(1, 2) for x in (q, k, v))  # [B, n, T, D]
    q, k = (_rotate(_norm(x, weight, eps), cos, sin) for x, weight in ((q, q_norm), (k, k_norm)))
    append_kv_reference(k, v, cache, clipped)
    kept = k.transpose(1, 2).contiguous() if keep_k else None
    return q.transpose(1, 2).contiguous(), kept  # type: ignore[return-value]


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


def _check(q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: Cache, clipped: Tensor, keep_k: bool) -> None:
    check_cache(cache)
    batch, heads, _, dim = cache.keys.shape
    if q.ndim != 3 or q.shape[0] != batch or q.dtype not in FLOATS or not q.shape[2] or q.shape[2] % dim or dim % 2:
        raise ValueError(
            f"q must be [{batch}, T, a multiple of {dim}] of float32, bfloat16 or float16, for keys "
            f"{list(cache.keys.shape)} of an even size, got {q.dtype} {list(q.shape)}"
        )
    tokens, (cos, sin, q_norm, k_norm, _) = q.shape[1], turn
    check_tensor("k", k, (batch, tokens, heads * dim), q.dtype)
    check_tensor("v", v, (batch, tokens, heads * dim), q.dtype)
    check_tensor("cos", cos, (batch if cos.ndim == 3 and cos.shape[0] != 1 else 1, tokens, dim), q.dtype, torch.float32)
    check_tensor("sin", sin, tuple(cos.shape), cos.dtype)
    check_tensor("q_norm", q_norm, (dim,), q.dtype)
    check_tensor("k_norm", k_norm, (dim,), q.dtype)
    check_tensor("clipped", clipped, (2,), torch.int64)


def _like(q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: Cache, *rest: Any) -> tuple[Tensor, Tensor]:
    (batch, tokens, width), (_, heads, _, dim) = q.shape, cache.keys.shape
    rotated = q.new_empty((batch, tokens, width // dim, dim))
    return rotated, k.new_empty((batch, tokens, heads, dim) if rest[-1] else 0)


_rotate_append = operation(
    check=_check, like=_like, mutates=("keys", "values", "clipped"), strided=("q", "k", "v"),
    runs=lambda q, k, v, turn, cache, *_: q.numel() > 0 and cache.keys.shape[3] <= MAX_DIM and stores(cache),
)(rotate_append_reference)  # fmt: skip


def turn_heads_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D] and k [B, G, T, D] with rotary embedding, as [B, T, H, D] and [B, T, G, D]; cos and sin are as in
    `rotate_append`. With `inverse` they are turned by the opposite angles, as gradients are."""
    sin = -sin if inverse else sin
    q, k = (_rotate(x, cos, sin).transpose(1, 2).contiguous() for x in (q, k))
    return q, k


def _check_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    check_tensor("q", q, (*q.shape[:3], q.shape[-1] // 2 * 2), *FLOATS)  # four dimensions, the last even
    batch, _, tokens, dim = q.shape
    check_tensor("k", k, (batch, k.shape[1], tokens, dim), q.dtype)
    check_tensor("cos", cos, (1 if cos.shape[0] == 1 else batch, tokens, dim), q.dtype, torch.float32)
    check_tensor("sin", sin, tuple(cos.shape), cos.dtype)


turn_heads = operation(
    check=_check_heads, strided=("q", "k"),
    like=lambda q, k, *_: tuple(x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])) for x in (q, k)),
    runs=lambda q, *_: q.numel() > 0 and q.shape[3] <= MAX_DIM and has_kernels(q.device, (8, 0)),
)(turn_heads_reference)  # fmt: skip
