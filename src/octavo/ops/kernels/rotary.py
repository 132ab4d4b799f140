"""Rotary embedding and the storing of keys and values as one Triton kernel. Without queries and angles it only stores,
and without a cache it only turns.

A program takes some tokens of one head of q, k or v. It loads a head twice, the second time with its halves exchanged:
cheaper than an exchange between threads, since the second load comes from the cache.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.formats import LARGEST, ROUNDS_TO_LARGEST
from octavo.ops.kernels.device_math import add, to_stored, wait_for_inputs
from octavo.ops.launching import Cache, Turn, allocate, cdiv, power_of_two_above
from octavo.ops.registration import launcher

BLOCK = 2048  # elements of a program


def rotate_append(
    q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: Cache, clipped: Tensor, keep_k: bool
) -> tuple[Any, Any]:
    """Same as `rotate_append_reference`, for a contiguous cache."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    cos, sin, keys = turn.cos, turn.sin, cache.keys
    largest, limit = LARGEST.get(keys.dtype, 0.0), ROUNDS_TO_LARGEST.get(keys.dtype, 0.0)
    batch, tokens, width = q.shape
    kv_heads, capacity, dim = keys.shape[1:]
    heads = width // dim
    rotated = allocate(q, (batch, tokens, heads, dim))
    kept = allocate(k, (batch, tokens, kv_heads, dim)) if keep_k else None
    tile = tile_of(tokens, dim)
    launcher(rotate_append_kernel, (batch * (heads + 2 * kv_heads), cdiv(tokens, tile["BLOCK_T"])))(
        q, k, v, cos, sin, turn.q_norm, turn.k_norm, *cache, clipped, rotated, kept,
        q.stride(0), dim, q.stride(1), k.stride(0), dim, k.stride(1), v.stride(0), dim, v.stride(1), tokens, capacity,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, ONE_TABLE=cos.shape[0] == 1, EPS=float(np.float32(turn.eps)),
        LARGEST=largest, LIMIT=limit, INVERSE=False, **tile,
    )  # fmt: skip
    return rotated, kept


