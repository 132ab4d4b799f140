"""The section of docs/performance.md on INT8."""

from bench.report.int8 import int8


def test_the_table_gives_speeds_as_multiples_of_bf16s():
    us = {"bf16": 30.0, "channel": 20.0, "int8": 15.0, "int8 GEMM": 10.0}
    result = {"machine": {"gpu": "H200", "commit": "1234567", "measured": "2026-11-22"}}
    page = int8({"gpu_int8": {**result, "rows": [{"layer": "down", "m": 16, "n": 4096, "k": 14336, "us": us}]}})
    assert "| layer | bf16 | channel | int8 | int8 GEMM | torch._int_mm |" in page
    assert "| down, 16 rows | 30.0 us | 1.50x, 20.0 us | 2.00x, 15.0 us | 3.00x, 10.0 us | – |" in page
    assert "Not measured yet" in int8({})
