"""Attention over a cache of stored keys and values, and the functions that store them.

The queries belong to the last T of the `length` tokens in the cache. Query t has the position p = length - T + t and
sees the keys first[b] <= j <= p:

    out[b,h,t] = sum_j softmax_j(scale * k_scale[g] * q[b,h,t] . k_q[b,g,j]) * v_q[b,g,j] * v_scale[g],  g = h * G / H

for H query heads that share G heads of keys and values. A scale of a whole head is constant along both sums, so it is
multiplied outside of them, and the stored numbers are only widened. A query that sees no key gets zeros.

A stored number is x * (1 / scale), rounded to nearest even and saturated. INT8 is symmetric, -127 to 127.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import E4M3, LARGEST, ROUNDS_TO_LARGEST, cast, widen
from octavo.ops.launching import Cache, has_kernels
from octavo.ops.registration import FLOATS, check_tensor, operation

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
    """Attention of the queries q [B, H, T, D] of the last T tokens over a cache, in q's dtype.

    On a GPU, up to `MAX_ROWS` queries for each head of keys run on the kernel, which reads each stored byte once. More
    queries run on PyTorch's attention, over keys and values that are widened to q's dtype for the call. No call waits
    for the device. A query that sees no key gets zeros. If `length` exceeds S, all is NaN.

    Args:
        keys, values: [B, G, S, D] of bfloat16, float16, float32, float8_e4m3fn or int8; H is a multiple of G.
        k_scale, v_scale: float32 [G] for eight-bit dtypes, multiplied into the stored numbers; None for others.
        length: int64, no dimension: how many of the S tokens are there, the T new ones included.
        first: int32 [B], the first token of each sequence that is not padding. A negative one makes the result NaN.
        scale: multiplied into q @ k^T; 1 / sqrt(D) by default.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _cached_attention(q, keys, values, k_scale, v_scale, length, first, scale)


