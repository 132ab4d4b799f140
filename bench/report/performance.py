"""The tables of docs/performance.md: rows from the results of the GPU benchmarks."""

import statistics
from collections.abc import Iterable
from functools import partial
from importlib.resources import files
from typing import Any

from bench.gpu.modes import BASE, CACHE_BF16, FUSED, speedup
from bench.report.tables import Result, Row, details, markdown, number, pivot, ratio, times, timing
from octavo.nn.speedup.lookup import SHIPPED
from octavo.nn.speedup.table import Table

COPY_SHARE = 0.85  # of a copy's bandwidth: what a kernel aims at
ONLY_IF_FASTER = 0.98  # of BF16's speed: what a layer aims at that is converted only if FP8 is faster

Rows = Iterable[Row]


# --- The layer stack -------------------------------------------------------------------------------------------


def stack_modes(results: dict[str, Result]) -> Rows:
    stack = results["gpu_stack"]
    ms, peaks = by_mode(stack["modes"], "median"), by_mode(stack["modes"], "peak_gb")
    for row in stack["modes"]:
        mode = row["mode"]
        yield {
            "mode": mode,
            **timing(row),
            "vs BF16": f"{row['ratio']:.3f}x",
            "vs best torchao": times(best_torchao(ms), ms[mode]),
            "peak GB": number(peaks.get(mode), "{:.2f}"),
            "peak vs BF16": number(ratio(peaks.get(mode), peaks.get(BASE)), "{:.3f}"),
            "x floor": f"{row['median'] / stack['floors']['cast']['total']:.3f}",
            "SQNR of output, input's gradient": ", ".join(f"{db:.1f} dB" for db in stack["sqnr"].get(mode, [])) or "–",
        }


def by_mode(rows: list[Result], key: str) -> dict[str, float]:
    """One figure of each mode that has it."""
    return {row["mode"]: row[key] for row in rows if row[key] is not None}


def best_torchao(by_mode: dict[str, float]) -> float | None:
    """The least figure of torchao's modes."""
    return min((value for mode, value in by_mode.items() if mode.startswith("torchao")), default=None)


def stack_split(results: dict[str, Result]) -> Rows:
    """GEMM, attention and the rest, of the profiled modes and of the floors."""
    stack = results["gpu_stack"]
    floors = {"floor, weights cast": stack["floors"]["cast"], "floor, weights cached": stack["floors"]["kept"]}
    for name, parts in {**stack["profiles"], **floors}.items():
        ms = {"GEMM": parts["gemm"], "attention": parts["attention"], "rest": parts["rest"]}
        yield {"": name, **{part: f"{value:.2f}" for part, value in ms.items()}, "sum": f"{sum(ms.values()):.2f}"}


def stack_warning(results: dict[str, Result]) -> str:
    """A warning where a part of the fused mode is faster than its floor; else nothing."""
    floor, profile = results["gpu_stack"]["floors"]["cast"], results["gpu_stack"]["profiles"][FUSED]
    parts = [
        f"{part} ({profile[part]:.2f} ms, floor {floor[part]:.2f})"
        for part in ("gemm", "attention", "rest")
        if profile[part] < floor[part]
    ]
    words = "The ceiling was measured too low there, and the true floor of the step lies lower."
    return f"Faster than its floor in {FUSED}: {', '.join(parts)}. {words}" if parts else ""


def stack_kernels(results: dict[str, Result], count: int = 10, width: int = 90) -> str:
    """The longest kernels of each profiled mode."""

    def rows(kernels: list[Any]) -> Rows:
        for name, calls, ms in kernels[:count]:
            kernel = f"`{name[:width]}`".replace("|", r"\|")
            yield {"kernel": kernel, "calls a step": str(calls), "ms a step": f"{ms:.3f}"}

    profiles = results["gpu_stack"]["profiles"].items()
    return "\n\n".join(
        details(f"The {count} longest kernels: {mode}", markdown(rows(parts["kernels"]))) for mode, parts in profiles
    )


# --- Kernels, ceilings, one layer ------------------------------------------------------------------------------


def kernels(results: dict[str, Result]) -> Rows:
    return pivot("kernel", (kernel_cell(row) for row in results["gpu_kernels"]["kernels"]))


def kernel_cell(row: Result) -> tuple[str, str, str]:
    return row["kernel"], shape(row), f"{row['us']:.1f} us, {row['share']:.2f}, {row['bytes'] / 1e6:.0f} MB"


def shape(row: Result) -> str:
    return " x ".join(map(str, row["shape"]))


def kernels_below(results: dict[str, Result]) -> str:
    rows = results["gpu_kernels"]["kernels"]
    slow = [row for row in rows if row["share"] < COPY_SHARE]
    names = ", ".join(f"{row['kernel']} at {shape(row)} ({row['share']:.2f})" for row in slow)
    return f"{len(rows) - len(slow)} of {len(rows)} reach {COPY_SHARE} of a copy. Below it: {names or 'none'}."


def gemm_rates(results: dict[str, Result]) -> Rows:
    for row in results["gpu_ceilings"]["gemm"]:
        rates = {way: f"{rate:.0f}" for way, rate in row["tflops"].items()}
        yield {"GEMM": f"{row['layer']}, {row['gemm']}", "m x n x k": shape(row), **rates}


def accumulation(results: dict[str, Result]) -> Rows:
    columns = [(of, way) for of in ("gemm", "whole") for way in ("fast", "promoted")]
    names = {"gemm": "GEMM", "whole": "with quantization"}
    for row in results["gpu_ceilings"]["accumulation"]:
        errors = {f"{names[of]}, {way}": f"{row[way][of]:.1f}" for of, way in columns}
        yield {"data": row["data"], "k": str(row["k"]), **errors}


