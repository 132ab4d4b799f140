"""Writes docs/performance.md and its plots from the result files of the GPU benchmarks: no number there is typed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.report import aims, plots
from bench.report.aims import BASE, COPY_SHARE, HEAD, Result
from bench.report.kv_cache_tables import kv_cache
from bench.report.serve_tables import serve
from bench.report.tables import ROOT, details, grid, machine, number
from bench.report.training_tables import layer, parity

TARGET = ROOT.parent / "docs" / "performance.md"
BENCHMARKS = (  # and their results' names
    "gpu_stack",
    "gpu_kernels",
    "gpu_ceilings",
    "gpu_layer",
    "gpt_parity",
    "gpu_serve",
    "gpu_kv_cache",
)


def main() -> None:
    found = load(ROOT / "results")
    TARGET.write_text(document(found))
    for path in (TARGET, *plots.draw(found, TARGET.parent / TARGET.stem)):
        print(path)


def load(folder: Path) -> dict[str, Result]:
    """The results that are there, by the benchmark's name."""
    paths = {name: folder / f"{name}.json" for name in BENCHMARKS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def document(found: dict[str, Result]) -> str:
    """The text of docs/performance.md: a section for each result that was found."""
    parts = ["# Speed and memory on a GPU", INTRODUCTION]
    if absent := [f"`{name}`" for name in BENCHMARKS if name not in found]:
        parts.append(f"Not run yet, so without a section here: {', '.join(absent)}.")
    parts += ["## Aims", aims.table(found)]
    sections = {
        "gpu_stack": stack,
        "gpu_kernels": kernels,
        "gpu_ceilings": ceilings,
        "gpu_layer": layer,
        "gpt_parity": parity,
        "gpu_serve": serve,
        "gpu_kv_cache": kv_cache,
    }
    for name, section in sections.items():
        if name in found:
            parts += [*section(found[name]), machine(found[name])]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """Written by `bench/report/performance.py` from `bench/results/`. To measure again: `make bench` on
a GPU machine (`PYTHON=` names the python that has a CUDA build of torch; the tests marked gpu come first), then
`make docs`. The runs of the GPT are apart: `bench/gpu/gpt_parity.py` says how.
Where Transformer Engine is installed, the stack is timed with it too (`bench/gpu/transformer_engine.py`), and
`examples/direct_gemm.py` compares one GEMM through octavo.ops, torch and nvmath-python: no result of either is here.

Times are medians of steps that take turns in one process; a speed of 1.20x is 1.20 times as fast. A gigabyte is 10^9
bytes."""


# --- The layer stack -------------------------------------------------------------------------------------------


def stack(result: Result) -> list[str]:
    head = (
        "| mode | ms | quartiles | of BF16 | of the best torchao | peak GB | of BF16's | to the floor "
        "| dB of output, input's gradient |"
    )
    kept, floors = result["kept"], result["floors"]
    words = (
        f"With weights that are cast already, as in later micro-batches: {kept['ms'][HEAD]:.2f} ms where BF16 takes "
        f"{kept['ms'][BASE]:.2f}, {kept['ratio']:.3f}x, and {kept['ms'][HEAD] / floors['kept']['total']:.3f} times its "
        f"floor. The floors are {floors['cast']['total']:.2f} ms with the cast of the weights and "
        f"{floors['kept']['total']:.2f} without: the GEMMs and the attention at the rates of `gpu_ceilings`, and the "
        "bytes of all else, which is "
        f"{floors['cast']['gigabytes_a_layer']:.2f} and {floors['kept']['gigabytes_a_layer']:.2f} GB a layer, "
        "at the speed of a copy."
    )
    return [
        "## The layer stack",
        "Four layers of Llama-3-8B's shape, 8192 tokens, forward and backward. *Fused* is our model's blocks, *plain* "
        "the same in plain modules; both by `octavo.convert`. Decibels are against BF16, compile.",
        grid(head, mode_rows(result)),
        "![Milliseconds of a step by mode](performance/stack.svg)",
        words,
        "Where the time goes, in milliseconds a step of the device, under the profiler:",
        grid("| | GEMM | attention | rest | sum |", split_rows(result)),
        *below_floor(result),
        *(longest(name, profile["kernels"]) for name, profile in result["profiles"].items()),
    ]


def mode_rows(result: Result) -> Iterable[list[str]]:
    ms, peaks = aims.medians(result), aims.peak_memory(result)
    torchao, floor = aims.best_torchao(ms), result["floors"]["cast"]["total"]
    for row in result["modes"]:
        mode = row["mode"]
        yield [
            mode,
            f"{row['median']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['ratio']:.3f}x",
            number(aims.ratio(torchao, ms[mode]), "{:.3f}x"),
            number(peaks.get(mode), "{:.2f}"),
            number(aims.ratio(peaks.get(mode), peaks.get(BASE)), "{:.3f}"),
            f"{row['median'] / floor:.3f}",
            ", ".join(f"{db:.1f}" for db in result["sqnr"].get(mode, [])) or "–",
        ]


def split_rows(result: Result) -> Iterable[list[str]]:
    """GEMM, attention and the rest of the profiled modes, and of the floors."""
    floors = {"floor, weights cast": result["floors"]["cast"], "floor, weights kept": result["floors"]["kept"]}
    for name, parts in {**result["profiles"], **floors}.items():
        values = [parts[part] for part in ("gemm", "attention", "rest")]
        yield [name, *(f"{value:.2f}" for value in (*values, sum(values)))]


def below_floor(result: Result) -> list[str]:
    """A word of warning where the floor is none: the fused mode spends less on a part than the ceilings allow."""
    floor, profile = result["floors"]["cast"], result["profiles"][HEAD]
    parts = [
        f"{part} ({profile[part]:.2f} ms, floor {floor[part]:.2f})"
        for part in ("gemm", "attention", "rest")
        if profile[part] < floor[part]
    ]
    if not parts:
        return []
    return [
        f"Below its floor in {HEAD}: {', '.join(parts)}. That ceiling was measured too low, and the true floor of the "
        "step lies lower."
    ]


def longest(mode: str, found: list[Any], count: int = 10, width: int = 90) -> str:
    """The kernels of a mode that take the most time."""
    rows = [[f"`{name[:width]}`".replace("|", r"\|"), str(calls), f"{ms:.3f}"] for name, calls, ms in found[:count]]
    return details(f"The {len(rows)} longest kernels: {mode}", grid("| kernel | calls a step | ms a step |", rows))


# --- Kernels and ceilings --------------------------------------------------------------------------------------


def kernels(result: Result) -> list[str]:
    rows = result["kernels"]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    found = {(row["kernel"], tuple(row["shape"])): row for row in rows}
    head = "| kernel | " + " | ".join(f"{' x '.join(map(str, shape))}" for shape in shapes) + " |"
    table = [
        [name, *(kernel_cell(found.get((name, shape))) for shape in shapes)]
        for name in dict.fromkeys(row["kernel"] for row in rows)
    ]
    slow = [row for row in rows if row["share"] < COPY_SHARE]
    names = (f"{row['kernel']} at {' x '.join(map(str, row['shape']))} ({row['share']:.2f})" for row in slow)
    verdict = f"{len(rows) - len(slow)} of {len(rows)} are at or above {COPY_SHARE} of a copy."
    return [
        "## Kernels against a copy",
        "Microseconds, and the share of the bandwidth of a copy that moves as many bytes as the kernel must, in the "
        "same run. What the cache holds is read again for nothing, so that a share may pass 1.",
        grid(head, table),
        f"{verdict} Below it: {', '.join(names)}." if slow else verdict,
    ]


def kernel_cell(row: Result | None) -> str:
    if row is None:
        return ""
    moved = f", {row['bytes'] / 1e6:.0f} MB" if "bytes" in row else ""
    return f"{row['us']:.1f} us, {row['share']:.2f}{moved}"


def ceilings(result: Result) -> list[str]:
    kinds = list(dict.fromkeys(kind for row in result["gemm"] for kind in row["tflops"]))
    rows = [
        [f"{row['layer']}, {row['gemm']}", " x ".join(map(str, row["shape"]))]
        + [number(row["tflops"].get(kind), "{:.0f}") for kind in kinds]
        for row in result["gemm"]
    ]
    errors = [
        [row["data"], str(row["k"])]
        + [f"{row[way][of]:.1f}" for of in ("gemm", "whole") for way in ("fast", "promoted")]
        for row in result["accumulation"]
    ]
    head = "| data | k | GEMM, fast | GEMM, promoted | whole, fast | whole, promoted |"
    return [
        "## GEMM ceilings",
        "TFLOP/s of the stack's GEMMs, [m, k] by [n, k]; *fast* is the tensor core's fast accumulation. A copy reads "
        f"and writes {result['copy']:.2f} TB/s; causal attention, forward and backward, 32 query and 8 key heads of "
        f"128, 8192 tokens, takes {result['attention_ms']:.2f} ms.",
        grid("| GEMM | m x n x k | " + " | ".join(kinds) + " |", rows),
        details(
            "What the way to accumulate costs: dB against float64, of the GEMM on the same operands and of the whole",
            grid(head, errors),
        ),
    ]


if __name__ == "__main__":
    main()
