"""The section of docs/performance.md on weights alone in FP8."""

import copy

from bench.gpu.modes import BASE, WEIGHT_ONLY
from bench.report.aims import aims
from bench.report.tables import load
from bench.report.weight_only import weight_only


def test_the_tables_give_speeds_as_multiples_of_bf16s():
    results = copy.deepcopy(load())
    result = results["gpu_weight_only"]
    result["decode"]["ms"] = {
        BASE: {"median": 4.0, "low": 3.0, "high": 5.0},
        WEIGHT_ONLY: {"median": 2.0, "low": 2.0, "high": 2.0},
    }
    result["gemms"] = [{"m": 16, "n": 4096, "k": 8192, "us": {"bf16": 30.0, "weight-only": 20.0}, "runs": "triton"}]
    page = weight_only(results)
    assert f"| {WEIGHT_ONLY} | 2.00 | 2.00 to 2.00 | 2.000x |" in page
    assert "| 16, 4,096 x 8,192 | 30.0 us | 1.50x, 20.0 us | triton |" in page


def test_the_aim_compares_rounds_and_waits_for_a_measurement():
    results = copy.deepcopy(load())
    results["gpu_weight_only"]["decode"]["rounds"] = {BASE: [4.0, 9.0, 4.0], WEIGHT_ONLY: [2.0, 3.0, 2.0]}
    (aim,) = (aim for aim in aims(results) if "weights alone" in aim.claim)
    assert (aim.value, aim.verdict) == (2.0, "met")
    del results["gpu_weight_only"]
    (aim,) = (aim for aim in aims(results) if "weights alone" in aim.claim)
    assert (aim.value, aim.verdict) == (None, "not measured")
    assert "Not measured yet" in weight_only(results)
