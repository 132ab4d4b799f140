"""The part of docs/performance.md on generating text, from an example of what bench.gpu.generate writes."""

import copy

import pytest

from bench.gpu.modes import BASE, FP8_CACHE, HOOKED, SERVE, SERVE_FP8_CACHE
from bench.report import generation, pages
from bench.report.aims import aims
from bench.report.tables import load
from octavo.speed import Grid, SpeedReport
from octavo.speed.programs import EAGER, OCTAVO, STATIC
from octavo.speed.result import Check, Row

RESULTS = load()
RATES = {OCTAVO: 400.0, HOOKED: 110.0, FP8_CACHE: 500.0, EAGER: 100.0, STATIC: 200.0}  # of one prompt


def decode_rows(batch: int) -> list[dict]:
    """63 tokens after the first, at those rates times the batch."""
    rows = [
        Row(way, way in (EAGER, STATIC), batch, 1024, 64, 9.0, [1.0], [1.0 + 63 / rate], 20 * 10**9)
        for way, rate in RATES.items()
    ]
    return SpeedReport({}, Grid([batch], [1024]), "cuda", rows=rows).to_dict()["rows"]


def prompt_rows() -> list[dict]:
    rows = [
        Row(way, way == EAGER, 1, prompt, 1, 1.0, [prompt * ms / 1e6])
        for prompt in (128, 2048)
        for way, ms in ((OCTAVO, 10), (EAGER, 15))
    ]
    return SpeedReport({}, Grid([1], [128, 2048], 1), "cuda", rows=rows).to_dict()["rows"]


@pytest.fixture
def results() -> dict:
    graphs = {"tokens_per_second": {BASE: 250.0, SERVE: 420.0, SERVE_FP8_CACHE: 510.0}}
    measured = {
        "machine": {"gpu": "NVIDIA Example", "transformers": "5.17.0", "measured": "2030-01-02"},
        "layers": 32,
        "tokens": 64,
        f"check of {OCTAVO}": vars(Check(OCTAVO, "transformers' loop", 64, [64, 61])),
        "prompt": prompt_rows(),
        **{f"decode {batch}": decode_rows(batch) for batch in (1, 16, 64)},
        "graphs 1": graphs,
    }
    seconds = {OCTAVO: {"load": 9.0, "first_token": 3.0}, EAGER: {"load": 8.0, "first_token": 2.0}}
    start = {"machine": {}, "seconds": seconds, "times_bf16": {OCTAVO: 1.2, EAGER: 1.0}}
    return copy.deepcopy(RESULTS) | {generation.NAME: measured, generation.START: start}


def test_the_page_shows_generation_before_steps_and_kernels(results: dict) -> None:
    page = pages.page("performance", results)
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[:3] == ["## Generating text", "## Steps and kernels", "## The layer stack"]
    text = page.partition("## Steps")[0]
    for line in (
        "| 1 | octavo | 400 | 2.00x | 95% | 20.0 | 9.0 |",
        "| 1 | octavo, FP8 cache | 500 | 2.50x | 98% | 20.0 | 9.0 |",
        "| 1 | BF16, static | 200 | 1.00x | 80% | 20.0 | 9.0 |",
        "| 1 | octavo, eager | 110 | 0.55x | – | 20.0 | 9.0 |",
        "| 64 | octavo | 25,600 | 2.00x | – | 20.0 | 9.0 |",
        "| 2,048 tokens | octavo | 20.5 | 1.50x |",
        "| octavo | 9.0 | 3.0 | 1.20 |",
        "32 layers. NVIDIA Example, transformers 5.17.0, 2030-01-02.",
    ):
        assert line in text.splitlines()
    assert "The first 64 and 61 of 64 greedy tokens are those of transformers' own loop" in text
    assert "Not measured" not in text


def test_a_size_that_does_not_fit_says_so(results: dict) -> None:
    row = results[generation.NAME]["decode 64"][0]
    row |= {"problem": "does not fit: no memory", "tokens_per_second": None, "tokens_per_second_speedup": None}
    row |= {"peak_bytes": None, "warm_up_seconds": None}
    assert "| 64 | octavo | does not fit: no memory | – | – | – | – |" in pages.page("performance", results)


def test_before_the_measurement_the_page_says_so() -> None:
    results = {name: found for name, found in RESULTS.items() if name not in (generation.NAME, generation.START)}
    text = pages.page("performance", results).partition("## Steps")[0]
    assert text.count("Not measured.") == 3
    assert "None" not in text


def test_the_aims_are_held_against_it(results: dict) -> None:
    found = {aim.claim: aim for aim in aims(results) if "generate" in aim.claim or "load" in aim.claim}
    values = {claim: aim.value for claim, aim in found.items()}
    assert values["generate, batch 64, octavo: tokens/s vs the best BF16"] == pytest.approx(2.0)
    assert values["generate, batch 64, octavo, FP8 cache: tokens/s vs the best BF16"] == pytest.approx(2.5)
    assert values["generate, batch 1: share of the tokens/s of a CUDA graph captured by hand"] == pytest.approx(
        400 / 420
    )
    assert values["generate without CUDA graphs, batch 16: tokens/s vs BF16, eager"] == pytest.approx(1.1)
    assert values["generate, first token of 2,048: speed vs BF16"] == pytest.approx(1.5)
    assert values["octavo.load and the first token: time vs BF16"] == pytest.approx(1.2)
    assert {aim.verdict for aim in found.values()} == {"met"}
    del results[generation.NAME], results[generation.START]
    assert {aim.verdict for aim in aims(results) if aim.claim in found} == {"not measured"}
