"""Rotary embedding with the cache: checks, the registered operation, and the choice between kernel and reference."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention.op import MAX_DIM, check_cache
from octavo.ops.attention.stored import limits_of
from octavo.ops.checks import FLOATS, check_tensor
from octavo.ops.inductor import operation, register_lowerings
from octavo.ops.rotary.reference import rotate_append_reference
from octavo.ops.triton_support import has_kernels


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

    Args:
        q: [B, T, H * D] of float32, bfloat16 or float16.
        k, v: [B, T, G * D] of q's dtype.
        cos, sin: [B or 1, T, D] of q's dtype or float32, each of the D / 2 angles twice.
        keys, values, k_scale, v_scale, length, clipped: as in `append_kv`.
        q_norm, k_norm: [D] of q's dtype, the weights of a root-mean-square norm of each head, which comes first.
        eps: of the norms, rounded to float32.
        keep_k: also return the rotated keys.

    Returns:
        The rotated queries [B, H, T, D] and keys [B, G, T, D], views of contiguous [B, T, H, D] and [B, T, G, D]: so
        the result of PyTorch's attention becomes [B, T, H * D] without a copy. Without `keep_k` the second is None.

    Raises:
        ValueError: for another shape or dtype.
    """
    _check(q, k, v, cos, sin, q_norm, k_norm, keys, values, k_scale, v_scale, length, clipped)
    stored = keys, values, k_scale, v_scale, length, clipped
    q, k = _rotate_append(q, k, v, cos, sin, q_norm, k_norm, eps, *stored, keep_k)
    return q.transpose(1, 2), k.transpose(1, 2) if keep_k else None


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    clipped: Tensor,
) -> None:
    check_cache(keys, values, k_scale, v_scale, length)
    batch, heads, _, dim = keys.shape
    if q.ndim != 3 or q.shape[0] != batch or q.dtype not in FLOATS or not q.shape[2] or q.shape[2] % dim or dim % 2:
        raise ValueError(
            f"q must be [{batch}, T, a multiple of {dim}] of float32, bfloat16 or float16, for keys "
            f"{list(keys.shape)} of an even size, got {q.dtype} {list(q.shape)}"
        )
    tokens = q.shape[1]
    check_tensor("k", k, (batch, tokens, heads * dim), q.dtype)
    check_tensor("v", v, (batch, tokens, heads * dim), q.dtype)
    check_tensor("cos", cos, (batch if cos.ndim == 3 and cos.shape[0] != 1 else 1, tokens, dim), q.dtype, torch.float32)
    check_tensor("sin", sin, tuple(cos.shape), cos.dtype)
    check_tensor("q_norm", q_norm, (dim,), q.dtype)
    check_tensor("k_norm", k_norm, (dim,), q.dtype)
    check_tensor("clipped", clipped, (2,), torch.int64)


@operation("rotate_append", mutates=("keys", "values", "clipped"))
def _rotate_append(
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
) -> tuple[Tensor, Tensor]:
    eps = float(np.float32(eps))  # Triton rounds it so: the reference gets the same number
    stored = keys, values, k_scale, v_scale, length, clipped
    if q.numel() == 0 or keys.shape[3] > MAX_DIM or not has_kernels(q.device):
        return rotate_append_reference(q, k, v, cos, sin, q_norm, k_norm, eps, *stored, keep_k)
    from octavo.ops.rotary import kernel

    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    return kernel.rotate_append(
        q, k, v, cos.contiguous(), sin.contiguous(), q_norm, k_norm, eps, *stored, limits_of(keys.dtype), keep_k
    )


@_rotate_append.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    register_lowerings()
    keys, keep_k = rest[6], rest[12]
    batch, tokens, width = q.shape
    dim = keys.shape[3]
    rotated = q.new_empty((batch, tokens, width // dim, dim))
    return rotated, k.new_empty((batch, tokens, keys.shape[1], dim) if keep_k else 0)
