"""Decoding with keys and values in BF16, E4M3 and INT8, at Llama-3-8B's shape with random weights.

First the attention alone, over contexts and batches, beside a copy that moves as many bytes as the cache has, and
PyTorch's attention over BF16, which reads the cache as it is (gqa) or expanded to the heads of the queries. Each result
is first compared with PyTorch's attention in float32 over the same bytes. Then whole steps of 32 layers, batch 8, a
context of 32,768 tokens: one CUDA graph a step, from token to token, with the same GEMMs, of weights in FP8 as packed
models have them; keys and values are random, and the caches hold the same ones.

`--tune` times the attention over sizes of its tiles instead, and writes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.gpu.kernels import copy_ms
from bench.gpu.modes import CACHE_BF16, CACHE_FP8, CACHE_TORCH
from bench.gpu.timing import Captured, decibels, interleaved, replayed, summary
from octavo.artifact.packed.scheme import CHANNEL
from octavo.kv_cache.layer import DTYPES, LayerKVCache
from octavo.numerics import QTensor
from octavo.ops import quantize, scaled_mm
from octavo.ops.attention import kernel
from octavo.ops.attention.reference import widened_attention

HEADS, KV_HEADS, DIM, WIDTH, MLP, LAYERS, VOCABULARY = 32, 8, 128, 4096, 14336, 32, 128256
CONTEXTS, BATCHES = (2048, 4096, 8192, 16384, 32768), (1, 8)
CONTEXT, BATCH, STEPS = 32768, 8, 256  # of the whole steps, of which there are fewer than STEPS
TUNED = [(tile, warps, stages) for tile in (32, 64, 128, 256) for warps in (4, 8) for stages in (2, 3, 4, 5)]


def main() -> None:
    torch.manual_seed(0)
    if "--tune" in sys.argv:
        return tune()
    rows = [row for batch in BATCHES for context in CONTEXTS for row in attention(batch, context)]
    result: dict[str, Any] = {"attention": rows}
    print(record.write("gpu_kv_cache", result), flush=True)
    torch.cuda.empty_cache()
    with torch.no_grad():
        result["decode"] = decode()
    print(record.write("gpu_kv_cache", result))
    return None


# ---- the attention alone


def attention(batch: int, context: int) -> Iterator[dict[str, Any]]:
    """Times of each dtype and of PyTorch at one size."""
    q = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16) * 2
    k, v = (torch.randn(batch, KV_HEADS, context, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    moved = {dtype: 2 * k.numel() * DTYPES[dtype].itemsize for dtype in DTYPES}
    for dtype in DTYPES:
        cache = filled(dtype, k, v)
        check(q, cache)
        yield row(f"ours, {dtype}", batch, context, partial(cache.attend, q), moved[dtype])
        del cache
    yield row("torch, bf16, gqa", batch, context, partial(sdpa, q, k, v), moved["bf16"])
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    yield row("torch, bf16, expanded", batch, context, partial(sdpa, q, k, v), moved["bf16"])


def row(name: str, batch: int, context: int, run: Callable[[], Tensor], moved: int) -> dict[str, Any]:
    """Microseconds of one way, beside a copy that moves the bytes of an unexpanded cache of its dtype."""
    ms, copy = replayed(run), copy_ms(moved)
    print(f"{name:24} batch {batch} context {context:6} {1e3 * ms:8.1f} us  {copy / ms:6.1%} of copy", flush=True)
    return {"way": name, "batch": batch, "context": context, "us": 1e3 * ms, "copy_us": 1e3 * copy, "share": copy / ms}


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def filled(dtype: str, k: Tensor, v: Tensor, room: int = 0) -> LayerKVCache:
    """A cache of these keys and values, its scales frozen."""
    batch, heads, context, dim = k.shape
    cache = LayerKVCache((batch, heads, context + room, dim), dtype, device=k.device)
    cache.append(k, v)
    cache.freeze()
    return cache


def check(q: Tensor, cache: LayerKVCache) -> None:
    """The kernel against PyTorch in float32 over the same bytes; a wrong one ends the benchmark."""
    found = cache.attend(q)[:1]
    held = (cache.keys[:1], cache.values[:1], cache.k_scale, cache.v_scale, cache.length)
    exact = widened_attention(q[:1].float(), *held, None, DIM**-0.5)
    assert decibels(exact, found) > 40, f"{cache.dtype}: {decibels(exact, found):.1f} dB"


def tune() -> None:
    """Times over sizes of tiles, the best first."""
    tiles = kernel.TILES
    for batch, context in ((8, 32768), (1, 32768), (8, 4096)):
        q = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, KV_HEADS, context, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for dtype in DTYPES:
            cache, found = filled(dtype, k, v), []
            size = cache.keys.element_size()
            before, copy = tiles[size], copy_ms(2 * k.numel() * size)
            for choice in TUNED:
                tiles[size] = choice
                try:
                    found.append((replayed(partial(cache.attend, q), calls=3, rounds=4), choice))
                except Exception as error:  # more shared memory than there is
                    print(choice, type(error).__name__)
            tiles[size] = before
            best = ", ".join(f"{choice} {1e3 * ms:.0f} us {copy / ms:.2f}" for ms, choice in sorted(found)[:5])
            print(f"batch {batch} context {context} {dtype}: {best}; now {before}", flush=True)


# ---- whole steps


class Layer:
    """The weights of a layer, and its halves before and after the attention, which all layers share compiled."""

    def __init__(self) -> None:
        self.norm1, self.norm2 = (torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.qkv, self.o = packed(WIDTH + 2 * KV_HEADS * DIM, WIDTH), packed(WIDTH, WIDTH)
        self.gate_up, self.down = packed(2 * MLP, WIDTH), packed(WIDTH, MLP)


Weight = tuple[Tensor, Tensor]  # data and scale


def weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).mul_(columns**-0.5)


def packed(rows: int, columns: int) -> Weight:
    q = quantize(weight(rows, columns), CHANNEL.weight)
    return q.data, q.scale


def linear(x: Tensor, w: Weight) -> Tensor:
    """[B, K] @ [N, K]^T, x scaled by token."""
    w_q = QTensor(*w, CHANNEL.weight.fmt, CHANNEL.weight.granularity)
    return scaled_mm(quantize(x, CHANNEL.inputs), w_q, fast_accumulation=True)


@torch.compile
def before_attention(x: Tensor, norm: Tensor, qkv: Weight, angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, 1, D], k and v [B, G, 1, D] of x [B, WIDTH], rotated by `angle` [D / 2]."""
    heads = linear(F.rms_norm(x, (WIDTH,), norm, 1e-5), qkv).view(x.shape[0], -1, 1, DIM)
    low, high = heads[:, : HEADS + KV_HEADS].float().chunk(2, 3)
    turned = torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), 3).bfloat16()
    return turned[:, :HEADS], turned[:, HEADS:], heads[:, HEADS + KV_HEADS :]