def turn_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Same as `turn_heads_reference`."""
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    (batch, heads, tokens, dim), kv_heads = q.shape, k.shape[1]
    turned = allocate(q, (batch, tokens, heads, dim)), allocate(k, (batch, tokens, kv_heads, dim))
    tile = tile_of(tokens, dim)
    launcher(rotate_append_kernel, (batch * (heads + kv_heads), cdiv(tokens, tile["BLOCK_T"])))(
        q, k, None, cos, sin, *[None] * 8, *turned, *q.stride()[:3], *k.stride()[:3], 0, 0, 0, tokens, 0,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, ONE_TABLE=cos.shape[0] == 1, EPS=0.0, LARGEST=0.0, LIMIT=0.0,
        INVERSE=inverse, **tile,
    )  # fmt: skip
    return turned


def tile_of(tokens: int, dim: int) -> dict[str, int]:
    """The tile of a program, and its warps."""
    block_d = max(power_of_two_above(dim), 16)
    block_t = max(1, min(power_of_two_above(tokens), BLOCK // block_d))
    return {"BLOCK_T": block_t, "BLOCK_D": block_d, "num_warps": max(1, min(4, block_t * block_d // 128))}


@triton.jit
def rotate_append_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, keys_ptr, values_ptr, k_scale_ptr, v_scale_ptr,
    length_ptr, clipped_ptr, q_out_ptr, k_out_ptr, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, num_new, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ONE_TABLE: tl.constexpr, EPS: tl.constexpr,
    LARGEST: tl.constexpr, LIMIT: tl.constexpr, INVERSE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    heads: tl.constexpr = HEADS + (KV_HEADS if keys_ptr is None else 2 * KV_HEADS)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_t < num_new)[:, None] & (offs_d < HEAD_DIM)[None, :]
    if not ONE_TABLE:
        cos_ptr += batch * num_new * HEAD_DIM
        sin_ptr += batch * num_new * HEAD_DIM
    if head >= HEADS + KV_HEADS:
        kv_head = head - HEADS - KV_HEADS
        if values_ptr is not None:
            source_ptr = v_ptr + batch * stride_vb + kv_head * stride_vh
            y = tl.load(source_ptr + offs_t.to(tl.int64)[:, None] * stride_vt + offs_d[None, :], mask, other=0.0)
            _append(y, values_ptr, v_scale_ptr, clipped_ptr + 1, length_ptr, batch * KV_HEADS + kv_head, kv_head,
                    num_new, capacity, offs_t, offs_d, mask, HEAD_DIM, LARGEST, LIMIT)  # fmt: skip
    elif head >= HEADS:
        kv_head = head - HEADS
        source_ptr = k_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh
        if cos_ptr is None:
            y = tl.load(source_ptr + offs_t.to(tl.int64)[:, None] * stride_kt + offs_d[None, :], mask, other=0.0)
        else:
            y = _rotated(source_ptr, stride_kt, k_norm_ptr, cos_ptr, sin_ptr, offs_t, offs_d, mask, HEAD_DIM, EPS,
                         INVERSE)  # fmt: skip
        if k_out_ptr is not None:
            offs = ((batch * num_new + offs_t) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(k_out_ptr + offs, y, mask)
        if keys_ptr is not None:
            _append(y, keys_ptr, k_scale_ptr, clipped_ptr, length_ptr, batch * KV_HEADS + kv_head, kv_head, num_new,
                    capacity, offs_t, offs_d, mask, HEAD_DIM, LARGEST, LIMIT)  # fmt: skip
    elif cos_ptr is not None:
        source_ptr = q_ptr + batch * stride_qb + head.to(tl.int64) * stride_qh
        y = _rotated(source_ptr, stride_qt, q_norm_ptr, cos_ptr, sin_ptr, offs_t, offs_d, mask, HEAD_DIM, EPS, INVERSE)
        offs = ((batch * num_new + offs_t) * HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(q_out_ptr + offs, y, mask)


@triton.jit
def _rotated(
    x_ptr, stride_t, weight_ptr, cos_ptr, sin_ptr, offs_t, offs_d, mask, HEAD_DIM: tl.constexpr, EPS: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    lower = offs_d < HEAD_DIM // 2
    other_d = tl.where(lower, offs_d + HEAD_DIM // 2, offs_d - HEAD_DIM // 2)
    x_ptr += offs_t.to(tl.int64)[:, None] * stride_t
    x = tl.load(x_ptr + offs_d[None, :], mask, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + other_d[None, :], mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        count = tl.full((x.shape[0],), HEAD_DIM, tl.float64)
        rstd = (1.0 / tl.sqrt(tl.sum((x.to(tl.float64) * x.to(tl.float64)), 1) / count + EPS)).to(tl.float32)
        weight = tl.load(weight_ptr + offs_d, offs_d < HEAD_DIM, other=0.0).to(tl.float32)
        other_weight = tl.load(weight_ptr + other_d, offs_d < HEAD_DIM, other=0.0).to(tl.float32)
        x = (weight[None, :] * (x * rstd[:, None]).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        other = (other_weight[None, :] * (other * rstd[:, None]).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    offs = offs_t.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :]
    cosine = x * tl.load(cos_ptr + offs, mask, other=0.0).to(tl.float32)
    sine = tl.where((lower ^ INVERSE)[None, :], -other, other) * tl.load(sin_ptr + offs, mask, other=0.0).to(tl.float32)
    if cos_ptr.dtype.element_ty != tl.float32:
        cosine = cosine.to(dtype).to(tl.float32)
        sine = sine.to(dtype).to(tl.float32)
    return add(cosine, sine).to(dtype)


@triton.jit
def _append(
    y, data_ptr, scale_ptr, clipped_ptr, length_ptr, pair, kv_head, num_new, capacity, offs_t, offs_d, mask,
    HEAD_DIM: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    y = y.to(tl.float32)
    if scale_ptr is not None:
        y = to_stored(y, mask, scale_ptr + kv_head, clipped_ptr, LARGEST, LIMIT, data_ptr.dtype.element_ty)
    position = tl.load(length_ptr) - num_new + offs_t
    inside = mask & ((position >= 0) & (position < capacity))[:, None]
    offs = (pair * capacity + position)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(data_ptr + offs, y.to(data_ptr.dtype.element_ty), inside)
