"""Attention over a cache of keys and values as Triton kernels, for few queries: bound by the bytes of the cache.

The tokens are split into parts so that every multiprocessor has work (flash-decoding; Dao et al. 2023). A program takes
one head of keys, all queries that read it, and one part of the tokens. It keeps a running maximum m, sum l and result

    m' = max(m, max_j s_j)    p_j = 2^(s_j - m')    l' = l * 2^(m - m') + sum_j p_j    acc' = acc * 2^(m - m') + p v

(Milakov and Gimelshein, arXiv:1805.02867). If there is more than one part, a second kernel combines them. The device
reads the number of tokens and divides it into parts of equal length, so that one CUDA graph serves every step.

Bytes are widened in registers to float16, which holds every number of E4M3 and INT8. A power of two for each row brings
the queries into the range of float16. BF16 is multiplied as BF16. Sums are float32. Values are loaded as words of four
bytes: Triton would otherwise load each byte by itself, to have it in the layout of the tensor core. GPUs before Ada
(8.9), which do not convert E4M3, read bytes, and widen these by the integer instructions of `device_math`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.formats import LARGEST, ROUNDS_TO_LARGEST
from octavo.ops.attention_tiles import choose_tile, splits_of
from octavo.ops.kernels.device_math import SMALLEST_SCALE, WIDEN_FP16, ceil_power_of_two, inverse, wait_for_inputs
from octavo.ops.kernels.rotary import rotate_append_kernel, tile_of
from octavo.ops.launching import Cache, allocate, cdiv, has_kernels, multiprocessors, power_of_two_above, shared_memory
from octavo.ops.registration import launcher

LOG2_E = math.log2(math.e)


def cached_attention(
    q: Tensor, cache: Cache, first: Tensor | None, scale: float, *, native: bool | None = None
) -> Tensor:
    """Same as `cached_attention_reference`, for a contiguous cache; `native` GPUs convert E4M3."""
    keys, values, k_scale, v_scale, length = cache
    if keys.dtype == torch.float8_e4m3fn and not (has_kernels(q.device) if native is None else native):
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    q = q.contiguous()
    batch, heads, num_new, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    pairs, num_rows = batch * kv_heads, heads // kv_heads * num_new
    block_m, block_d = max(power_of_two_above(num_rows), 16), max(power_of_two_above(dim), 16)
    count = multiprocessors(q.device)
    tile = choose_tile(keys.element_size(), block_m, block_d, shared_memory(q.device), many=pairs >= 2 * count)
    splits = splits_of(pairs, capacity, tile.block_n, tile.programs * count)
    result = allocate(q, q.shape)
    one_split = splits == 1
    # For each part and row: the result, then the maxima and the sums of all. One buffer is one call of the allocator.
    partial = result if one_split else allocate(q, (pairs * splits * num_rows * (dim + 2),), torch.float32)
    launcher(_part_kernel, (splits, pairs))(
        q, keys, values, k_scale, v_scale, length, first, partial, kv_heads, capacity, num_rows, num_new,
        HEAD_DIM=dim, SCALE=scale * LOG2_E, BLOCK_M=block_m, BLOCK_N=tile.block_n,
        BLOCK_D=block_d, ONE_SPLIT=one_split, PART=0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if one_split:
        return result
    launcher(_combine_kernel, (num_rows, pairs))(
        partial, length, first, result, kv_heads, capacity, num_rows, splits,
        HEAD_DIM=dim, BLOCK_SPLITS=power_of_two_above(splits), BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return result


# ---- The attention whose sums have one order, for any number of queries.
#
# The parts have PART keys and begin at `first`, so that padding moves none of them. Every launch has the same tile, in
# which the sums of a query do not depend on the other queries. A block that a query does not see leaves its sums as
# they are, and a second kernel joins the parts that it sees, in their order.


PART, QUERIES = 256, 64
JOINED = 16  # queries of a program of the second kernel
MOST = 1 << 26  # numbers of the parts at a time: 256 MiB


def ordered_attention(q: Tensor, cache: Cache, first: Tensor | None, scale: float) -> Tensor:
    """Same as `ordered_attention_reference`, for a contiguous cache."""
    (batch, heads, num_new, dim), room = q.shape, cache.keys.shape[2]
    at_once = max(1, MOST // (batch * heads * cdiv(room, PART) * (dim + 2)))
    if num_new <= at_once:
        return _attend_in_order(q, cache, first, scale, room)
    later = [max(0, num_new - end) for end in range(at_once, num_new + at_once, at_once)]  # tokens after each piece
    made = [_attend_in_order(x, cache._replace(length=cache.length - after), first, scale, room - after)
            for x, after in zip(torch.split(q, at_once, 2), later, strict=True)]  # fmt: skip
    return torch.cat(made, 2)


def _attend_in_order(q: Tensor, cache: Cache, first: Tensor | None, scale: float, room: int) -> Tensor:
    """The same for the last queries of `length` tokens, `room` of them at most."""
    q, (keys, values, _, _, length) = q.contiguous(), cache
    (_, heads, num_new, dim), (batch, kv_heads, capacity) = q.shape, keys.shape[:3]
    parts, pairs, num_rows = cdiv(room, PART), batch * kv_heads, heads // kv_heads * num_new
    block_d = max(power_of_two_above(dim), 16)
    tile = choose_tile(2, QUERIES, block_d, shared_memory(q.device))
    partial = allocate(q, (pairs * parts * num_rows * (dim + 2),), torch.float32)
    result = allocate(q, q.shape)
    launcher(_part_kernel, (parts, pairs, cdiv(num_rows, QUERIES)))(
        q, keys, values, None, None, length, first, partial, kv_heads, capacity, num_rows, num_new,
        HEAD_DIM=dim, SCALE=scale * LOG2_E, BLOCK_M=QUERIES, BLOCK_N=tile.block_n,
        BLOCK_D=block_d, ONE_SPLIT=False, PART=PART, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launcher(_join_kernel, (cdiv(num_rows, JOINED), pairs))(
        partial, length, first, result, kv_heads, room, num_rows, num_new, parts,
        HEAD_DIM=dim, PART=PART, BLOCK_M=JOINED, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return result


# 0x6400 + u is the float16 number 1024 + u, for u in 0..255. Four signed bytes, with 128 added, take five instructions.
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
_BYTES_WORD = tl.constexpr(  # the registers of `WIDEN_FP16` as four numbers
    WIDEN_FP16.value.replace("$0", "x").replace("$1", "y").replace("$2", "$4").replace("two;", "two, x, y;", 1)[:-1]
    + "mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }"
)


@triton.jit
def _widen(x):
    """Eight-bit numbers, or the bytes of E4M3, as float16, exactly; other dtypes unchanged."""
    if x.dtype == tl.int8:
        x = tl.inline_asm_elementwise(_INT8, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif x.dtype == tl.uint8:
        x = tl.inline_asm_elementwise(WIDEN_FP16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
    return x


@triton.jit
def _widen_words(x, DTYPE: tl.constexpr):
    """int32 [R, C] with four stored bytes each, as float16 [R, 4 C]."""
    asm: tl.constexpr = _E4M3_WORD if tl.float8e4nv == DTYPE else _BYTES_WORD if tl.uint8 == DTYPE else _INT8_WORD
    a, b, c, d = tl.inline_asm_elementwise(
        asm, "=h,=h,=h,=h,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1
    )
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (x.shape[0], 4 * x.shape[1]))


@triton.jit
def _part_kernel(
    q_ptr, keys_ptr, values_ptr, k_scale_ptr, v_scale_ptr, length_ptr, first_ptr, out_ptr,
    kv_heads, capacity, num_rows, num_new,
    HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ONE_SPLIT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    split, splits, pair = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    head = pair % kv_heads
    offs_m, offs_d = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    length = tl.load(length_ptr).to(tl.int32)
    position = length - num_new + offs_m % num_new
    first = 0
    if first_ptr is not None:
        first = tl.load(first_ptr + pair // kv_heads)
    end = tl.minimum(length, capacity)
    split_tokens = PART
    if PART:  # from the first token on; no query of the tile sees a key beyond the last one's
        begin = tl.maximum(first, 0) + split * PART
        end = tl.minimum(end, tl.max(tl.where(offs_m < num_rows, position, 0), 0) + 1)
    else:
        split_tokens = tl.cdiv(tl.cdiv(end, splits), BLOCK_N) * BLOCK_N
        begin = split * split_tokens
    end = tl.minimum(end, begin + split_tokens)
    if PART and begin >= end:  # the second kernel does not read what no query sees
        return
    mask = (offs_m < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs_q = (pair.to(tl.int64) * num_rows + offs_m)[:, None] * HEAD_DIM + offs_d[None, :]
    q, factor = _queries(q_ptr + offs_q, mask, k_scale_ptr, head, SCALE, BLOCK_M, keys_ptr.dtype.element_ty)
    keys_ptr += pair.to(tl.int64) * capacity * HEAD_DIM
    values_ptr += pair.to(tl.int64) * capacity * HEAD_DIM
    m_i, l_i, acc = _attend(q, factor, keys_ptr, values_ptr, begin, first, end, position,
                            BLOCK_M, HEAD_DIM, BLOCK_N, BLOCK_D, PART)  # fmt: skip
    if v_scale_ptr is not None:
        acc = acc * tl.load(v_scale_ptr + head)
    offs_out = (pair * splits + split).to(tl.int64) * num_rows + offs_m
    if ONE_SPLIT:
        acc = _normalized(acc, l_i[:, None], _is_bad(length_ptr, capacity, first_ptr, pair // kv_heads))
    else:
        parts = splits.to(tl.int64) * tl.num_programs(1) * num_rows
        tl.store(out_ptr + parts * HEAD_DIM + offs_out, m_i, offs_m < num_rows)
        tl.store(out_ptr + parts * (HEAD_DIM + 1) + offs_out, l_i, offs_m < num_rows)
    tl.store(out_ptr + offs_out[:, None] * HEAD_DIM + offs_d[None, :], acc.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _queries(q_ptrs, mask, k_scale_ptr, head, SCALE: tl.constexpr, BLOCK_M: tl.constexpr, DTYPE: tl.constexpr):
    """The queries, in float16 for eight-bit keys and in DTYPE for others, and the factor of the products of each."""
    q = tl.load(q_ptrs, mask, other=0.0)
    factor = tl.full((BLOCK_M,), SCALE, tl.float32)
    if k_scale_ptr is not None:
        wide = q.to(tl.float32)
        power = tl.maximum(ceil_power_of_two(tl.max(tl.abs(wide), 1)), SMALLEST_SCALE)
        q = (wide * inverse(power)[:, None]).to(tl.float16)
        factor = factor * power * tl.load(k_scale_ptr + head)
    else:
        q = q.to(DTYPE)
    return q, factor


@triton.jit
def _attend(
    q, factor, keys_ptr, values_ptr, begin, first, end, position,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and result of the keys from `begin` to `end`."""
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: -inf less -inf would be NaN
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if PART:
        for start in range(begin, end, BLOCK_N):
            m_new, l_new, acc_new = _attend_block(q, factor, keys_ptr, values_ptr, start, first, end, position,
                                                  m_i, l_i, acc, HEAD_DIM, BLOCK_N, BLOCK_D, True)  # fmt: skip
            seen = position >= start
            m_i, l_i = tl.where(seen, m_new, m_i), tl.where(seen, l_new, l_i)
            acc = tl.where(seen[:, None], acc_new, acc)
    else:
        full_end = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, full_end, BLOCK_N):
            m_i, l_i, acc = _attend_block(q, factor, keys_ptr, values_ptr, start, first, end, position, m_i, l_i, acc,
                                          HEAD_DIM, BLOCK_N, BLOCK_D, False)  # fmt: skip
        for start in range(full_end, end, BLOCK_N):  # once at most; keys and values of a loop are loaded together
            m_i, l_i, acc = _attend_block(q, factor, keys_ptr, values_ptr, start, first, end, position, m_i, l_i, acc,
                                          HEAD_DIM, BLOCK_N, BLOCK_D, True)  # fmt: skip
    return m_i, l_i, acc


