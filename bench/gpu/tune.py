"""Times our GEMMs with other tilings: what a kernel's `choose` takes, and the best that a search from there finds.

It writes no result.

    gemm             the GEMM of row scales at few rows, beside a copy of the same bytes
    block            the GEMM of scales along K, by scales, beside cuBLASLt and operands widened to BF16
    grouped          the grouped GEMM of block scales; the routing is drawn at random
    grouped-rows     the grouped GEMMs of row scales on a Hopper: y with fast accumulation, and dw promoted
    weight-only      the GEMM of an eight-bit weight; --bytes widens E4M3 as on older GPUs
    cache            the attention that reads a cache of keys and values, by tiles, beside a copy of the same bytes

Change `choose` in octavo.ops.kernels (and `TILES` in octavo.ops.attention_tiles) by what it prints. The other ways to
compute the same are in bench.gpu.serve, linears and moe.

    python -m bench.gpu.tune gemm [--rows 1,16,64] [--shapes 4]
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.gpu import llama
from bench.gpu import serve_models as models
from bench.gpu.harness import Options, benchmark, beyond_cache, fastest, in_turn, once, replayed, sized
from bench.gpu.kernels import bf16, copy_ms
from bench.gpu.moe import SHAPES as EXPERTS
from bench.gpu.moe import Products, of_columns, of_rows
from octavo.numerics import ROW, Cast, QTensor, group
from octavo.ops import quantize, quantize_matrices, sort_by_expert
from octavo.ops.attention_tiles import TILES, Tile
from octavo.ops.dispatch import SQUARE, STRIP
from octavo.ops.kernels import block_scaled_gemm, grouped_gemm, weight_only
from octavo.ops.kernels import gemm as row_gemm
from octavo.ops.launching import Operands, _recorded
from octavo.ops.library_gemms import scaled_mm_cublaslt
from octavo.recipe import ROW_W

BF16 = torch.bfloat16
PAIRS = {"group32": (group(32),) * 2, "group64": (group(64),) * 2, "group128": (STRIP, STRIP), "block": (STRIP, SQUARE)}


def show(found: list[tuple[Any, float]], flops: float = 0.0, copy: float = 0.0) -> None:
    for tiling, us in found:
        rate = f"  {flops / us / 1e6:5.0f} TFLOP/s" if flops else f"  {copy / us:.2f} of a copy" if copy else ""
        print(f"  {tuple(tiling)} {us:8.1f} us{rate}", flush=True)


def gemm(m: int, n: int, k: int) -> None:
    a, count = quantize(bf16(m, k), Cast()), beyond_cache(n, k)
    bs = [quantize(bf16(n, k), Cast()) for _ in range(count)]

    def us(tiling: row_gemm.Tiling) -> float:
        return in_turn(lambda b: row_gemm.scaled_mm(a.data, a.scale, b.data, b.scale, None, BF16, True, tiling), bs)

    found = fastest(row_gemm.choose(m, n, k, a.data.device), us)
    show(found, copy=1e3 * copy_ms(count * (n * k + 4 * n + m * (k + 4 + 2 * n))) / count)


def block(m: int, n: int, k: int) -> None:
    x, wide = bf16(m, k), [bf16(n, k) for _ in range(beyond_cache(n, k) if m < 1024 else 2)]
    for name, (left, right) in PAIRS.items():
        a, size = quantize(x, Cast(granularity=left)), left.cols or 1
        bs = [quantize(w, Cast(granularity=right)) for w in wide]

        def us(call: Callable[..., Any], *options: Any, a: QTensor = a, bs: list[QTensor] = bs) -> float:
            return in_turn(lambda b: call(Operands.of(a, b), None, BF16, *options), bs)

        native = f", cuBLASLt {us(scaled_mm_cublaslt, False):.1f} us" if size == 128 else ""
        print(f"  {name}: widened to BF16 {us(block_scaled_gemm.dequantized_mm):.1f} us{native}", flush=True)
        chosen = block_scaled_gemm.choose(m, n, k, size, x.device)
        show(fastest(chosen, partial(us, block_scaled_gemm.scaled_mm, None)), 2 * m * n * k)


def grouped(tokens: int, *_: int) -> None:
    for name, shape in EXPERTS.items():
        for n, k in ((2 * shape.mlp_width, shape.width), (shape.width, shape.mlp_width)):
            e, m = shape.experts, tokens * shape.top_k
            w_q = quantize_matrices(bf16(e, n, k), Cast(granularity=SQUARE))
            offsets = sort_by_expert(torch.rand(tokens, e, device="cuda").topk(shape.top_k).indices, e).offsets
            a = quantize(bf16(m, k), Cast(granularity=STRIP))
            rows = grouped_gemm.likely_rows(m, e)
            chosen = block_scaled_gemm.choose(rows, n, k, 128, offsets.device)
            operands = Operands(a.data, w_q.data, a.scale, w_q.scale, STRIP, SQUARE)
            ours = partial(grouped_gemm.grouped_mm, operands, offsets, BF16, False)
            print(f"{name}, {tokens} tokens, {n} x {k}", flush=True)
            time_grouped(ours, chosen, 2 * m * n * k)


def time_grouped(ours: Callable[[Any], Any], chosen: Any, flops: float) -> None:
    def us(tiling: Any) -> float:
        ours(tiling)
        return 1e3 * median(once(partial(ours, tiling), 4) for _ in range(3))

    show(fastest(chosen, us), flops)


def grouped_rows(*_: int) -> None:
    for name, shape in EXPERTS.items():
        p = Products(shape)
        y, dw = of_rows(p.x_q.data, p.w_q.data, p.offsets), of_columns(p.dy_t, p.x_t, p.offsets)
        device, likely = p.offsets.device, grouped_gemm.likely_rows(shape.rows, shape.experts)
        print(f"{name}: y, then dw", flush=True)
        chosen = grouped_gemm.choose(likely, True, device)
        time_grouped(partial(y.ours, True), chosen, p.flops)
        chosen = grouped_gemm.choose(shape.width, False, device)
        time_grouped(partial(dw.ours, False), chosen, p.flops)


def eight_bit_weight(m: int, n: int, k: int, native: bool | None = None) -> None:
    x, ws = bf16(m, k), [quantize(bf16(n, k), ROW_W) for _ in range(beyond_cache(n, k))]

    def us(tiling: row_gemm.Tiling) -> float:
        return in_turn(lambda w: weight_only.weight_only_mm(x, w.data, w.scale, ROW, None, None, tiling, native), ws)

    show(fastest(weight_only.choose(m, n, k, 0, x.device), us))


def cache(batch: int, *_: int) -> None:
    heads, kv_heads, dim = llama.LLAMA.heads, llama.LLAMA.kv_heads, llama.LLAMA.head_dim
    for context in sized((32768, 4096), (256,)):
        q, k, v = (bf16(batch, n, t, dim) for n, t in ((heads, 1), (kv_heads, context), (kv_heads, context)))
        for dtype in ("bf16", "fp8", "int8"):
            store = models.filled(dtype, k, v)
            size = store.keys.element_size()
            before, step = TILES[size], partial(store.attend, q)
            print(f"batch {batch} context {context} {dtype}", flush=True)
            found = fastest(before[0], partial(time_tile, step, size))
            show(found, copy=1e3 * copy_ms(2 * k.numel() * size))
            TILES[size] = before
            _recorded.clear()


def time_tile(step: Callable[[], Tensor], size: int, tile: Tile) -> float:
    """Microseconds of an attention whose elements of keys and values have `size` bytes, with a tile."""
    TILES[size] = (tile,)
    _recorded.clear()
    return 1e3 * replayed(step, calls=3, rounds=4)


KERNELS: dict[str, tuple[str, Callable[..., None]]] = {  # and the rows (tokens, texts) by default
    "gemm": ("1,16,64", gemm),
    "block": ("16,8192", block),
    "grouped": ("16,512,8192", grouped),
    "grouped-rows": ("0", grouped_rows),
    "weight-only": ("1,16,64", eight_bit_weight),
    "cache": ("1,8", cache),
}
BY_SHAPE = KERNELS.keys() - {"grouped", "grouped-rows", "cache"}


@benchmark(kernel=KERNELS, shapes=sized(4, 1), rows="", bytes=False)
def main(options: Options) -> None:
    rows, tune = KERNELS[options.kernel]
    by_shape = llama.SHAPES[-options.shapes :] if options.kernel in BY_SHAPE else ((0, 0),)
    for m in [int(each) for each in (options.rows or rows).split(",")][: sized(None, 1)]:
        for n, k in by_shape:
            print(f"{m} x {n} x {k}" if n else m, flush=True)
            tune(m, n, k, **{"native": False} if options.bytes else {})
            torch.cuda.empty_cache()
