"""Attention over a cache of keys and values as Triton kernels, for few queries: bound by the bytes of the cache.

Split over the keys so that every multiprocessor has work (flash-decoding; Dao et al. 2023): a program takes one head
of keys, all queries that read it, and one part of the tokens, and keeps a running maximum m, sum l and result

    m' = max(m, max_j s_j)    p_j = 2^(s_j - m')    l' = l * 2^(m - m') + sum_j p_j    acc' = acc * 2^(m - m') + p v

(Milakov and Gimelshein, arXiv:1805.02867); where there is more than one part, a second kernel puts them together. How
many tokens there are is read on the device: one launch serves every step, and the parts are of equal length whatever
that is.

Bytes are widened in registers to float16, which holds each number of E4M3 and INT8; queries are brought into its range
by a power of two a row. BF16 is multiplied as BF16. Sums are float32. Values are read as words of four bytes: Triton
would otherwise fetch each byte of them by itself, to have it where the tensor core wants it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.splits import splits_of
from octavo.ops.device_math import SMALLEST_SCALE, add, ceil_power_of_two, inverse
from octavo.ops.inductor import launcher
from octavo.ops.triton_support import power_of_two_above

TILES = {1: (128, 4, 3), 2: (64, 4, 3)}  # bytes an element -> keys of a tile, warps, stages
PROGRAMS_PER_SM = 2  # what fits beside each other: three stages of 32 KiB each
LOG2_E = math.log2(math.e)


def cached_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    first: Tensor | None,
    scale: float,
) -> Tensor:
    """As the twin's, for tensors that are contiguous."""
    batch, heads, new, dim = q.shape
    kv_heads, room = keys.shape[1:3]
    pairs, rows = batch * kv_heads, heads // kv_heads * new
    tile, warps, stages = TILES[keys.element_size()]
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = splits_of(pairs, room, tile, PROGRAMS_PER_SM * multiprocessors)
    result = torch.empty_like(q)
    alone = splits == 1
    part = result if alone else q.new_empty((pairs, splits, rows, dim), dtype=torch.float32)
    largest, total = (None if alone else q.new_empty((pairs, splits, rows), dtype=torch.float32) for _ in range(2))
    block = max(power_of_two_above(dim), 16)
    launcher(_part_kernel, (splits, pairs))(
        q, keys, values, k_scale, v_scale, length, first, part, largest, total, kv_heads, room, rows, new,
        DIM=dim, SCALE=scale * LOG2_E, ROWS=max(power_of_two_above(rows), 16), TILE=tile, BLOCK=block, ALONE=alone,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if alone:
        return result
    launcher(_combine_kernel, (rows, pairs))(
        part, largest, total, length, first, result, kv_heads, room, rows, splits,
        DIM=dim, SPLITS=power_of_two_above(splits), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return result


# 0x6400 + u is the float16 1024 + u for u in 0..255: four signed bytes, moved up by 128, in five instructions.
_INT8 = tl.constexpr(
    "{ .reg .b32 u, c; xor.b32 u, $2, 0x80808080; mov.b32 c, 0x64806480; "
    "prmt.b32 $0, u, 0x64646464, 0x4140; prmt.b32 $1, u, 0x64646464, 0x4342; "
    "sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }"
)
_INT8_WORD = tl.constexpr(
    "{ .reg .b32 u, c, x, y; xor.b32 u, $4, 0x80808080; mov.b32 c, 0x64806480; "
    "prmt.b32 x, u, 0x64646464, 0x4140; prmt.b32 y, u, 0x64646464, 0x4342; "
    "sub.rn.f16x2 x, x, c; sub.rn.f16x2 y, y, c; mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }"
)
_E4M3_WORD = tl.constexpr(
    "{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, $4; "
    "cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }"
)


@triton.jit
def _widen(x):
    """Stored bytes as float16, exactly; other dtypes as they are."""
    if x.dtype == tl.int8:
        x = tl.inline_asm_elementwise(_INT8, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
    return x


@triton.jit
def _widen_words(x, E4M3: tl.constexpr):
    """Four stored bytes in each int32 [R, C] as float16 [R, 4 C]."""
    asm: tl.constexpr = _E4M3_WORD if E4M3 else _INT8_WORD
    a, b, c, d = tl.inline_asm_elementwise(
        asm, "=h,=h,=h,=h,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1
    )
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (x.shape[0], 4 * x.shape[1]))


@triton.jit
def _part_kernel(
    q, keys, values, k_scale, v_scale, length, first, part, largest, total, kv_heads, room, rows, new,
    DIM: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    split, splits, pair = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    head = pair % kv_heads
    row, col = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    used = tl.load(length).to(tl.int32)
    position = used - new + row % new
    lowest = 0
    if first is not None:
        lowest = tl.load(first + pair // kv_heads)
    end = tl.minimum(used, room)
    share = tl.cdiv(tl.cdiv(end, splits), TILE) * TILE
    begin = split * share
    end = tl.minimum(end, begin + share)
    here = (row < rows)[:, None] & (col < DIM)[None, :]
    x = tl.load(q + (pair.to(tl.int64) * rows + row)[:, None] * DIM + col[None, :], here, other=0.0)
    factor = tl.full((ROWS,), SCALE, tl.float32)
    if k_scale is not None:
        wide = x.to(tl.float32)
        power = tl.maximum(ceil_power_of_two(tl.max(tl.abs(wide), 1)), SMALLEST_SCALE)
        x = (wide * inverse(power)[:, None]).to(tl.float16)
        factor = factor * power * tl.load(k_scale + head)
    else:
        x = x.to(keys.dtype.element_ty)
    m = tl.full((ROWS,), -1e30, tl.float32)  # finite: -inf less -inf would be NaN
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    keys += pair.to(tl.int64) * room * DIM
    values += pair.to(tl.int64) * room * DIM
    whole = begin + tl.maximum(end - begin, 0) // TILE * TILE
    for start in range(begin, whole, TILE):
        m, mass, acc = _tile(x, factor, keys, values, start, lowest, end, position, m, mass, acc,
                             DIM, TILE, BLOCK, False)  # fmt: skip
    if whole < end:
        m, mass, acc = _tile(x, factor, keys, values, whole, lowest, end, position, m, mass, acc,
                             DIM, TILE, BLOCK, True)  # fmt: skip
    if v_scale is not None:
        acc = acc * tl.load(v_scale + head)
    place = (pair * splits + split).to(tl.int64) * rows + row
    if ALONE:
        acc = _normalized(acc, mass[:, None], length, room, first, pair // kv_heads)
    else:
        tl.store(largest + place, m, row < rows)
        tl.store(total + place, mass, row < rows)
    tl.store(part + place[:, None] * DIM + col[None, :], acc.to(part.dtype.element_ty), here)


@triton.jit
def _tile(
    x, factor, keys, values, start, lowest, end, position, m, mass, acc,
    DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and result after TILE more keys; only in the last tile are some of them beyond the end."""
    key, col = tl.arange(0, TILE), tl.arange(0, BLOCK)
    j = start + key
    keys += tl.cast(start, tl.int64) * DIM
    at = key[:, None] * DIM + col[None, :]
    if LAST or DIM != BLOCK:
        k = tl.load(keys + at, (j < end)[:, None] & (col < DIM)[None, :], other=0.0)
    else:
        k = tl.load(keys + at)
    if keys.dtype.element_ty.primitive_bitwidth == 8:
        word = tl.arange(0, BLOCK // 4)
        words = values.to(tl.pointer_type(tl.int32)) + tl.cast(start, tl.int64) * (DIM // 4)
        at = key[:, None] * (DIM // 4) + word[None, :]
        if LAST or DIM != BLOCK:
            v = tl.load(words + at, (j < end)[:, None] & (word < DIM // 4)[None, :], other=0)
        else:
            v = tl.load(words + at)
        v = _widen_words(v, keys.dtype.element_ty == tl.float8e4nv)
    else:
        values += tl.cast(start, tl.int64) * DIM
        if LAST or DIM != BLOCK:
            v = tl.load(values + at, (j < end)[:, None] & (col < DIM)[None, :], other=0.0)
        else:
            v = tl.load(values + at)
    s = tl.dot(x, tl.trans(_widen(k))) * factor[:, None]  # [rows, D] @ [TILE, D]^T
    seen = (j >= lowest)[None, :] & (j < end)[None, :] & (j[None, :] <= position[:, None])
    s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - top[:, None])
    shrink = tl.exp2(m - top)
    acc = tl.dot(p.to(x.dtype), v, acc * shrink[:, None])  # [rows, TILE] @ [TILE, D]
    return top, mass * shrink + tl.sum(p, 1), acc


@triton.jit
def _combine_kernel(
    part, largest, total, length, first, result, kv_heads, room, rows, splits,
    DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, pair = tl.program_id(0), tl.program_id(1)
    split, col = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    place = (pair * splits + split).to(tl.int64) * rows + row
    m = tl.load(largest + place, split < splits, other=-1e30)
    weight = tl.exp2(m - tl.max(m, 0))
    mass = tl.sum(weight * tl.load(total + place, split < splits, other=0.0), 0)
    here = (split < splits)[:, None] & (col < DIM)[None, :]
    acc = tl.load(part + place[:, None] * DIM + col[None, :], here, other=0.0)
    y = _normalized(tl.sum(acc * weight[:, None], 0), mass, length, room, first, pair // kv_heads)
    at = (pair.to(tl.int64) * rows + row) * DIM + col
    tl.store(result + at, y.to(result.dtype.element_ty), col < DIM)


@triton.jit
def _normalized(acc, mass, length, room, first, sequence):
    """acc / mass; zeros where nothing was seen, NaN where the cache is too long or the padding is not on the left."""
    y = tl.where(mass == 0, 0.0, acc / mass)
    bad = tl.load(length) > room
    if first is not None:
        bad |= tl.load(first + sequence) < 0
    return tl.where(bad, float("nan"), y)


def append_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    length: Tensor,
    clipped: Tensor,
    limits: tuple[float, float],
) -> None:
    """As the twin's, for caches that are contiguous and k and v whose last dimension is; `limits` are the largest
    number stored and the largest that rounds to it."""
    batch, kv_heads, new, dim = k.shape
    block = max(power_of_two_above(dim), 16)
    tokens = max(1, min(power_of_two_above(new), 2048 // block))
    launcher(_append_kernel, (triton.cdiv(new, tokens), batch * kv_heads, 2))(
        k, v, keys, values, k_scale, v_scale, length, clipped, *k.stride()[:3], *v.stride()[:3],
        kv_heads, keys.shape[2], new,
        DIM=dim, LARGEST=limits[0], LIMIT=limits[1], TOKENS=tokens, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _append_kernel(
    k, v, keys, values, k_scale, v_scale, length, clipped, k_batch, k_head, k_token, v_batch, v_head, v_token,
    kv_heads, room, new,
    DIM: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    b, head = pair // kv_heads, pair % kv_heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.load(length) - new
    if tl.program_id(2) == 0:
        source = k + b * k_batch + head * k_head
        _append(source, k_token, keys, k_scale, clipped, start, token, pair, head, room, new,
                DIM, LARGEST, LIMIT, BLOCK)  # fmt: skip
    else:
        source = v + b * v_batch + head * v_head
        _append(source, v_token, values, v_scale, clipped + 1, start, token, pair, head, room, new,
                DIM, LARGEST, LIMIT, BLOCK)  # fmt: skip


@triton.jit
def _append(
    source, stride, data, scale, clipped, start, token, pair, head, room, new,
    DIM: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    here = (token < new)[:, None] & (col < DIM)[None, :]
    y = tl.load(source + token.to(tl.int64)[:, None] * stride + col[None, :], here, other=0.0).to(tl.float32)
    if scale is not None:
        s = tl.load(scale + head + tl.zeros((1,), tl.int32))
        y = y * inverse(s)[:, None]
        lost = tl.sum(tl.sum((here & ((tl.abs(y) <= LIMIT) == 0)).to(tl.int32), 1), 0)
        if lost > 0:
            tl.atomic_add(clipped, lost.to(tl.int64))
        nan = y != y
        y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
        if data.dtype.element_ty == tl.int8:  # 1.5 * 2^23 + y has no place for a fraction: rounded to even
            y = tl.where(nan, 0.0, add(add(y, tl.full(y.shape, 12582912.0, tl.float32)),
                                       tl.full(y.shape, -12582912.0, tl.float32)))  # fmt: skip
        else:
            y = tl.where(nan, float("nan"), y)
    place = start + token
    at = (pair * room + place)[:, None] * DIM + col[None, :]
    fits = here & ((place >= 0) & (place < room))[:, None]
    tl.store(data + at, y.to(data.dtype.element_ty), fits)