@triton.jit
def _attend_block(
    q, factor, keys_ptr, values_ptr, start, first, end, position, m_i, l_i, acc,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and result after BLOCK_N more keys. Only the last block may reach beyond the end."""
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    token = start + offs_n
    keys_ptr += tl.cast(start, tl.int64) * HEAD_DIM
    offs = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    if LAST or HEAD_DIM != BLOCK_D:
        k = tl.load(keys_ptr + offs, (token < end)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(keys_ptr + offs)
    if keys_ptr.dtype.element_ty.primitive_bitwidth == 8:
        offs_word = tl.arange(0, BLOCK_D // 4)
        words_ptr = values_ptr.to(tl.pointer_type(tl.int32)) + tl.cast(start, tl.int64) * (HEAD_DIM // 4)
        offs = offs_n[:, None] * (HEAD_DIM // 4) + offs_word[None, :]
        if LAST or HEAD_DIM != BLOCK_D:
            v = tl.load(words_ptr + offs, (token < end)[:, None] & (offs_word < HEAD_DIM // 4)[None, :], other=0)
        else:
            v = tl.load(words_ptr + offs)
        v = _widen_words(v, keys_ptr.dtype.element_ty)
    else:
        values_ptr += tl.cast(start, tl.int64) * HEAD_DIM
        if LAST or HEAD_DIM != BLOCK_D:
            v = tl.load(values_ptr + offs, (token < end)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(values_ptr + offs)
    qk = tl.dot(q, tl.trans(_widen(k))) * factor[:, None]  # [M, D] @ [N, D]^T
    mask = (token >= first)[None, :] & (token < end)[None, :] & (token[None, :] <= position[:, None])
    qk = tl.where(mask, qk, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(qk, 1))
    p = tl.exp2(qk - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None])  # [M, N] @ [N, D]
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def _combine_kernel(
    partial_ptr, length_ptr, first_ptr, result_ptr, kv_heads, capacity, num_rows, splits,
    HEAD_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    row, pair = tl.program_id(0), tl.program_id(1)
    offs_split, offs_d = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    offs = (pair * splits + offs_split).to(tl.int64) * num_rows + row
    parts = tl.num_programs(1).to(tl.int64) * splits * num_rows
    mask = (offs_split < splits)[:, None] & (offs_d < HEAD_DIM)[None, :]
    # All loads come before the sums, which wait for the first.
    acc = tl.load(partial_ptr + offs[:, None] * HEAD_DIM + offs_d[None, :], mask, other=0.0)
    m_i = tl.load(partial_ptr + parts * HEAD_DIM + offs, offs_split < splits, other=-1e30)
    l_i = tl.load(partial_ptr + parts * (HEAD_DIM + 1) + offs, offs_split < splits, other=0.0)
    bad = _is_bad(length_ptr, capacity, first_ptr, pair // kv_heads)
    alpha = tl.exp2(m_i - tl.max(m_i, 0))
    y = _normalized(tl.sum(acc * alpha[:, None], 0), tl.sum(alpha * l_i, 0), bad)
    offs_out = (pair.to(tl.int64) * num_rows + row) * HEAD_DIM + offs_d
    tl.store(result_ptr + offs_out, y.to(result_ptr.dtype.element_ty), offs_d < HEAD_DIM)


@triton.jit
def _join_kernel(
    partial_ptr, length_ptr, first_ptr, result_ptr, kv_heads, capacity, num_rows, num_new, parts,
    HEAD_DIM: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    offs_m, offs_d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    first = 0
    if first_ptr is not None:
        first = tl.maximum(tl.load(first_ptr + pair // kv_heads), 0)
    position = tl.minimum(tl.load(length_ptr).to(tl.int32) - num_new + offs_m % num_new, capacity - 1)
    seen = tl.where(offs_m < num_rows, (position - first + PART) // PART, 0)  # parts, of each query
    size = tl.num_programs(1).to(tl.int64) * parts * num_rows
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for part in range(tl.max(seen, 0)):
        offs, mask = (pair * parts + part).to(tl.int64) * num_rows + offs_m, part < seen
        m_part = tl.load(partial_ptr + size * HEAD_DIM + offs, mask, other=-1e30)
        l_part = tl.load(partial_ptr + size * (HEAD_DIM + 1) + offs, mask, other=0.0)
        offs = offs[:, None] * HEAD_DIM + offs_d[None, :]
        x = tl.load(partial_ptr + offs, mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        m_new = tl.maximum(m_i, m_part)
        alpha, beta = tl.exp2(m_i - m_new), tl.exp2(m_part - m_new)
        l_i, acc = l_i * alpha + l_part * beta, acc * alpha[:, None] + x * beta[:, None]
        m_i = m_new
    y = _normalized(acc, l_i[:, None], _is_bad(length_ptr, capacity, first_ptr, pair // kv_heads))
    offs = (pair.to(tl.int64) * num_rows + offs_m)[:, None] * HEAD_DIM + offs_d[None, :]
    mask = (offs_m < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(result_ptr + offs, y.to(result_ptr.dtype.element_ty), mask)


@triton.jit
def _is_bad(length_ptr, capacity, first_ptr, sequence):
    """True if `length` exceeds the capacity or `first` is negative."""
    bad = tl.load(length_ptr) > capacity
    if first_ptr is not None:
        bad |= tl.load(first_ptr + sequence) < 0
    return bad


@triton.jit
def _normalized(acc, l_i, bad):
    """acc / l: zeros if no key was seen, NaN if the cache is bad."""
    return tl.where(bad, float("nan"), tl.where(l_i == 0, 0.0, acc / l_i))


def append_kv(k: Tensor, v: Tensor, cache: Cache, clipped: Tensor) -> None:
    """Same as `append_kv_reference`, for contiguous caches."""
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    largest, limit = LARGEST.get(cache.keys.dtype, 0.0), ROUNDS_TO_LARGEST.get(cache.keys.dtype, 0.0)
    batch, kv_heads, num_new, dim = k.shape
    tile = tile_of(num_new, dim) | {"num_warps": 4}
    launcher(rotate_append_kernel, (2 * batch * kv_heads, cdiv(num_new, tile["BLOCK_T"])))(
        k, k, v, None, None, None, None, *cache, clipped, None, None,
        0, 0, 0, *k.stride()[:3], *v.stride()[:3], num_new, cache.keys.shape[2],
        HEADS=0, KV_HEADS=kv_heads, HEAD_DIM=dim, ONE_TABLE=True, EPS=0.0,
        LARGEST=largest, LIMIT=limit, INVERSE=False, **tile,
    )  # fmt: skip
