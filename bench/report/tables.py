"""Writes docs/accuracy.md from the result files: no number there is typed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]  # of the benchmarks
TARGET = ROOT.parent / "docs" / "accuracy.md"


def main() -> None:
    TARGET.write_text(document())


def document() -> str:
    """The text of docs/accuracy.md."""
    loss, step = (json.loads((ROOT / "results" / f"{name}.json").read_text()) for name in ("loss_gap", "cpu_step"))
    quality = ROOT / "results" / "packing_quality.json"
    packed = packings(json.loads(quality.read_text())) if quality.exists() else []
    caches = ROOT / "results" / "kv_cache_quality.json"
    packed += caching(json.loads(caches.read_text())) if caches.exists() else []
    return "\n\n".join(["# Accuracy and cost on a CPU", INTRODUCTION, *losses(loss), *packed, *steps(step)]) + "\n"


INTRODUCTION = """Written by `bench/report/tables.py` from `bench/results/`; measure again with `make bench-cpu`.
The model is the demo's: a Llama of 3 million parameters on the text of Python's standard library, byte by byte."""


def losses(result: dict[str, Any]) -> list[str]:
    rows = [
        "| seed | BF16 loss | FP8 (rowwise) loss | gap | packed model | its weights, of BF16 |",
        "|---|---|---|---|---|---|",
    ]
    final = {(run["recipe"], run["seed"]): run["final"] for run in result["runs"]}
    for seed, (gap, packed) in enumerate(zip(result["gaps"], result["packed"], strict=True)):
        rows.append(
            f"| {seed} | {final['bf16', seed]:.4f} | {final['rowwise', seed]:.4f} | {gap:+.2%} "
            f"| {packed['loss']:.4f} ({packed['to_trained']:+.2%}) | {packed['bytes_to_bf16']:.3f} |"
        )
    verdict = (
        f"Mean gap {result['mean_gap']:+.2%}; the BF16 seeds lie {result['bf16_spread']:.2%} apart "
        f"(largest less smallest, over their mean). {machine(result)}"
    )
    return ["## Loss at the end of training", "\n".join(rows), verdict]


def packings(result: dict[str, Any]) -> list[str]:
    rows = [packing(name, row) for name, row in result["schemes"].items()]
    rows.append(packing("INT8, channel and token", result["int8"]))
    head = (
        "| scheme | perplexity, of BF16 | 95 % | KL, nats a token | top-1 | output SQNR, least | bytes, of BF16 "
        "| transformers' logits |"
    )
    words = (
        "A run in BF16 (its MLP is 768 wide, a multiple of 128, which the scheme `block` needs), packed, "
        f"on {result['prompts']} prompts of held-out text ({result['tokens']:,} tokens; "
        f"perplexity of BF16 {result['perplexity']['value']:.3f}), by `octavo verify` ([verify.md](verify.md)). "
        "Intervals over prompts, paired. The last column is how far transformers' logits are from the bytes' own, as "
        "a part of their size."
    )
    return ["## What packing costs", grid(head, rows), f"{words} {machine(result)}"]


def packing(name: str, row: dict[str, Any]) -> list[str]:
    """A line of the table; of INT8, which is no folder, some is not known."""
    ratio, least, reader = row["perplexity_ratio"], row.get("output_sqnr", {}).get("least"), row.get("readers", {})
    return [
        name,
        f"{ratio['value']:+.3%}",
        f"{ratio['low']:+.3%} to {ratio['high']:+.3%}",
        f"{row['kl']['value']:.2e}",
        f"{row['top1']['value']:.2%}",
        number(least, "{:.1f} dB"),
        number(row.get("bytes_to_bf16"), "{:.3f}"),
        number(reader.get("transformers", {}).get("distance"), "{:.2e}"),
    ]


def caching(result: dict[str, Any]) -> list[str]:
    rows = [packing(name, row)[:5] for name, row in result["caches"].items()]
    head = "| cache, its scales | perplexity, of a BF16 cache's | 95 % | KL, nats a token | top-1 |"
    first = next(iter(result["caches"].values()))
    words = (
        f"The same run, packed by channel, on {first['prompts']} prompts ({first['tokens']:,} tokens) that pass it in "
        f"chunks of {result['chunk']} tokens, so that all others attend to what the cache holds. Scales are of a "
        "calibration, or of each prompt's first chunk."
    )
    return ["## What keys and values in eight bits cost", grid(head, rows), f"{words} {machine(result)}"]


def steps(result: dict[str, Any]) -> list[str]:
    rows = ["| recipe | high precision | ms a step | of BF16 | of FP32 |", "|---|---|---|---|---|"]
    for row in result["steps"]:
        rows.append(
            f"| {row['recipe']} | {row['precision']} | {row['milliseconds']:.0f} "
            f"| {row['to_bf16']:.2f} | {row['to_fp32']:.2f} |"
        )
    words = (
        "Medians of interleaved steps in one process. Emulation is exact, so that it can be studied; it is never fast."
    )
    return ["## A training step, emulated", "\n".join(rows), f"{words} {machine(result)}"]


def machine(result: dict[str, Any]) -> str:
    """The line that says where, with what and when a result was measured; of what its record knows."""
    facts = result["machine"]
    named = [("{}", "gpu"), ("{}", "processor"), ("{} threads", "threads"), ("torch {}", "torch")]
    named += [("Triton {}", "triton"), ("torchao {}", "torchao"), ("Python {}", "python"), ("commit {}", "commit")]
    named += [("{}", "measured")]
    return ", ".join(form.format(facts[key]) for form, key in named if facts.get(key)) + "."


def grid(head: str, rows: Iterable[Sequence[str]]) -> str:
    """A table; `head` is its first line."""
    rule = "|---" * (head.count("|") - 1) + "|"
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def details(summary: str, body: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"


def number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


if __name__ == "__main__":
    main()
