"""Arguments of every registered operation, by its name, in the order of its schema."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import product
from pkgutil import iter_modules
from typing import Any

import attention_fp8_oracle
import attention_oracle
import grouped_examples
import torch
from gemm_examples import operands
from quantize_oracle import matrix
from torch import Tensor

import octavo.nn.fused_loss  # registers linear_cross_entropy
import octavo.ops
from octavo.numerics import TENSOR, Cast, block, group
from octavo.observation.operand_statistics import HEAD, WIDTH
from octavo.ops import activation_scales, aligned_groups, group_of_rows, quantize, quantize_matrices, sort_by_expert
from octavo.ops.activation import WIDTHS
from octavo.ops.gemm import operands_of
from octavo.ops.registration import Operation
from octavo.ops.softmax_loss import IGNORED

Example = tuple[str, tuple[Any, ...]]

MODULES = [import_module(f"octavo.ops.{module.name}") for module in iter_modules(octavo.ops.__path__)]
FOUND = [value for module in MODULES for value in vars(module).values() if isinstance(value, Operation)]
OPERATIONS = {operation.name: operation for operation in FOUND}


CASTS = [Cast(), Cast(granularity=TENSOR), Cast("e5m2", group(32), "e8m0"), Cast(granularity=block(4, 4))]
FUSED = [Cast(), Cast("e5m2", scale="pow2")]
INT8 = Cast("int8")
ROW = Cast().spec
SEED = torch.tensor(0x0123456789ABCDEF)


def examples(x: Tensor, casts: Sequence[Cast] = CASTS) -> Iterator[Example]:
    """Operations that take a matrix x [M, K] of float32 or bfloat16, or something that is made of it."""
    yield from quantizing(x, casts)
    yield from norms(x)
    yield from activations(x)


def quantizing(x: Tensor, casts: Sequence[Cast]) -> Iterator[Example]:
    m, k = x.shape
    row, column, seeds = torch.rand(m, 1) + 0.1, torch.rand(1, k) + 0.1, (None, SEED)
    for cast, seed in product((*casts, INT8), seeds):
        if seed is not None and cast is INT8:
            continue
        for place in (None, torch.arange(m, dtype=torch.int32).flip(0).repeat(2) - 1):
            yield "quantize_transposed", (x, cast.spec, seed, place)
        for factors in ((None, None), (column, None), (None, row), (column, row)):
            yield "quantize", (x, cast.spec, *factors, seed, 1)
    for fmt, scale, seed in product(("e4m3", "e5m2"), (1e-3, 0.1), seeds):  # some numbers saturate
        yield "quantize_scaled", (x, torch.full((1, 1), scale), fmt, seed)
    yield "rotate", (x, None)
    for s_w in (None, column.t().contiguous()):
        yield "fold_scales", (row, row.exp2(), s_w, None)
    for cast in (Cast(), Cast("e5m2", relative_floor=0.25)):
        for stored in (True, False):
            yield "quantize_stack", ([x, x[: m // 2], x[m // 3 :], x], cast.spec, stored)
    yield "requantize", ([x] * 3, row.repeat(3, 1), "e4m3", "row", False, None)
    for fmt, by in product(("e4m3", "e5m2"), (TENSOR, block(128, 128), block(16, 16))):
        scale = torch.rand(by.scale_shape((m, k))) + 0.1
        yield "requantize", ([x], scale, fmt, by.name, True, row)
    yield "requantize", ([x] * 4, row.repeat(4, 1), "e4m3", "row", True, row)
    for fmt, shift in product(("e4m3", "e5m2"), (None, torch.arange(m, dtype=torch.int32))):
        for place in (None, torch.arange(m, dtype=torch.int32).flip(0).repeat(2) - 1):
            yield "transpose", (quantize(x, Cast(fmt)).data, shift, place, x)


def norms(x: Tensor) -> Iterator[Example]:
    m, k = x.shape
    row, vector, other = torch.rand(m, 1) + 0.1, torch.rand(k), x.flip(0)
    for center, cast in product((False, True), (*FUSED, INT8)):
        residual, bias, mean = (other, vector, row) if center else (None, None, None)
        for statistics in (False, True):
            yield "norm_quantize", (x, residual, vector, bias, 1e-5, cast.spec, center, statistics)
            yield "norm_quantize", (x, other, vector, bias, 1e-5, cast.spec, center, statistics)
        yield "norm_backward", (x, other, vector, row, row, residual, center)
        if cast is not INT8:
            yield "requantize_norm", (x, mean, row, vector, bias, row, cast.format)


def activations(x: Tensor) -> Iterator[Example]:
    m, k = x.shape
    row = torch.rand(m, 1) + 0.1
    for (kind, width), cast in product(WIDTHS.items(), (*FUSED, INT8)):
        u, factor = torch.cat((x, x.flip(1)), 1)[:, : width * k], torch.rand(1, width * k)
        scale = activation_scales(u, kind, cast)
        for given, stored in ((None, True), (None, False), (2 * scale, True)):
            yield "activation_quantize", (u, kind, given, stored, cast.spec)
        if cast is INT8:
            continue
        for (line, slot, rows, weight), biased in product(((None,) * 4, routing(m)), (False, True)):
            lines = factor if line is None else torch.cat((factor, 2 * factor))
            given = cast.spec, lines, line, row, weight, slot, rows, cast.spec, scale, biased
            yield "activation_backward", (x.flip(0), u, kind, *given)


def routing(m: int) -> tuple[Tensor, ...]:
    """m rows of two experts: a third of their slots have no row here, and some weights are zero."""
    slot = torch.randperm(m).int()
    row = torch.where(torch.arange(m) % 3 > 0, slot.argsort().int(), -1).view(m, 1)
    return torch.arange(m, dtype=torch.int32) % 2, slot, row, torch.randint(-2, 3, (m, 1)) / 4


def products(x: Tensor) -> Iterator[Example]:
    m, k = x.shape
    q, w = quantize(x, Cast()), quantize(matrix((24, k), torch.bfloat16), Cast())
    a, b = quantize(x, INT8), quantize(w.dequantize(), INT8)
    for bias, residual in ((None, None), (torch.rand(24), torch.rand(m, 24).bfloat16())):
        yield "weight_only_mm", (x, w.data, w.scale, "row", bias, residual, None, 0.0, False)
        if m:
            yield "weight_only_mm", (x[:1], w.data, w.scale, "row", bias, None, torch.rand(k), 0.1, bias is None)
        yield "int8_mm", (*operands_of(a, b), bias, residual, torch.bfloat16)
    yield "index_of_largest", (x,)
    yield "observe", (torch.zeros(1, WIDTH).double(), 0, "x", [x], [], q.data, q.scale, ROW, None, None, None)


def permutations(tokens, top_k, experts, k, dtype, casts: Sequence[Cast] = (Cast(),)):
    """Rows of tokens that are sorted by expert: nobody chooses the last one, and some choose one that is elsewhere."""
    torch.manual_seed(0)
    chosen = torch.rand(tokens, experts + 1).topk(top_k).indices
    slot, row, offsets = sort_by_expert(chosen, experts)
    rows = tokens * top_k
    yield "index_slots", (*torch.sort(chosen.view(-1).int(), stable=True), experts)
    x, y, weight = torch.randn(tokens, k).to(dtype), torch.randn(rows, k).to(dtype), torch.rand(tokens, top_k)
    group = group_of_rows(offsets, rows).clamp(max=experts - 1)
    factors, plain = (torch.rand(experts, k), group, torch.rand(rows, 1)), (None, None, None)
    for cast in casts:
        for given in ((*factors, weight), (*factors, None), (*plain, None)):
            yield "gather_quantize", (x, cast.spec, top_k, *given, slot, None)
        yield "gather_quantize", (y, cast.spec, 1, *factors, None, None, None)
    yield "fold_scales", (factors[2] + 0.1, (factors[2] + 0.1).exp2(), torch.rand(experts, k, 1) + 0.1, offsets)
    place = aligned_groups(offsets, rows).place
    for given in (None, slot):
        yield "index_groups", (offsets, rows, len(place), given, top_k)
    for shift in (None, torch.randint(0, 20, (rows,), dtype=torch.int32)):
        yield "transpose", (y.to(torch.float8_e4m3fn), shift, place, None)
    y = y.clone()
    y[offsets[-1] :] = torch.nan  # rows of other ranks hold any numbers
    for given in (None, weight):
        yield "combine", (y, row, given)


def of_experts() -> Iterator[Example]:
    x, offsets = matrix((20, 32), torch.bfloat16), torch.tensor([3, 3, 20], dtype=torch.int32)
    w = matrix((3 * 48, 32), torch.bfloat16).view(3, 48, 32)
    yield "quantize", (w.flatten(0, 1), Cast(relative_floor=2.0**-8).spec, None, None, None, 3)
    a, b = quantize(x, Cast()), quantize_matrices(w, Cast())
    for pair in ("row", "mx"):
        q, stack, ends = grouped_examples.operands([3, 0, 17], 32, 48, pair=pair)
        yield "grouped_mm", (*operands_of(q, stack), ends, torch.bfloat16, False, True)
        yield "grouped_weight_only_mm", (x, stack.data, stack.scale, stack.granularity.name, ends)
    # Beyond 448 E4M3 has NaN, which opcheck of torch 2.11 does not find equal to itself.
    h, x_t = (matrix((n, 20), torch.bfloat16).clamp(-448, 448).to(torch.float8_e4m3fn) for n in (48, 32))
    yield "grouped_mm_dw", (h, x_t, b.scale, b.scale, "row", "row", offsets, torch.float32, True, True)
    scales = (torch.rand(n, 1).to(torch.float8_e8m0fnu) for n in (48, 32))
    yield "grouped_mm_dw", (h, x_t, *scales, "group:32", "group:32", offsets, torch.float32, True, True)
    slot = torch.randperm(20).to(torch.int32)
    buffers = torch.zeros(1, WIDTH).double(), torch.zeros(3, HEAD).double()
    yield "observe_experts", (*buffers, "x", [x[:10]], offsets, a.data, a.scale, ROW, slot, None, None, None)


def of_gemm_and_attention() -> Iterator[Example]:
    for pair, added in product(("row", "mx"), ((None, None), (torch.ones(5), torch.ones(3, 5).bfloat16()))):
        a, b = operands(pair, 3, 64, 5)
        yield "scaled_mm", (*operands_of(a, b), *added, torch.bfloat16, False, False)
        a, b = operands("row", 3, 64, 5)
        added = [None if t is None else t.bfloat16() for t in added]
        yield "ordered_mm", (a.data, b.data, a.scale, b.scale, *added)
    yield "ordered_mm", (torch.randn(3, 64).bfloat16(), torch.randn(5, 64).bfloat16(), *[None] * 4)
    yield "add_product", (matrix((5, 40)), matrix((5, 3)), matrix((40, 3)))
    for kind in attention_oracle.DTYPES:
        q, *cache = attention_oracle.given(kind, 2, 4, 2, 2, 16, 9)
        for name in ("cached_attention", "ordered_attention")[: 1 + (kind == "bf16")]:
            yield name, (q, *cache, torch.tensor(3), torch.zeros(2, dtype=torch.int32), 0.25)
        k = torch.randn(2, 2, 2, 16).bfloat16()
        yield "append_kv", (k, k, *cache, torch.tensor(3), torch.zeros(2, dtype=torch.int64))
        yield from rotations((2, 3, 4, 2, 16), kind)
    x = [attention_fp8_oracle.quantized(t) for t in attention_fp8_oracle.given(2, 4, 2, 3, 3, 16)]
    data, scales = [t.data for t in x[:3]], [t.scale for t in x[:3]]
    yield "fp8_attention", (*data, *scales, 0.25, torch.bfloat16)
    stats = torch.full((2, 4, 3), 3.0)
    by_token = x[3].data.transpose(1, 2).contiguous()
    yield "fp8_attention_backward", (by_token, *data, by_token, stats, torch.ones(7), 0.25, torch.bfloat16)


def of_loss() -> Iterator[Example]:
    z, labels, one = matrix((5, 40), torch.bfloat16), torch.tensor([3, IGNORED, -1, 39, 0]), torch.tensor(1.0)
    for factor, lse, cap in ((None, None, 0.0), (one, torch.ones(5), 0.0), (one, None, 30.0)):
        yield "cross_entropy", (z, labels, factor, lse, 1.0, cap)
    for wanted in product((False, True), repeat=2):
        lse = torch.full((5,), 40.0)  # above all logits
        yield "cross_entropy_gradient", (z, labels, one, lse, torch.zeros(5), 1.0, 30.0, *wanted)
    x, w = (matrix((n, 32), torch.bfloat16) for n in (5, 40))
    yield "multiply", (x, 0.5 * one)
    for wants_x, wants_w in product((False, True), repeat=2):
        options = torch.bfloat16, 2, wants_x, wants_w, 1.0, 0.0, "", wants_x
        yield "linear_cross_entropy", (x, w, labels % 40, one, *options)


def rotations(shape, kind, dtype=torch.bfloat16, table=torch.bfloat16):
    """Of batch, tokens, heads of queries and of keys, and their size; q, k and v are views of one buffer."""
    batch, tokens, _, kv_heads, dim = shape
    for normed, keep_k in product((False, True), repeat=2):
        x = attention_oracle.projections(*shape, dtype)
        angles = attention_oracle.tables((1 if normed else batch, tokens, dim), table)
        cache = attention_oracle.new_cache(kind, batch, kv_heads, tokens + 3, dim, tokens + 1)
        weights = [torch.randn(dim).to(dtype) if normed else None for _ in range(2)]
        yield "rotate_append", (*x, *angles, *weights, 1e-6, *cache, keep_k)
        yield "turn_heads", (*(t.unflatten(2, (-1, dim)).transpose(1, 2) for t in x[:2]), *angles, keep_k)