@torch.compile
def after_attention(x: Tensor, y: Tensor, o: Weight, norm: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    x = x + linear(y.flatten(1), o)
    gate, up = linear(F.rms_norm(x, (WIDTH,), norm, 1e-5), gate_up).chunk(2, 1)
    return x + linear(F.silu(gate) * up, down)


class Model:
    """Llama-3-8B's shape; a step reads the last tokens and leaves the next ones in `token`."""

    def __init__(self) -> None:
        self.layers = [Layer() for _ in range(LAYERS)]
        self.norm = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
        self.embedding, self.head = weight(VOCABULARY, WIDTH).mul_(WIDTH**0.5), weight(VOCABULARY, WIDTH)
        self.frequency = 5e5 ** -(torch.arange(0, DIM, 2, device="cuda").float() / DIM)

    def step(self, token: Tensor, caches: list[LayerKVCache], attend: Callable[..., Tensor]) -> Tensor:
        """Logits [B, V] of the tokens [B] that come next in `caches`."""
        x, angle = self.embedding[token], caches[0].length * self.frequency
        for layer, cache in zip(self.layers, caches, strict=True):
            q, k, v = before_attention(x, layer.norm1, layer.qkv, angle)
            cache.append(k, v)
            x = after_attention(x, attend(cache, q), layer.o, layer.norm2, layer.gate_up, layer.down)
        return F.linear(F.rms_norm(x, (WIDTH,), self.norm, 1e-5), self.head)


def ours(cache: LayerKVCache, q: Tensor) -> Tensor:
    return cache.attend(q)


def torchs(cache: LayerKVCache, q: Tensor) -> Tensor:
    """PyTorch's attention over a context that never changes: no mask, as is fastest for it."""
    return sdpa(q, cache.keys[:, :, :CONTEXT], cache.values[:, :, :CONTEXT])


MODES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    CACHE_TORCH: ("bf16", torchs),
    CACHE_BF16: ("bf16", ours),
    CACHE_FP8: ("fp8", ours),
}


def decode() -> dict[str, Any]:
    """Steps of each mode as CUDA graphs, interleaved, after their logits are compared."""
    caches = fill()
    model = Model()
    token = torch.randint(VOCABULARY, (BATCH,), device="cuda")
    logits = {name: model.step(token, caches[kind], attend).clone() for name, (kind, attend) in MODES.items()}
    exact = logits[CACHE_BF16]
    found = {name: decibels(exact, y) for name, y in logits.items() if y is not exact}
    print("dB against a BF16 cache, ours:", found, flush=True)
    assert all(db > 10 for db in found.values()), found  # NaN is not
    graphs = {name: capture(model, token, caches[kind], attend) for name, (kind, attend) in MODES.items()}
    times = interleaved(graphs, rounds=8, repeat=4, warmup=2)
    assert all(int(kept[0].length) <= CONTEXT + STEPS for kept in caches.values()), "the caches overflowed"
    modes = []
    base = summary(times[CACHE_BF16])["median"]
    for name, each in times.items():
        s = summary(each)
        modes.append({"mode": name, **s, "tokens_per_second": 1e3 * BATCH / s["median"], "ratio": base / s["median"]})
        print(f"{name:32} {s['median']:7.2f} ms  {1e3 * BATCH / s['median']:7.0f} tokens/s", flush=True)
    sizes = {kind: sum(cache.nbytes for cache in kept) for kind, kept in caches.items()}
    return {"batch": BATCH, "context": CONTEXT, "layers": LAYERS, "modes": modes, "sqnr": found, "bytes": sizes}


def fill() -> dict[str, list[LayerKVCache]]:
    """Caches of each dtype, of the same random keys and values."""
    caches: dict[str, list[LayerKVCache]] = {"bf16": [], "fp8": []}
    for _ in range(LAYERS):
        torch.cuda.empty_cache()  # 52 GB of 80 are caches: what is held for reuse would be missing
        shape = (BATCH, KV_HEADS, CONTEXT, DIM)
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for dtype, kept in caches.items():
            kept.append(filled(dtype, k, v, STEPS))
    return caches


def capture(model: Model, token: Tensor, caches: list[LayerKVCache], attend: Callable[..., Tensor]) -> Captured:
    """A step as a CUDA graph, which chooses the likeliest tokens as the next ones."""
    token = token.clone()
    return Captured(lambda: token.copy_(model.step(token, caches, attend).argmax(1)))


if __name__ == "__main__":
    main()