def ordered_attention(
    q: Tensor, keys: Tensor, values: Tensor, length: Tensor, *, first: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """`cached_attention` in which the bits of a query's result depend on that query and the keys that it sees alone.

    It takes any number of queries, and keys and values [B, G, S, D] of bfloat16, float16 or float32, without scales.
    The kernel adds over parts of the keys that begin at `first`, each in one order, and joins the parts in their order.
    The reference adds in float64, and rounds once.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _ordered_attention(q, keys, values, None, None, length, first, scale)


# ---- The references, and the numbers that a cache stores.


def append_kv_reference(k: Tensor, v: Tensor, cache: Cache, clipped: Tensor) -> None:
    """append_kv(k, v, keys, values, k_scale, v_scale, length, clipped): store k and v [B, G, T, D] of new tokens.

    The cache is that of `cached_attention`. Each number is rounded once and saturated. `length` counts the new tokens
    already. If it exceeds S, a GPU drops the tokens that do not fit (and `cached_attention` gives NaN); a CPU raises
    IndexError. The counts of numbers that saturated or were NaN are added to `clipped`, int64 [2] for keys and values.
    """
    keys, values, k_scale, v_scale, length = cache
    new = k.shape[2]
    at = length - new + torch.arange(new, device=k.device)
    for i, (x, data, scale) in enumerate(((k, keys, k_scale), (v, values, v_scale))):
        stored, lost = to_stored(x, scale, data.dtype)
        _bytes(data).index_copy_(2, at, _bytes(stored))
        clipped[i] += lost


def _bytes(data: Tensor) -> Tensor:
    """Eight-bit floats as integers: `index_copy_` does not take the floats."""
    return data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data


def cached_attention_reference(q: Tensor, cache: Cache, first: Tensor | None, scale: float) -> Tensor:
    """On a CPU in float32, from the stored numbers to the result. A GPU runs PyTorch's attention, for many queries."""
    if q.device.type == "cpu":
        return _attention(q, cache, first, scale, torch.float32)
    return widened_attention(q.contiguous(), cache, first, scale)


def ordered_attention_reference(q: Tensor, cache: Cache, first: Tensor | None, scale: float) -> Tensor:
    return _attention(q, cache, first, scale, torch.float64)


def _attention(q: Tensor, cache: Cache, first: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    keys, values, k_scale, v_scale, length = cache
    (batch, heads, new, dim), kv_heads, used = q.shape, keys.shape[1], int(length)
    if used > keys.shape[2]:
        return q.new_full(q.shape, torch.nan)
    wide_k, wide_v = (from_stored(x[:, :, :used]).to(dtype) for x in (keys, values))
    seen = _visible(new, used, length, first)  # [B or 1, 1, T, S]
    shape = batch, kv_heads, heads // kv_heads * new  # the queries of one head of keys
    with torch.autocast(q.device.type, enabled=False):  # it would run these products in BF16
        s = q.to(dtype).reshape(*shape, dim) @ wide_k.transpose(2, 3)  # [B,G,H/G*T,D] @ [B,G,D,S]
        s *= scale if k_scale is None else scale * k_scale.view(-1, 1, 1)
        s = s.view(batch, heads, new, used).masked_fill(~seen, -torch.inf)
        p = torch.where(seen.any(3, keepdim=True), s.softmax(3), 0.0)
        y = p.view(*shape, used) @ wide_v
    if v_scale is not None:
        y = y * v_scale.view(-1, 1, 1)
    y = y.view_as(q).to(q.dtype)
    return y if first is None else y.masked_fill((first < 0).view(-1, 1, 1, 1), torch.nan)


def widened_attention(q: Tensor, cache: Cache, first: Tensor | None, scale: float) -> Tensor:
    """The same with PyTorch's attention, for more queries than the kernel takes: keys and values are widened first.

    During the call they are repeated for each head of queries. Given a mask and fewer heads of keys than of queries,
    PyTorch would instead store every product of a query and a key.
    """
    keys, values, k_scale, v_scale, length = cache
    shared = q.shape[1] // keys.shape[1]
    k, v = (widened(data, s, q.dtype).repeat_interleave(shared, 1) for data, s in ((keys, k_scale), (values, v_scale)))
    seen = _visible(q.shape[2], keys.shape[2], length, first)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    y = torch.where(seen.any(3, keepdim=True), y, 0.0)
    bad = length > keys.shape[2]
    if first is not None:
        bad = bad | (first < 0).view(-1, 1, 1, 1)
    return y.masked_fill(bad, torch.nan)


def _visible(new: int, keys: int, length: Tensor, first: Tensor | None) -> Tensor:
    """The mask of the last `new` queries over `keys` keys: boolean [B, 1, T, S] or [1, 1, T, S], True if seen."""
    j = torch.arange(keys, device=length.device)
    position = length - new + torch.arange(new, device=length.device)
    seen = (j <= position.unsqueeze(1)).view(1, 1, new, keys)
    return seen if first is None else seen & (j >= first.view(-1, 1, 1, 1))


def to_stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [B, G, T, D] as numbers of the dtype of a cache, and how many of them saturated or were NaN (int64, 0-dim).

    `scale` is [G], None for a dtype without scales. NaN stays NaN in E4M3. INT8 has no NaN: it becomes 0.
    """
    if scale is None:
        return x.to(dtype), torch.zeros((), dtype=torch.int64, device=x.device)
    y = x.float() * (1 / scale).view(-1, 1, 1)
    lost = (~(y.abs() <= ROUNDS_TO_LARGEST[dtype])).sum()
    if dtype == torch.int8:
        return y.nan_to_num(0, torch.inf, -torch.inf).clamp(-LARGEST[dtype], LARGEST[dtype]).round().to(dtype), lost
    return cast(y, E4M3), lost


def from_stored(data: Tensor) -> Tensor:
    """The stored numbers as float32, not yet multiplied by their scale."""
    return widen(data) if data.dtype == torch.float8_e4m3fn else data.float()


def widened(data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored keys or values [B, G, S, D], multiplied by their scale [G], as numbers of `dtype`."""
    return data.to(dtype) if scale is None else data.float().mul_(scale.view(-1, 1, 1)).to(dtype)


def check_cache(cache: Cache) -> None:
    """Raise ValueError unless these are the tensors of a cache, as `cached_attention` describes them."""
    keys, values, k_scale, v_scale, length = cache
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


def _check(q: Tensor, cache: Cache, first: Tensor | None, scale: float) -> None:
    check_cache(cache)
    keys = cache.keys
    batch, kv_heads, _, dim = keys.shape
    if q.ndim != 4 or q.shape[0] != batch or q.shape[3] != dim or q.shape[1] % kv_heads or q.dtype not in FLOATS:
        raise ValueError(
            f"q must be [{batch}, a multiple of {kv_heads}, T, {dim}] of float32, bfloat16 or float16 for keys "
            f"{list(keys.shape)}, got {q.dtype} {list(q.shape)}"
        )
    check_tensor("first", first, (batch,), torch.int32)


def _attends(q: Tensor, cache: Cache, *rest: Any) -> bool:
    keys = cache.keys
    rows = q.shape[1] // keys.shape[1] * q.shape[2]
    dim = q.shape[3]
    small = rows <= MAX_ROWS and dim <= MAX_DIM and dim % 8 == 0 and keys.shape[2] < 2**31
    halves = keys.dtype in LARGEST or (keys.dtype == q.dtype and q.dtype != torch.float32)
    return small and halves and q.dtype != torch.float32 and q.numel() > 0 and has_kernels(q.device, (8, 0))


_cached_attention = operation(
    check=_check, like=lambda q, *rest: q.new_empty(q.shape), runs=_attends, strided=("q", "keys", "values")
)(cached_attention_reference)


def _attends_in_order(q: Tensor, cache: Cache, *rest: Any) -> bool:
    dim, half = q.shape[3], q.dtype == cache.keys.dtype != torch.float32
    return half and dim <= MAX_DIM and dim % 8 == 0 and q.numel() > 0 and has_kernels(q.device)


_ordered_attention = operation(
    check=_check, like=lambda q, *rest: q.new_empty(q.shape), runs=_attends_in_order, strided=("q", "keys", "values")
)(ordered_attention_reference)


def _check_append(k: Tensor, v: Tensor, cache: Cache, clipped: Tensor) -> None:
    check_cache(cache)
    batch, kv_heads, _, dim = cache.keys.shape
    shape = (batch, kv_heads, k.shape[2] if k.ndim == 4 else 1, dim)
    check_tensor("k", k, shape, *FLOATS)
    check_tensor("v", v, shape, *FLOATS)
    check_tensor("clipped", clipped, (2,), torch.int64)


def stores(cache: Cache) -> bool:
    """True if the kernels that write this cache run: on GPUs from Ada on, which convert to E4M3, or from Ampere on."""
    keys = cache.keys
    return has_kernels(keys.device, (8, 9) if keys.dtype == torch.float8_e4m3fn else (8, 0))


append_kv = operation(
    check=_check_append,
    like=lambda *args: None,
    runs=lambda k, v, cache, *rest: k.numel() > 0 and stores(cache),
    mutates=("keys", "values", "clipped"),
    strided=("k", "v"),
)(append_kv_reference)
