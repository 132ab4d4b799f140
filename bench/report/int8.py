"""The table of docs/performance.md on INT8."""

from bench.report.tables import MISSING, Result, machine, markdown, pivot

WAYS = ("bf16", "channel", "int8", "int8 GEMM", "torch._int_mm")


def int8(results: dict[str, Result]) -> str:
    """The speed of each way as a multiple of BF16's, and microseconds."""
    result = results.get("gpu_int8")
    if result is None:
        return "Not measured yet: `python -m bench.gpu.int8` measures it on one NVIDIA GPU."
    cells = []
    for row in result["rows"]:
        place, us = f"{row['layer']}, {row['m']:,} rows", row["us"]
        cells += [
            (place, way, (f"{us['bf16'] / us[way]:.2f}x, " if way != "bf16" else "") + f"{us[way]:.1f} us")
            if way in us
            else (place, way, MISSING)
            for way in WAYS
        ]
    return "\n\n".join([markdown(pivot("layer", cells)), machine(result)])
