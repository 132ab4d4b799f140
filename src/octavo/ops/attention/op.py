"""The door of attention over a cache: checks, the registered operations with their fakes, the choice of
implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention.reference import LARGEST, ROUNDS_TO_LARGEST, widened_attention
from octavo.ops.attention.reference import append_kv as reference_append
from octavo.ops.attention.reference import cached_attention as reference_attention
from octavo.ops.checks import FLOATS, check_tensor
from octavo.ops.inductor import operation, tell_inductor
from octavo.ops.triton_support import has_kernels, kernels_of

STORED = (torch.bfloat16, torch.float16, torch.float32, *LARGEST)
MOST_ROWS = 32  # queries of one head of keys that a program of the kernel holds
MOST_DIM = 256


def cached_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    *,
    first: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of the newest tokens over all that a cache holds, read as it is stored.

    On a GPU, few queries (`MOST_ROWS` a head of keys) run on the kernel, which reads each byte once; more run on
    PyTorch's attention over keys and values widened for the moment. No call waits for the device.

    Args:
        q: [B, H, T, D], the queries of the last T tokens.
        keys, values: [B, G, S, D], of which the first `length` tokens count; H is a multiple of G. bfloat16, float16,
            float32, float8_e4m3fn or int8.
        k_scale, v_scale: float32 [G], what stored numbers are multiplied by; for eight bits, and only for these.
        length: int64, no dimension: the tokens in the cache, the T new ones included.
        first: int32 [B], the first token that counts in each sequence (left padding); below 0, the result is NaN.
        scale: of the products; 1 / sqrt(D) by default.

    Returns:
        [B, H, T, D] in q's dtype; zeros for a query that sees nothing; NaN if `length` is more than S.

    Raises:
        ValueError: for another shape or dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    result: Tensor = torch.ops.octavo.cached_attention(q, keys, values, k_scale, v_scale, length, first, scale)
    return result


def append_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    clipped: Tensor,
) -> None:
    """Store the keys and values of new tokens in place, each number rounded once and saturated.

    Args:
        k, v: [B, G, T, D], of float32, bfloat16 or float16.
        keys, values, k_scale, v_scale: as in `cached_attention`, written to.
        length: int64, no dimension: the tokens in the cache when this is done. On a GPU what does not fit is dropped
            (and `cached_attention` gives NaN); on a CPU it is an IndexError.
        clipped: int64 [2], for keys and values, raised by how many numbers saturated or were NaN.

    Raises:
        ValueError: for another shape or dtype.
    """
    torch.ops.octavo.append_kv(k, v, keys, values, k_scale, v_scale, length, clipped)


def _check_cache(keys: Tensor, values: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, length: Tensor) -> None:
    if keys.ndim != 4 or keys.dtype not in STORED or not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError(
            f"keys must be contiguous [B, G, S, D] of one of {', '.join(map(str, STORED))}, and values alike, got "
            f"{keys.dtype} {list(keys.shape)}"
        )
    check_tensor("values", values, tuple(keys.shape), keys.dtype)
    check_tensor("length", length, (), torch.int64)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != (keys.dtype in LARGEST):
            raise ValueError(f"{name} goes with eight-bit keys and values, and only with these, got {keys.dtype}")
        check_tensor(name, scale, (keys.shape[1],), torch.float32)


def _check(q: Tensor, keys: Tensor, first: Tensor | None) -> None:
    batch, kv_heads, _, dim = keys.shape
    if q.ndim != 4 or q.shape[0] != batch or q.shape[3] != dim or q.shape[1] % kv_heads or q.dtype not in FLOATS:
        raise ValueError(
            f"q must be [{batch}, a multiple of {kv_heads}, T, {dim}] of float32, bfloat16 or float16 for keys "
            f"{list(keys.shape)}, got {q.dtype} {list(q.shape)}"
        )
    check_tensor("first", first, (batch,), torch.int32)


def _attends(q: Tensor, keys: Tensor, *_: Any) -> bool:
    rows = q.shape[1] // keys.shape[1] * q.shape[2]
    dim = q.shape[3]
    small = rows <= MOST_ROWS and dim <= MOST_DIM and dim % 8 == 0 and keys.shape[2] < 2**31
    halves = keys.dtype in LARGEST or (keys.dtype == q.dtype and q.dtype != torch.float32)
    return small and halves and q.dtype != torch.float32 and q.numel() > 0 and has_kernels(q.device)


@operation("cached_attention", _attends)
def _cached_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    first: Tensor | None,
    scale: float,
) -> Tensor:
    _check_cache(keys, values, k_scale, v_scale, length)
    _check(q, keys, first)
    run = reference_attention if q.device.type == "cpu" else widened_attention
    if _attends(q, keys):
        run = kernels_of("attention").cached_attention
    return run(q.contiguous(), keys, values, k_scale, v_scale, length, first, scale)


@_cached_attention.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    first: Tensor | None,
    scale: float,
) -> Tensor:
    tell_inductor()
    return q.new_empty(q.shape)


def _never(*_: Any) -> bool:
    """Inductor calls it as it stands, since it writes to its arguments."""
    return False


@operation("append_kv", _never, mutates=("keys", "values", "clipped"))
def _append_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    clipped: Tensor,
) -> None:
    _check_cache(keys, values, k_scale, v_scale, length)
    shape = (keys.shape[0], keys.shape[1], k.shape[2] if k.ndim == 4 else 1, keys.shape[3])
    check_tensor("k", k, shape, *FLOATS)
    check_tensor("v", v, shape, *FLOATS)
    check_tensor("clipped", clipped, (2,), torch.int64)
    if k.numel() == 0:
        return
    if has_kernels(k.device):
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
        limits = LARGEST.get(keys.dtype, 0.0), ROUNDS_TO_LARGEST.get(keys.dtype, 0.0)
        kernels_of("attention").append_kv(k, v, keys, values, k_scale, v_scale, length, clipped, limits)
    else:
        reference_append(k, v, keys, values, k_scale, v_scale, length, clipped)


@_append_kv.register_fake
def _(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    clipped: Tensor,
) -> None:
    tell_inductor()
