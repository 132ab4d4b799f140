"""The rates of experts that the package ships."""

import json

from bench.report import experts
from bench.report.tables import load


def test_the_package_ships_the_rates_of_the_results() -> None:
    results = load()
    assert "gpu_moe" in results
    assert experts.SHIPPED.read_text() == experts.shipped(results), "run make docs"


def test_the_table_of_our_kernel_has_what_was_measured() -> None:
    rates = {"y, bf16": 700.4, "dx of e5m2, triton, fast": 801.0}
    rates |= {f"y, {kernel}, {how}": 1234.5 for kernel in ("cutlass", "triton") for how in ("promoted", "fast")}
    shapes = {name: {"gemm_tflops": rates} for name in experts.NAMES}
    text = experts.row_scaled_gemms({"gpu_grouped_rows": {"machine": {"gpu": "NVIDIA H200"}, "shapes": shapes}})
    assert "| Mixtral's | y | 700 | 1,234 | 1,234 | 1,234 | 1,234 |" in text
    assert "| small experts | dx of e5m2 | – | – | – | – | 801 |" in text
    assert experts.row_scaled_gemms({}) == "Not measured yet."


def test_a_rate_is_that_of_all_three_gemms() -> None:
    """As many FLOPs in each, so that the times add."""
    shape = {"experts": 4, "width": 8, "mlp_width": 16, "top_k": 2, "tokens": 64}
    speeds = {"y": 1.0, "dx": 1.0, "dw": 2.0}
    tflops = {f"{gemm}, {way}": rate for gemm, rate in speeds.items() for way in ("bf16", "fast", "promoted")}
    cell = {"shape": shape, "gemm_tflops": tflops}
    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "measured": "2026-11-22"}
    result = {"machine": machine, "mixtral": cell, "small experts": cell}
    rates = json.loads(experts.shipped({"gpu_moe": result}))["rates"]
    assert rates == {"bf16": {"32": 1.2e12}, "rowwise": {"32": 1.2e12}}
