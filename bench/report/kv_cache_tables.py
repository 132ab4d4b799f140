"""The section of docs/performance.md on decoding with quantized keys and values, from what `gpu_kv_cache` wrote."""

from __future__ import annotations

from bench.report.aims import STEP_BF16, Result
from bench.report.tables import grid


def kv_cache(result: Result) -> list[str]:
    """The attention by context, and whole steps where they were measured."""
    rows = result["attention"]
    places = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    cells = {(row["way"], row["batch"], row["context"]): f"{row['us']:.1f} us, {row['share']:.2f}" for row in rows}
    head = "| way | " + " | ".join(f"batch {batch}, {context:,} tokens" for batch, context in places) + " |"
    parts = [
        "## Keys and values in eight bits",
        "Attention of one token a sequence, 32 query and 8 key heads of 128: microseconds, and the share of the "
        "bandwidth of a copy that moves as many bytes as the cache has (of an expanded one: before it is expanded). "
        "What the L2 cache holds is read again for nothing, so that small ones may pass 1.",
        grid(head, ([way, *(cells.get((way, *place), "") for place in places)] for way in ways)),
    ]
    return parts + (steps(result["decode"]) if "decode" in result else [])


def steps(decode: Result) -> list[str]:
    """Milliseconds and tokens a second of a whole step."""
    sizes = ", ".join(f"{kind} {size / 1e9:.1f} GB" for kind, size in decode["bytes"].items())
    words = (
        f"Whole steps of {decode['layers']} layers of Llama-3-8B's shape, batch {decode['batch']}, a context of "
        f"{decode['context']:,} tokens, FP8 weights, each step a CUDA graph. The caches: {sizes}. Decibels of the "
        "logits are against a BF16 cache, ours; keys and values are random."
    )
    head = "| mode | ms | quartiles | tokens a second | speed of a BF16 cache, ours | dB |"
    rows = (
        [
            mode["mode"],
            f"{mode['median']:.2f}",
            f"{mode['low']:.2f} to {mode['high']:.2f}",
            f"{mode['tokens_per_second']:.0f}",
            f"{mode['ratio']:.3f}x",
            "–" if mode["mode"] == STEP_BF16 else f"{decode['sqnr'][mode['mode']]:.1f}",
        ]
        for mode in decode["modes"]
    )
    return [words, grid(head, rows)]
