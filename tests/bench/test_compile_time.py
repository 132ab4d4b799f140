"""The table of compilation times, with and without a result."""

from bench.report.compile_time import compile_time


def test_the_table() -> None:
    assert compile_time({}).startswith("Not measured yet")
    cells = [
        {"mode": mode, "scope": scope, "seconds": seconds, "later_ms": 10 * seconds}
        for mode, scope, seconds in (("bf16", "whole", 40.0), ("ours", "whole", 50.0), ("bf16", "block", 8.0))
    ]
    cells.append({"mode": "ours", "scope": "block", "seconds": 9.0, "later_ms": 90.0})
    text = compile_time({"gpu_compile_time": {"depth": 32, "cells": cells, "machine": {"gpu": "NVIDIA H200"}}})
    assert "| `torch.compile(model)` | 40.0 | 50.0 | 1.25x | 400 and 500 |" in text
    assert "| `block.compile()` for each block | 8.0 | 9.0 | 1.12x | 80 and 90 |" in text
    assert "NVIDIA H200" in text
    cells[3] |= {"machine": {"commit": "1234567"}, "later_ms": None}
    text = compile_time({"gpu_compile_time": {"depth": 32, "cells": cells, "machine": {"gpu": "NVIDIA H200"}}})
    assert "| 8.0 | 9.0 | 1.12x | – | 1234567 |" in text
