"""Decoding with keys and values in BF16, E4M3 and INT8, at Llama-3-8B's shape with random weights.

First the attention alone, over contexts and batches, beside a copy of as many bytes as the cache has, and beside
PyTorch's attention over BF16, which reads the cache unchanged (gqa) or expanded to the heads of the queries. Each
result is compared with PyTorch's attention in float32 over the same bytes. Then whole steps of a packed model of 32
layers with batch 8 and a context of 32,768 tokens, as CUDA graphs. All caches hold the same random tokens.

    python -m bench.gpu.kv_cache [--tune]       --tune times the attention over tile sizes instead, and writes nothing
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.gpu import llama
from bench.gpu import serve_models as models
from bench.gpu.kernels import copy_ms
from bench.gpu.modes import CACHE_BF16, CACHE_FP8, CACHE_TORCH
from bench.gpu.timing import Captured, against, decibels, interleaved, replayed, summary
from octavo.kv_cache.layer import DTYPES, LayerKVCache
from octavo.ops.attention.reference import widened_attention
from octavo.ops.attention.tiles import TILES, Tile, choose_tile
from octavo.runtime.fused import fuse

HEADS, KV_HEADS, DIM = llama.CONFIG.heads, llama.CONFIG.kv_heads, llama.CONFIG.head_dim
CONTEXTS, BATCHES = (2048, 4096, 8192, 16384, 32768), (1, 8)
CONTEXT, BATCH = 32768, 8  # of the whole steps
TUNED = [Tile(tile, warps, stages) for tile in (32, 64, 128, 256) for warps in (4, 8) for stages in (2, 3, 4, 5)]


def main() -> None:
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    if "--tune" in sys.argv:
        tune()
        return
    rows = [row for batch in BATCHES for context in CONTEXTS for row in attention(batch, context)]
    result: dict[str, Any] = {"attention": rows}
    print(record.write("gpu_kv_cache", result), flush=True)
    torch.cuda.empty_cache()
    result["decode"] = decode()
    print(record.write("gpu_kv_cache", result))


# --- The attention alone -----------------------------------------------------------------------------------------


def attention(batch: int, context: int) -> Iterator[dict[str, Any]]:
    """Times of each dtype and of PyTorch at one size."""
    q = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16) * 2
    k, v = (torch.randn(batch, KV_HEADS, context, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    moved = {dtype: 2 * k.numel() * DTYPES[dtype].itemsize for dtype in DTYPES}
    for dtype in DTYPES:
        cache = models.filled(dtype, k, v)
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


def check(q: Tensor, cache: LayerKVCache) -> None:
    """The kernel against PyTorch in float32 over the same bytes; a wrong one ends the benchmark."""
    found = cache.attend(q)[:1]
    held = (cache.keys[:1], cache.values[:1], cache.k_scale, cache.v_scale, cache.length)
    exact = widened_attention(q[:1].float(), *held, None, DIM**-0.5)
    assert decibels(exact, found) > 40, f"{cache.dtype}: {decibels(exact, found):.1f} dB"


def tune() -> None:
    """Times over sizes of tiles, the best first."""
    for batch, context in ((8, 32768), (1, 32768), (8, 4096)):
        q = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, KV_HEADS, context, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for dtype in DTYPES:
            cache, found = models.filled(dtype, k, v), []
            size = cache.keys.element_size()
            before, copy = TILES[size], copy_ms(2 * k.numel() * size)
            for choice in TUNED:
                TILES[size] = (choice,)
                choose_tile.cache_clear()
                try:
                    found.append((replayed(partial(cache.attend, q), calls=3, rounds=4), tuple(choice)))
                except Exception as error:  # more shared memory than there is
                    print(choice, type(error).__name__)
            TILES[size] = before
            choose_tile.cache_clear()
            best = ", ".join(f"{choice} {1e3 * ms:.0f} us {copy / ms:.2f}" for ms, choice in sorted(found)[:5])
            print(f"batch {batch} context {context} {dtype}: {best}; now {tuple(before[0])}", flush=True)


# --- Whole steps -----------------------------------------------------------------------------------------------


def decode(layers: int = llama.CONFIG.layers) -> dict[str, Any]:
    """Steps of each mode as CUDA graphs, which take turns, after their logits are compared."""
    wide = models.build_bf16(replace(llama.CONFIG, layers=layers), "cuda")
    model = models.build_fp8(wide, "cuda")
    del wide
    torch.cuda.empty_cache()  # the caches below take 52 GB
    fuse(model)
    models.compile_layers(model)
    ids = torch.randint(0, model.config.vocab_size, (BATCH, 1), device="cuda")
    stores = models.random_stores(model.config, BATCH, CONTEXT, "cuda", "bf16", "fp8")
    plain = [models.PlainCache(store) for store in stores["bf16"]]
    steps = {CACHE_TORCH: Captured(partial(models.forward, model, ids, CONTEXT - 1, plain))}
    for name, dtype in ((CACHE_BF16, "bf16"), (CACHE_FP8, "fp8")):
        caches = models.octavo_caches(model, stores[dtype])
        steps[name] = Captured(partial(models.forward_again, model, ids, CONTEXT - 1, caches))
    quality = against(CACHE_BF16, steps)
    print("dB against our attention over a BF16 cache:", quality, flush=True)
    times = {name: summary(found) for name, found in interleaved(steps, rounds=8, repeat=4, warmup=2).items()}
    base = times[CACHE_BF16]["median"]
    modes = []
    for name, found in times.items():
        speed = {"tokens_per_second": 1e3 * BATCH / found["median"], "ratio": base / found["median"]}
        modes.append({"mode": name, **found, **speed})
        print(f"{name:32} {found['median']:7.2f} ms  {speed['tokens_per_second']:7.0f} tokens/s", flush=True)
    sizes = {dtype: sum(store.nbytes for store in each) for dtype, each in stores.items()}
    return {"batch": BATCH, "context": CONTEXT, "layers": layers, "modes": modes, "sqnr": quality, "bytes": sizes}


if __name__ == "__main__":
    main()
