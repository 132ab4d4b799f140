"""docs/attention.md from results that are made up, and the oracle of bench.gpu.attention."""

from typing import Any

import attention_fp8_oracle
import pytest
import torch

from bench.gpu.attention_oracle import attention64
from bench.gpu.modes import BASE, SERVE, SERVE_FP8_ATTENTION
from bench.report import attention, pages
from bench.report.tables import load


@pytest.fixture
def results() -> dict[str, Any]:
    times = {"BF16, flash": [2.0, 2.2], "BF16, cuDNN": [1.5, 1.5], "ours": [1.0, 1.2]}
    timed = {"rounds": times, "ms": {"BF16, flash": 2.1, "BF16, cuDNN": 1.5, "ours": 1.1}}
    db = {"ours": {"y": 25.04, "dq": 23.0, "dk": 23.1, "dv": 24.8}}
    cell = {"tokens": 8192, "db": db, "forward": timed, "both": timed}
    rounds = {BASE: [100.0, 100.0], SERVE: [64.0, 64.0], SERVE_FP8_ATTENTION: [60.0, 62.5]}
    prefill = {
        "layers": 32, "tokens": 8192, "db": {SERVE: 15.3, SERVE_FP8_ATTENTION: 15.1}, "rounds": rounds,
        "ms": {mode: found[0] for mode, found in rounds.items()},
    }  # fmt: skip
    machine = {"gpu": "NVIDIA H200"}
    whole = {"machine": machine, "heads": 32, "kv_heads": 8, "dim": 128, "cells": [cell], "prefill": prefill}
    return {"gpu_attention": whole}


def test_the_page_holds_every_figure(results: dict[str, Any]) -> None:
    found = {"bf16": {"0": 1.5, "1": 1.6}, "bf16 + FP8 attention": {"0": 1.503, "1": 1.6032}}
    gap = {"mean": 0.002, "interval": [0.001, 0.003], "gaps": [0.002, 0.002]}
    size = {"layers": 6, "width": 512, "heads": 4, "context": 2048}
    losses = {"machine": load()["gpu_attention"]["machine"], "settings": size, "tokens": 13_107_200, "losses": found}
    losses["gaps"] = {"bf16 + FP8 attention": gap}
    text = pages.page("attention", load() | results | {"gpu_attention_loss": losses})
    assert "{" not in text
    assert "| 8,192 | forward | BF16, flash | 2.100 | 0.716x |" in text
    assert "| 8,192 | forward and backward | ours | 1.100 | 1.375x |" in text
    assert "| 8,192 | ours | 25.0 | 23.0 | 23.1 | 24.8 |" in text
    assert f"| {SERVE_FP8_ATTENTION} | 60.0 | 1.633x | 15.1 dB |" in text
    assert "| bf16 + FP8 attention | 1.5030, 1.6032 | +0.20% | +0.10% to +0.30% |" in text
    assert "| bf16 | 1.5000, 1.6000 | – | – |" in text
    assert "Each run has 13 million tokens: 6 layers of width 512, 4 heads, sequences of 2,048." in text


def test_the_page_says_what_was_not_measured(results: dict[str, Any]) -> None:
    others = {name: result for name, result in load().items() if not name.startswith("gpu_attention")}
    assert "Not measured." in pages.page("attention", others | results)
    assert "attention" not in pages.pages(others)


def test_the_oracle_of_the_benchmark_is_autograd_in_float64() -> None:
    torch.manual_seed(0)
    q, k, v, dy = (x.double() for x in attention_fp8_oracle.given(1, 3, 1, 40, 40))
    expected = attention_fp8_oracle.exact(q, k, v, dy)
    actual = attention64(q[0], k[0, 0], v[0, 0], dy[0])
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one[0].view_as(other), other)


def test_the_package_ships_the_speeds_of_the_results() -> None:
    results = load()
    assert "gpu_attention" in results
    assert attention.SHIPPED.read_text() == attention.shipped(results), "run make docs"
