"""Times our GEMMs with many tilings: what a kernel's `choose` takes, and the best of all. It writes no result.

    gemm             the GEMM of row scales at few rows, beside cuBLASLt and a copy of the same bytes
    block            the GEMM of scales along K, by scales, beside BF16, cuBLASLt and operands widened to BF16
    grouped          the grouped GEMM of block scales, beside BF16's; the routing is drawn at random
    weight-only      the GEMM of an eight-bit weight; --bytes widens E4M3 as on older GPUs
    int8             the GEMM of INT8 at more than 64 rows
    cache            the attention that reads a cache of keys and values, by tiles

Change `choose` in octavo.ops.kernels (and `TILES` in octavo.ops.attention_tiles) by what it prints.

    python -m bench.gpu.tune gemm [--rows 1,16,64] [--shapes 4]
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product, starmap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import llama
from bench.gpu import serve_models as models
from bench.gpu.harness import beyond_cache, fastest, in_turn, made, option, replayed
from bench.gpu.kernels import copy_ms
from bench.gpu.moe import SHAPES as EXPERTS
from octavo.inference.kv_cache import DTYPES
from octavo.numerics import ROW, Cast, QTensor, group
from octavo.ops import quantize, sort_by_expert
from octavo.ops.attention_tiles import TILES, Tile, choose_tile
from octavo.ops.dispatch import SQUARE, STRIP
from octavo.ops.kernels import block_scaled_gemm, grouped_gemm, int8_gemm, weight_only
from octavo.ops.kernels import gemm as row_gemm
from octavo.ops.launching import Operands, compile_only
from octavo.ops.library_gemms import scaled_mm_cublaslt
from octavo.recipe import ROW_W

BF16 = torch.bfloat16
PAIRS = {"group32": (group(32),) * 2, "group64": (group(64),) * 2, "group128": (STRIP, STRIP), "block": (STRIP, SQUARE)}
# BLOCK_N, BLOCK_M, groups of a step, stages and warps that are worth a try, up to so many likely rows of a group
GROUPED = {
    16: [(64, 16, 2, 3, 4), (64, 16, 1, 6, 4), (128, 16, 2, 3, 4), (128, 16, 1, 4, 4)],
    64: [(64, 64, 1, 5, 4), (128, 64, 1, 4, 8), (128, 64, 1, 4, 4), (64, 32, 2, 4, 4)],
    1 << 20: [(128, 128, 1, 5, 8), (128, 128, 1, 3, 8), (64, 128, 1, 3, 4), (128, 64, 1, 4, 8)],
}
INT8 = [  # BLOCK_M, BLOCK_N, BLOCK_K, stages, warps
    (128, 128, 128, 3, 4), (128, 128, 128, 3, 8), (128, 128, 128, 4, 8), (128, 256, 64, 4, 8), (128, 256, 128, 3, 8),
    (128, 256, 128, 4, 8), (256, 128, 128, 3, 8), (64, 256, 128, 3, 4), (64, 128, 128, 4, 4),
]  # fmt: skip
CACHED = [Tile(tile, warps, stages) for tile in (32, 64, 128, 256) for warps in (4, 8) for stages in (2, 3, 4, 5)]


def main(words: Sequence[str] | None = None) -> None:
    name = (words or sys.argv[1:] or [""])[0]
    if name not in KERNELS:
        raise SystemExit(f"the first word must be one of {', '.join(KERNELS)}, got {name!r}")
    rows, tune = KERNELS[name]
    chosen = [int(each) for each in option("--rows", rows).split(",")]
    for m in chosen:
        for n, k in llama.SHAPES[-int(option("--shapes", "4")) :] if name in BY_SHAPE else ((0, 0),):
            tune(m, n, k)
            torch.cuda.empty_cache()


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def show(found: list[tuple[Any, float]], flops: float = 0.0, copy: float = 0.0) -> None:
    for tiling, us in found:
        rate = f"  {flops / us / 1e6:5.0f} TFLOP/s" if flops else f"  {copy / us:.2f} of a copy" if copy else ""
        print(f"  {tuple(tiling)} {us:8.1f} us{rate}", flush=True)


def gemm(m: int, n: int, k: int) -> None:
    a, count = quantize(bf16(m, k), Cast()), beyond_cache(n, k)
    bs = [quantize(bf16(n, k), Cast()) for _ in range(count)]

    def ours(tiling: row_gemm.Tiling) -> float:
        return in_turn(lambda b: row_gemm.scaled_mm(a.data, a.scale, b.data, b.scale, None, BF16, True, tiling), bs)

    def native(b: QTensor) -> None:
        scaled_mm_cublaslt(Operands.of(a, b), None, BF16, True)

    many = product((64, 128), (128, 256), (3, 4, 6), (4,), (1, 2, 4, 8))
    tilings = product((2, 4, 8, 16), (512, 1024, 2048), (1, 3, 4), (4,)) if m == 1 else many
    found = fastest(row_gemm.choose(m, n, k, a.data.device), starmap(row_gemm.Tiling, tilings), ours)
    copy = 1e3 * copy_ms(count * (n * k + 4 * n + m * (k + 4 + 2 * n))) / count
    print(f"{m} x {n} x {k}: a copy {copy:.1f} us, cuBLASLt {in_turn(native, bs):.1f} us", flush=True)
    show(found, copy=copy)


def block(m: int, n: int, k: int) -> None:
    x, wide = bf16(m, k), [bf16(n, k) for _ in range(beyond_cache(n, k) if m < 1024 else 2)]
    print(f"{m} x {n} x {k}: BF16 {in_turn(partial(F.linear, x), wide):.1f} us", flush=True)
    for name, (left, right) in PAIRS.items():
        cast, size = Cast(granularity=left), left.cols or 1
        a, bs = quantize(x, cast), [quantize(w, Cast(granularity=right)) for w in wide]

        by = partial(time_products, a, bs)
        native = f", cuBLASLt {by(scaled_mm_cublaslt, False):.1f} us" if size == 128 else ""
        print(f"  {name}: quantize {in_turn(partial(quantize, cast=cast), [x] * len(wide)):.1f} us{native}", flush=True)
        print(f"    widened to BF16 {by(block_scaled_gemm.dequantized_mm):8.1f} us")
        tilings = starmap(block_scaled_gemm.Tiling, block_tilings(m, size))
        chosen = block_scaled_gemm.choose(m, n, k, size, x.device)
        show(fastest(chosen, tilings, partial(by, block_scaled_gemm.scaled_mm, None), best=4), 2 * m * n * k)


def time_products(a: QTensor, bs: Sequence[QTensor], call: Callable[..., Any], *options: Any) -> float:
    """Microseconds of a product of a with each of bs in turn."""
    return in_turn(lambda b: call(Operands.of(a, b), None, BF16, *options), bs)


def block_tilings(m: int, group_size: int) -> Iterator[tuple[int, ...]]:
    """BLOCK_N, BLOCK_M, groups of a step, stages, warps and splits that are worth a try."""
    groups = {32: (4, 2), 64: (2, 4), 128: (2, 1)}[group_size]
    if m <= 64:
        yield from product((64,), (max(16, 1 << (m - 1).bit_length()),), groups, (3, 5), (4,), (1, 2, 4, 8))
        return
    stages = {32: (3, 4, 5), 64: (2, 3, 4), 128: (2, 3)}[group_size]
    yield from product((128,), (128,), (groups[0],), stages, (8,), (1,))
    yield from product((128,), (128,), (groups[1],), (2, 3), (8,), (1,))
    yield from product((64,), (128,), (groups[0],), (2, 3), (4,), (1,))
    yield from product((128,), (64,), (groups[0],), (2, 3), (4,), (1,))


def grouped(tokens: int, *_: int) -> None:
    for name, shape in EXPERTS.items():
        for n, k in ((2 * shape.mlp_width, shape.width), (shape.width, shape.mlp_width)):
            e, m, w = shape.experts, tokens * shape.top_k, bf16(shape.experts, n, k)
            qs = [quantize(matrix, Cast(granularity=SQUARE)) for matrix in w]
            data = torch.stack([q.data.view(torch.uint8) for q in qs]).view(qs[0].data.dtype)
            scale = torch.stack([q.scale for q in qs])
            offsets = sort_by_expert(torch.rand(tokens, e, device="cuda").topk(shape.top_k).indices, e).offsets
            x = bf16(m, k)
            a = quantize(x, Cast(granularity=STRIP))
            wide = 1e3 * replayed(partial(F.grouped_mm, x, w.transpose(1, 2), offs=offsets), rounds=4)
            print(f"{name}, {tokens} tokens, {n} x {k}: BF16 {wide:.1f} us", flush=True)
            rows = grouped_gemm.likely_rows(m, e)
            chosen = block_scaled_gemm.choose(rows, n, k, 128, x.device)
            tilings = next(tilings for most, tilings in GROUPED.items() if rows <= most)
            others = [block_scaled_gemm.Tiling(*each) for each in tilings]
            operands = Operands(a.data, data, a.scale, scale, STRIP, SQUARE)
            ours = partial(grouped_gemm.block_scaled_grouped_mm, operands, offsets, BF16)
            with compile_only():  # in several threads
                for tiling in (chosen, *others):
                    ours(tiling)
            us = lambda tiling, ours=ours: 1e3 * replayed(partial(ours, tiling), rounds=4)  # noqa: E731
            show(fastest(chosen, others, us, best=4), 2 * m * n * k)


def eight_bit_weight(m: int, n: int, k: int) -> None:
    x, native = bf16(m, k), "--bytes" not in sys.argv
    ws = [quantize(bf16(n, k), ROW_W) for _ in range(beyond_cache(n, k))]

    def us(tiling: row_gemm.Tiling) -> float:
        return in_turn(lambda w: weight_only.weight_only_mm(x, w.data, w.scale, ROW, None, None, tiling, native), ws)

    many = product((64, 128), (128, 256) if m <= 32 else (64, 128), (3, 4), (4, 8), (1, 2))
    tilings = product((4, 8, 16), (512, 1024), (3, 4), (4,), (1,)) if m == 1 else many
    print(f"{m} x {n} x {k}", flush=True)
    show(fastest(weight_only.choose(m, n, k, 0, x.device), starmap(row_gemm.Tiling, tilings), us))


def int8(m: int, n: int, k: int) -> None:
    a, b = (torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for shape in ((m, k), (n, k)))
    ones = [torch.ones(rows, 1, device="cuda") for rows in (m, n)]

    def us(tiling: int8_gemm.Tiling) -> float:
        return 1e3 * replayed(partial(int8_gemm.int8_mm, a, ones[0], b, ones[1], None, None, BF16, tiling), calls=3)

    print(f"{m} x {n} x {k}", flush=True)
    tilings = [int8_gemm.Tiling(*each) for each in INT8]
    show(fastest(tilings[0], tilings, us, best=len(tilings)), 2 * m * n * k)


def cache(batch: int, *_: int) -> None:
    heads, kv_heads, dim = llama.CONFIG.heads, llama.CONFIG.kv_heads, llama.CONFIG.head_dim
    for context in (32768, 4096):
        q, k, v = (bf16(batch, n, length, dim) for n, length in ((heads, 1), (kv_heads, context), (kv_heads, context)))
        for dtype in DTYPES:
            store = models.filled(dtype, k, v)
            size = store.keys.element_size()
            before, copy, found = TILES[size], copy_ms(2 * k.numel() * size), dict[Tile, float]()
            for choice in CACHED:
                TILES[size] = (choice,)
                choose_tile.cache_clear()
                took = made(str(choice), partial(replayed, partial(store.attend, q), calls=3, rounds=4))
                found |= {choice: took} if took is not None else {}  # None: more shared memory than there is
            TILES[size] = before
            choose_tile.cache_clear()
            print(f"batch {batch} context {context} {dtype}; now {tuple(before[0])}", flush=True)
            show([(tile, 1e3 * found[tile]) for tile in sorted(found, key=found.__getitem__)[:5]], copy=1e3 * copy)


KERNELS: dict[str, tuple[str, Callable[[int, int, int], None]]] = {  # and the rows (tokens, texts) by default
    "gemm": ("1,16,64", gemm),
    "block": ("16,8192", block),
    "grouped": ("16,512,8192", grouped),
    "weight-only": ("1,16,64", eight_bit_weight),
    "int8": ("512,8192", int8),
    "cache": ("1,8", cache),
}
BY_SHAPE = KERNELS.keys() - {"grouped", "cache"}

if __name__ == "__main__":
    main()
