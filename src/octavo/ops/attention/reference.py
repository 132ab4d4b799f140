"""Attention over a cache of keys and values in plain PyTorch. The kernels must equal it, and a CPU runs it.

The queries belong to the last T of the `length` tokens in the cache. Query t has the position p = length - T + t and
sees the keys first[b] <= j <= p:

    out[b,h,t] = sum_j softmax_j(scale * k_scale[g] * q[b,h,t] . k_q[b,g,j]) * v_q[b,g,j] * v_scale[g],  g = h * G / H

for H query heads that share G heads of keys and values. A scale of a whole head is constant along both sums, so it is
multiplied outside of them, and the stored numbers are only widened. A query that sees no key gets zeros.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.attention.stored import from_stored, to_stored, widened


def append_kv_reference(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    clipped: Tensor,
) -> None:
    """Store k and v [B, G, T, D] as the last T of `length` tokens; add the counts of saturated numbers to `clipped`."""
    new = k.shape[2]
    at = length - new + torch.arange(new, device=k.device)
    for i, (x, data, scale) in enumerate(((k, keys, k_scale), (v, values, v_scale))):
        stored, lost = to_stored(x, scale, data.dtype)
        _bytes(data).index_copy_(2, at, _bytes(stored))
        clipped[i] += lost


def _bytes(data: Tensor) -> Tensor:
    """Eight-bit floats as integers: `index_copy_` does not take the floats."""
    return data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data


def cached_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    first: Tensor | None,
    scale: float,
) -> Tensor:
    """Same as `cached_attention` of the operation, in float32 from the stored numbers to the result."""
    (batch, heads, new, dim), kv_heads, used = q.shape, keys.shape[1], int(length)
    if used > keys.shape[2]:
        return torch.full_like(q, torch.nan)
    wide_k, wide_v = from_stored(keys[:, :, :used]), from_stored(values[:, :, :used])
    seen = _visible(new, used, length, first)  # [B or 1, 1, T, S]
    rows = q.float().view(batch, kv_heads, -1, dim)  # the queries of one head of keys: [B, G, H / G * T, D]
    with torch.autocast(q.device.type, enabled=False):  # it would run these products in BF16
        s = rows @ wide_k.transpose(2, 3) * (scale if k_scale is None else scale * k_scale.view(-1, 1, 1))
        s = s.view(batch, heads, new, used).masked_fill(~seen, -torch.inf)
        p = torch.where(seen.any(3, keepdim=True), s.softmax(3), 0.0)
        y = p.view(batch, kv_heads, -1, used) @ wide_v
    if v_scale is not None:
        y = y * v_scale.view(-1, 1, 1)
    y = y.view_as(q).to(q.dtype)
    return y if first is None else y.masked_fill((first < 0).view(-1, 1, 1, 1), torch.nan)


def widened_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    first: Tensor | None,
    scale: float,
) -> Tensor:
    """The same with PyTorch's attention, for more queries than the kernel takes: keys and values are widened first.

    During the call they are repeated for each head of queries. Given a mask and fewer heads of keys than of queries,
    PyTorch would instead store every product of a query and a key.
    """
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
