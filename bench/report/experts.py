"""The tables of docs/performance.md on layers of experts, and the rates that `octavo plan` reads."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import harmonic_mean

from bench.gpu.modes import speedup
from bench.report.tables import MISSING, Result, Row, machine, markdown, number, times

_PACKAGE = Path(__file__).parents[2] / "src" / "octavo"
SHIPPED, SHIPPED_SPEEDS = _PACKAGE / "plan" / "expert_rates.json", _PACKAGE / "runtime" / "expert_speeds.json"
# The ways of accumulating of y, dx and dw.
PASSES = {"bf16": ("y, bf16", "dx, bf16", "dw, bf16"), "rowwise": ("y, fast", "dx, fast", "dw, promoted")}
WAYS = ("bf16", "cutlass, promoted", "triton, promoted", "cutlass, fast", "triton, fast")
NAMES = {"mixtral": "Mixtral's", "small experts": "small experts"}


def expert_modes(results: dict[str, Result]) -> Iterable[Row]:
    """The modes of each shape: milliseconds, speed and SQNR."""
    for key, name in NAMES.items():
        cell = results["gpu_moe"][key]
        shape = cell["shape"]
        for mode, ms in cell["ms"].items():
            db = cell["db"].get(mode, {})
            yield {
                "experts": f"{name}: {shape['experts']} of {shape['width']:,} x {shape['mlp_width']:,}, "
                f"top {shape['top_k']}",
                "rows": f"{shape['tokens'] * shape['top_k']:,}",
                "mode": mode,
                "ms": f"{ms:.2f}",
                "vs BF16": f"{cell['speedup'][mode]:.3f}x",
                "SQNR of y, dx, both dw": ", ".join(f"{value:.1f}" for value in db.values()) or MISSING,
            }


def packed_experts(results: dict[str, Result]) -> str:
    """The experts of packed folders, forward: the speed of each scheme."""
    result = results.get("gpu_packed_experts")
    if result is None:
        return "Not measured yet."
    rows = []
    for key, name in NAMES.items():
        for cell in result["shapes"][key]["cells"]:
            ms = {way: found["median"] for way, found in cell["ms"].items()}
            speeds = {way: times(ms["bf16"], ms[way]) for way in ms if way != "bf16"}
            rows.append({"experts": name, "tokens": f"{cell['tokens']:,}", "BF16, ms": f"{ms['bf16']:.3f}", **speeds})
    return f"{markdown(rows)}\n\n{machine(result)}"


def expert_gemms(results: dict[str, Result]) -> Iterable[Row]:
    """TFLOP/s of the three grouped GEMMs of the inner layer."""
    for key, name in NAMES.items():
        rates = results["gpu_moe"][key]["gemm_tflops"]
        for which in ("y", "dx", "dw"):
            ways = {way: f"{rates[f'{which}, {way}']:,.0f}" for way in ("bf16", "promoted", "fast")}
            yield {"experts": name, "GEMM": which, **ways}


def row_scaled_gemms(results: dict[str, Result]) -> str:
    """TFLOP/s of these GEMMs by PyTorch's kernel and by ours."""
    result = results.get("gpu_grouped_rows")
    if result is None:
        return "Not measured yet."
    rows = []
    for key, name in NAMES.items():
        rates = result["shapes"][key]["gemm_tflops"]
        for gemm in dict.fromkeys(way.split(", ")[0] for way in rates):
            ways = {way: number(rates.get(f"{gemm}, {way}"), "{:,.0f}") for way in WAYS}
            rows.append({"experts": name, "GEMM": gemm, **ways})
    return f"{markdown(rows)}\n\n{machine(result)}"


def expert_layer_sqnr(results: dict[str, Result]) -> str:
    """The SQNR of one grouped linear layer."""
    found = results["gpu_moe"]["mixtral"]["one_layer_db"]
    return ", ".join(f"{found[which]:.1f}" for which in ("y", "dx", "dw"))


def expert_vs_torchao(results: dict[str, Result]) -> str:
    return f"{speedup(results['gpu_moe']['mixtral'], 'ours', 'torchao'):.3f}x"


def shipped(results: dict[str, Result]) -> str:
    """The file that octavo.plan.rates reads: FLOP/s of grouped GEMMs over both passes, by the rows of an expert."""
    result = results["gpu_moe"]
    rates: dict[str, dict[str, float]] = {recipe: {} for recipe in PASSES}
    for key in NAMES:
        shape, tflops = result[key]["shape"], result[key]["gemm_tflops"]
        rows = shape["tokens"] * shape["top_k"] // shape["experts"]
        for recipe, ways in PASSES.items():
            rates[recipe][str(rows)] = round(1e12 * harmonic_mean([tflops[way] for way in ways]))
    facts = {key: result["machine"][key] for key in ("gpu", "torch", "measured")}
    return json.dumps({"machine": facts, "rates": rates}, indent=2) + "\n"


def shipped_speeds(results: dict[str, Result]) -> str:
    """The file that octavo.runtime.scheme_speeds reads: the speed of packed experts over BF16."""
    result = results["gpu_packed_experts"]
    layers = [
        {
            "shape": {name: layer["shape"][name] for name in ("experts", "width", "mlp_width")},
            "speeds": {str(cell["tokens"]): _speeds(cell["ms"]) for cell in layer["cells"]},
        }
        for layer in result["shapes"].values()
    ]
    facts = {key: result["machine"][key] for key in ("gpu", "torch", "measured")}
    return json.dumps({"machine": facts, "layers": layers}, indent=2) + "\n"


def _speeds(ms: dict[str, dict[str, float]]) -> dict[str, float]:
    return {way: round(ms["bf16"]["median"] / found["median"], 3) for way, found in ms.items() if way != "bf16"}


def ship(results: dict[str, Result]) -> None:
    """Write the rates and the speeds into the package, once they are measured."""
    if "gpu_moe" in results:
        SHIPPED.write_text(shipped(results))
    if "gpu_packed_experts" in results:
        SHIPPED_SPEEDS.write_text(shipped_speeds(results))
