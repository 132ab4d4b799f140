"""Attention over a cache: checks, the registered operations, and the choice between the kernels and the reference."""

from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention.reference import append_kv_reference, cached_attention_reference, widened_attention
from octavo.ops.attention.stored import LARGEST, limits_of
from octavo.ops.checks import FLOATS, check_tensor
from octavo.ops.inductor import operation, register_lowerings
from octavo.ops.triton_support import has_kernels

STORED = (torch.bfloat16, torch.float16, torch.float32, *LARGEST)
MAX_ROWS = 32  # queries of one head of keys that a program of the kernel holds
MAX_DIM = 256


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
    """Attention of the last T tokens over a cache of stored keys and values.

    On a GPU, up to `MAX_ROWS` queries for each head of keys run on the kernel, which reads each stored byte once. More
    queries run on PyTorch's attention, over keys and values that are widened to q's dtype for the call. No call waits
    for the device.

    Args:
        q: [B, H, T, D], the queries of the last T tokens.
        keys, values: [B, G, S, D] of bfloat16, float16, float32, float8_e4m3fn or int8. The first `length` of the S
            tokens are used. H is a multiple of G.
        k_scale, v_scale: float32 [G], multiplied into the stored numbers. Required for eight-bit dtypes, None for
            others.
        length: int64, no dimension: the number of tokens in the cache, the T new ones included.
        first: int32 [B], the first token of each sequence that is not padding. A negative one makes the result NaN.
        scale: multiplied into q @ k^T; 1 / sqrt(D) by default.

    Returns:
        [B, H, T, D] in q's dtype. A query that sees no key gets zeros. If `length` exceeds S, all is NaN.

    Raises:
        ValueError: for another shape or dtype.
    """
    check_cache(keys, values, k_scale, v_scale, length)
    _check(q, keys, first)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    result: Tensor = _cached_attention(q, keys, values, k_scale, v_scale, length, first, scale)
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
        k, v: [B, G, T, D] of float32, bfloat16 or float16.
        keys, values: as in `cached_attention`, written in place.
        k_scale, v_scale: as in `cached_attention`.
        length: int64, no dimension: the number of tokens in the cache after this call. If it exceeds S, a GPU drops
            the tokens that do not fit (and `cached_attention` returns NaN); a CPU raises IndexError.
        clipped: int64 [2], for keys and values: the count of numbers that saturated or were NaN is added to it.

    Raises:
        ValueError: for another shape or dtype.
    """
    check_cache(keys, values, k_scale, v_scale, length)
    shape = (keys.shape[0], keys.shape[1], k.shape[2] if k.ndim == 4 else 1, keys.shape[3])
    check_tensor("k", k, shape, *FLOATS)
    check_tensor("v", v, shape, *FLOATS)
    check_tensor("clipped", clipped, (2,), torch.int64)
    _append_kv(k, v, keys, values, k_scale, v_scale, length, clipped)


def check_cache(keys: Tensor, values: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, length: Tensor) -> None:
    """Raise ValueError unless these are the tensors of a cache, as `cached_attention` describes them."""
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


def _attends(q: Tensor, keys: Tensor, *rest: Any) -> bool:
    rows = q.shape[1] // keys.shape[1] * q.shape[2]
    dim = q.shape[3]
    small = rows <= MAX_ROWS and dim <= MAX_DIM and dim % 8 == 0 and keys.shape[2] < 2**31
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
    if _attends(q, keys):
        from octavo.ops.attention import kernel

        run = kernel.cached_attention
    else:
        run = cached_attention_reference if q.device.type == "cpu" else widened_attention
    return run(q.contiguous(), keys, values, k_scale, v_scale, length, first, scale)


@_cached_attention.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    register_lowerings()
    return q.new_empty(q.shape)


@operation("append_kv", mutates=("keys", "values", "clipped"))
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
    if k.numel() == 0:
        return
    if not has_kernels(k.device):
        append_kv_reference(k, v, keys, values, k_scale, v_scale, length, clipped)
        return
    from octavo.ops.attention import kernel

    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    kernel.append_kv(k, v, keys, values, k_scale, v_scale, length, clipped, limits_of(keys.dtype))


@_append_kv.register_fake
def _(*args: Any) -> None:
    register_lowerings()
