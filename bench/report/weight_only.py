"""The tables of docs/performance.md on FP8 weights with BF16 inputs."""

from bench.gpu.modes import BASE
from bench.report.tables import MISSING, Result, Row, details, machine, markdown, number, pivot, times, timing


def weight_only(results: dict[str, Result]) -> str:
    """The decoding step, and the speed of the GEMMs."""
    result = results.get("gpu_weight_only")
    if result is None:
        return "Not measured yet: `python -m bench.gpu.weight_only` measures it on one Hopper GPU."
    step = result["decode"]
    base = step["ms"][BASE]["median"]
    rows = [
        {
            "decode": mode, **timing(ms), "vs BF16": times(base, ms["median"]),
            "SQNR of the logits, dB": number(step["sqnr"].get(mode), "{:.1f}"),
        }
        for mode, ms in sorted(step["ms"].items(), key=lambda item: -item[1]["median"])
    ]  # fmt: skip
    summary = "The GEMMs alone: the speed as a multiple of BF16's, and microseconds"
    words = (
        f"One text, {step['context']:,} tokens in the cache, {result['layers']} layers. Each mode is one CUDA graph."
    )
    return "\n\n".join([words, markdown(rows), details(summary, markdown(gemms(result))), machine(result)])


def gemms(result: Result) -> list[Row]:
    """The speed of each way, by rows and shape."""
    return pivot("M, N x K", (cell for row in result["gemms"] for cell in _cells(row)))


def _cells(row: Result) -> list[tuple[str, str, str]]:
    place, us = f"{row['m']:,}, {row['n']:,} x {row['k']:,}", row["us"]
    cells = [(place, "bf16", f"{us['bf16']:.1f} us")]
    cells += [(place, way, f"{us['bf16'] / t:.2f}x, {t:.1f} us") for way, t in us.items() if way != "bf16"]
    return [*cells, (place, "chosen", row.get("runs", MISSING))]
