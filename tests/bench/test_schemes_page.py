"""The table of packing schemes and the speeds that the package ships, from results that are made up."""

import json

from bench.report import schemes
from bench.report.tables import load


def row(layer, m, scheme, us, **more):
    return {"layer": layer, "m": m, "n": 4096, "k": 4096, "scheme": scheme, "us": us, "backend": "triton", **more}


RESULT = {
    "machine": {"gpu": "NVIDIA H200", "torch": "2.11.0", "measured": "2026-11-22"},
    "rows": [
        row("o", 1, "bf16", 10.0), row("o", 1, "mx", 5.0, worst_db=52.4),
        row("o", 8192, "bf16", 100.0), row("o", 8192, "mx", 90.0, worst_db=50.0),
        row("down", 8192, "bf16", 300.0), row("down", 8192, "mx", 410.0, worst_db=51.0),
    ],
}  # fmt: skip


def test_speeds_are_of_all_layers_together():
    assert schemes.speeds(RESULT) == {"1": {"mx": 2.0}, "8192": {"mx": 0.8}}


def test_the_table_has_each_scheme_and_the_times_of_each_layer():
    text = schemes.packing_schemes({"gpu_schemes": RESULT})
    assert "| mx | 2.00x | 0.80x |" in text
    assert "| mx | 5.0 us, triton | 90.0 us, triton | 50 dB |" in text
    assert "<summary>down: 4,096 x 4,096</summary>" in text
    assert schemes.packing_schemes({}) == "Not measured yet."


def test_other_results_add_tokens_and_replace_int8():
    ways = {"bf16": 12.0, "w8a8": 6.0, "weight-only": 8.0, "dequantized": 24.0}
    others = {
        "gpu_weight_only": {"gemms": [{"m": 1, "us": ways}, {"m": 64, "us": ways}]},
        "gpu_int8": {"rows": [{"m": m, "us": {"bf16": 10.0, "channel": 4.0, "int8": 8.0}} for m in (1, 512)]},
    }
    old = RESULT | {"rows": [*RESULT["rows"], row("o", 1, "int8", 80.0)]}
    found = json.loads(schemes.shipped({"gpu_schemes": old} | others))["speeds"]
    assert found == {
        "1": {"channel": 2.0, "int8": 1.25, "mx": 2.0, "weight": 1.5},
        "64": {"channel": 2.0, "weight": 1.5},
        "8192": {"mx": 0.8},
    }


def test_the_package_ships_the_speeds_of_the_results():
    results = load()
    assert "gpu_schemes" in results
    assert schemes.SHIPPED.read_text() == schemes.shipped(results), "run make docs"