def layer_ranges(results: dict[str, Result]) -> Rows:
    cells = results["gpu_layer"]["cells"]
    for mode in dict.fromkeys(mode for cell in cells for mode in cell["rounds"] if mode != "bf16"):
        found = layer_speedups(cells, mode, "bf16")
        figures = {"least": min(found), "median": statistics.median(found), "most": max(found)}
        yield {"vs BF16": mode, **{name: f"{value:.3f}x" for name, value in figures.items()}}


def layer_speedups(cells: list[Result], mode: str, other: str) -> list[float]:
    """The speed of `mode` as a multiple of that of `other`, in each cell that has both."""
    return [speedup(cell, mode, other) for cell in cells if {mode, other} <= cell["rounds"].keys()]


def layer_counts(results: dict[str, Result]) -> str:
    cells = results["gpu_layer"]["cells"]
    torchao, guarded = layer_speedups(cells, "ours", "torchao"), layer_speedups(cells, "ours, only if faster", "bf16")
    return (
        f"{len(cells)} of {results['gpu_layer']['of']} cells are measured. Ours is slower than torchao in "
        f"{sum(gain < 1 for gain in torchao)} of {len(torchao)}; only if faster is below {ONLY_IF_FASTER}x BF16 in "
        f"{sum(gain < ONLY_IF_FASTER for gain in guarded)} of {len(guarded)}."
    )


def layer_cells(results: dict[str, Result]) -> Rows:
    for cell in sorted(results["gpu_layer"]["cells"], key=lambda cell: (cell["m"], cell["k"], cell["n"])):
        sizes = {name: str(cell[name.lower()]) for name in "MKN"}
        rounds = cell["rounds"]
        speeds = {mode: f"{speedup(cell, mode, 'bf16'):.3f}x" for mode in rounds if mode != "bf16"}
        yield {**sizes, "BF16 ms": f"{statistics.median(rounds['bf16']):.3f}", **speeds}


def layer_sizes(_: dict[str, Result]) -> str:
    """The table of speeds that the package ships, a folded table for each recipe."""
    grid = Table.from_json((files("octavo.nn.speedup") / SHIPPED["H100"]).read_text()).grid
    recipes: dict[str, list[tuple[str, str, str]]] = {}
    for row in sorted(grid, key=lambda row: (row.M, row.K, row.N)):
        cell = f"{row.M:,} x {row.K:,}", f"N = {row.N:,}", f"{row.speedup:.2f}x"
        recipes.setdefault(row.recipe, []).append(cell)
    return "\n\n".join(details(name, markdown(pivot("M x K", cells))) for name, cells in recipes.items())


# --- A GPT on text ---------------------------------------------------------------------------------------------


def parity_steps(results: dict[str, Result]) -> Rows:
    for row in (results["gpt_parity"]["step_times"] or {"steps": []})["steps"]:
        yield {
            "mode": row["mode"],
            "layers in FP8": str(row["converted"]),
            "ms a step": f"{row['milliseconds']:.1f}",
            "quartiles": " to ".join(f"{ms:.1f}" for ms in row["quartiles"]),
            "vs BF16": f"{1 / row['ratio']:.3f}x",
            "gradient error": number(row["gradient_error"], "{:.3f}"),
        }


# --- Serving ---------------------------------------------------------------------------------------------------


def serve(part: str, results: dict[str, Result]) -> Rows:
    """The table of "prefill", "decode 1" or "decode 64"."""
    found = results["gpu_serve"][part]
    for mode, ms in found["ms"].items():
        yield {
            part.split()[0]: mode,
            **timing(ms),
            "vs BF16": times(found["ms"][BASE]["median"], ms["median"]),
            "SQNR of the logits, dB": number(found["sqnr"].get(mode), "{:.1f}"),
        }


serve_prefill, serve_decode_1, serve_decode_64 = (partial(serve, part) for part in ("prefill", "decode 1", "decode 64"))


def serve_medians(results: dict[str, Result], part: str) -> dict[str, float]:
    return {mode: ms["median"] for mode, ms in results["gpu_serve"][part]["ms"].items()}


def serve_kernels(results: dict[str, Result]) -> Rows:
    for row in results["gpu_serve"]["kernels"]:
        yield {
            "M": str(row["m"]),
            "N x K": f"{row['n']} x {row['k']}",
            "ours": f"{row['us']:.1f}",
            "share of a copy": f"{row['share']:.2f}",
            "cuBLASLt": f"{row['cublaslt_us']:.1f}",
            "BF16": f"{row['bf16_us']:.1f}",
            "chosen kernel": row["runs"],
        }


def cache_attention(results: dict[str, Result]) -> Rows:
    rows = results["gpu_kv_cache"]["attention"]
    cells = ((f"batch {row['batch']}, {row['context']:,} tokens", row) for row in rows)
    return pivot("attention", ((row["way"], place, f"{row['us']:.1f} us, {row['share']:.2f}") for place, row in cells))


def cache_steps(results: dict[str, Result]) -> Rows:
    decode = results["gpu_kv_cache"]["decode"]
    for row in decode["modes"]:
        yield {
            "mode": row["mode"],
            **timing(row),
            "tokens a second": f"{row['tokens_per_second']:.0f}",
            f"vs {CACHE_BF16}": f"{row['ratio']:.3f}x",
            "SQNR of the logits, dB": number(decode["sqnr"].get(row["mode"]), "{:.1f}"),
        }
