"""The section of docs/performance.md on serving; `gpu_tables.py` writes the document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.report.aims import BASE, DECODES, SERVE_CACHE, Result
from bench.report.tables import details, grid, number


def serve(result: Result) -> list[str]:
    """The section; a part that was not measured is left out."""
    parts = [
        "## Serving",
        f"Llama-3-8B's shape, {result['layers']} layers, random weights, transformers' model: in BF16, and packed by "
        "channel and fused (`octavo.load`). Layers are compiled, all variants take turns in one process. Decode is a "
        "token of each text where the cache, in BF16, is full with it, as CUDA graphs.",
    ]
    if "prefill" in result:
        words = f"Prefill of {result['prefill']['tokens']} tokens, to the logits of the last:"
        parts += [words, grid("| prefill | ms | quartiles | of BF16 | dB of logits |", rows(result["prefill"]))]
    for name in DECODES:
        if name in result:
            found = result[name]
            words = f"Decode of {found['batch']} at a context of {found['context']}; FP8 GEMMs run on {found['gemm']}"
            if SERVE_CACHE in found["ms"]:
                words += f"; of {SERVE_CACHE!r}, keys and values lie in E4M3 and are read as they lie"
            parts += [f"{words}:", grid("| decode | ms a token | quartiles | of BF16 | dB of logits |", rows(found))]
    if "kernels" in result:
        parts.append(
            details(
                "The GEMM of few rows alone: microseconds, and its share of the speed of a copy of as many bytes",
                grid(
                    "| rows | n x k | ours | share | cuBLASLt | BF16 | the door takes |", kernel_rows(result["kernels"])
                ),
            )
        )
    return parts


def rows(found: Result) -> Iterable[list[str]]:
    base = found["ms"][BASE]["median"]
    for name, ms in found["ms"].items():
        yield [
            name,
            f"{ms['median']:.2f}",
            f"{ms['low']:.2f} to {ms['high']:.2f}",
            f"{base / ms['median']:.3f}x",
            number(found["sqnr"].get(name), "{:.1f}"),
        ]


def kernel_rows(found: list[Any]) -> Iterable[list[str]]:
    for row in found:
        yield [
            str(row["m"]),
            f"{row['n']} x {row['k']}",
            f"{row['us']:.1f}",
            f"{row['share']:.2f}",
            f"{row['cublaslt_us']:.1f}",
            f"{row['bf16_us']:.1f}",
            row["runs"],
        ]
