"""The measured speeds that the package ships: of packing schemes, of attention in FP8, and of experts."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from bench.gpu.modes import speedup
from bench.report.filler import Result, Row, Rows
from bench.report.performance import EXPERTS, fastest_bf16, scheme_speeds

PACKAGE = Path(__file__).parents[2] / "src" / "octavo"
# The schemes of the ways of other results. The first adds tokens to those of gpu_schemes. The second has the kernel of
# INT8 as it is now; its calls of 512 rows wait for the host.
MORE = {"bf16": "bf16", "w8a8": "channel", "weight-only": "weight"}
NEWER, HOST_BOUND = {"bf16": "bf16", "int8": "int8"}, 512
PLANNED = {  # what a plan asks of attention: the pass and the mode that answer it
    "forward": ("forward", "ours"),
    "forward from an FP8 KV cache": ("forward", "ours, FP8 KV cache"),
    "forward and backward": ("both", "ours"),
}
# The ways of accumulating of y, dx and dw of experts.
PASSES = {"bf16": ("y, bf16", "dx, bf16", "dw, bf16"), "rowwise": ("y, fast", "dx, fast", "dw, promoted")}


def tables(results: dict[str, Result]) -> dict[str, str]:
    """The text of each file, by its path in the package."""
    return {
        "rates/scheme_speeds.json": schemes(results),
        "rates/attention_speeds.json": attention(results["gpu_attention"]),
        "rates/expert_rates.json": expert_rates(results["gpu_moe"]),
        "rates/expert_speeds.json": expert_speeds(results["gpu_packed_experts"]),
    }


def write(results: dict[str, Result]) -> None:
    for name, table in tables(results).items():
        (PACKAGE / name).write_text(table)


def text(result: Result, **values: Any) -> str:
    facts = {name: result["machine"][name] for name in ("gpu", "torch", "measured")}
    return json.dumps({"machine": facts, **values}, indent=2) + "\n"


def schemes(results: dict[str, Result]) -> str:
    """BF16's time over each scheme's, by tokens."""
    newer = [row for row in results["gpu_int8"]["rows"] if row["m"] != HOST_BOUND]
    parts = (
        scheme_speeds(by_scheme(results["gpu_weight_only"]["gemms"], MORE)),
        scheme_speeds(results["gpu_schemes"]["rows"]),
        scheme_speeds(by_scheme(newer, NEWER)),
    )
    speeds: dict[str, dict[str, float]] = {}
    for tokens in sorted({tokens for part in parts for tokens in part}):
        found = {scheme: round(speed, 3) for part in parts for scheme, speed in part.get(tokens, {}).items()}
        speeds[str(tokens)] = dict(sorted(found.items()))
    return text(results["gpu_schemes"], speeds=speeds)


def by_scheme(rows: Iterable[Row], ways: Mapping[str, str]) -> Rows:
    """A row for each scheme, of rows that have the microseconds of several ways."""
    for row in rows:
        for way, scheme in ways.items():
            if way in row["us"]:
                yield {"m": row["m"], "scheme": scheme, "us": row["us"][way]}


def attention(result: Result) -> str:
    """The speed of FP8 over the fastest of BF16, by tokens."""
    speeds = {
        name: {
            str(cell["tokens"]): round(speedup(cell[which], mode, fastest_bf16(cell[which]["ms"])), 3)
            for cell in result["cells"]
        }
        for name, (which, mode) in PLANNED.items()
    }
    return text(result, speeds=speeds)


def expert_rates(result: Result) -> str:
    """FLOP/s of grouped GEMMs over both passes, by the rows of an expert, and the speed of wide experts over BF16."""
    rates: dict[str, dict[str, float]] = {recipe: {} for recipe in PASSES}
    for key in EXPERTS:
        shape, tflops = result[key]["shape"], result[key]["gemm_tflops"]
        rows = shape["tokens"] * shape["top_k"] // shape["experts"]
        for recipe, ways in PASSES.items():
            rates[recipe][str(rows)] = round(1e12 * harmonic_mean([tflops[way] for way in ways]))
    wide = result["mixtral"]["speedup"]
    speeds = {recipe: round(wide[f"ours, {recipe}"], 3) for recipe in ("blockwise", "mxfp8")}
    return text(result, rates=rates, speeds={"rowwise": round(wide["ours"], 3), **speeds})


def expert_speeds(result: Result) -> str:
    """The speed of packed experts over BF16."""
    layers = [
        {
            "shape": {name: layer["shape"][name] for name in ("experts", "width", "mlp_width")},
            "speeds": {
                str(cell["tokens"]): {
                    way: round(cell["ms"]["bf16"]["median"] / ms["median"], 3)
                    for way, ms in cell["ms"].items()
                    if way != "bf16"
                }
                for cell in layer["cells"]
            },
        }
        for layer in result["shapes"].values()
    ]
    return text(result, layers=layers)
