"""docs/recipes.md from results that are made up."""

from typing import Any

import pytest

from bench.gpu.recipes.variants import CONTROL, VARIANTS
from bench.report import pages, recipes
from bench.report.tables import load

NATIVE = dict.fromkeys(("y", "dx", "dw"), "cublaslt")


def trained(mean: float, half: float, **gemms: str) -> dict[str, Any]:
    gap = {"seeds": [0, 1, 2], "mean": mean, "interval": [mean - half, mean + half]}
    return {"gemms": NATIVE | gemms, "losses": {"0": 3.0, "1": 3.1, "2": 3.2}, "diverged": 0, "gap": gap}


def errors(y: float, dx: float, dw: float) -> dict[str, Any]:
    return {g: {"median": db, "worst": db - 2, "worst_layer": "q"} for g, db in (("y", y), ("dx", dx), ("dw", dw))}


@pytest.fixture
def results() -> dict[str, Any]:
    machine = {"gpu": "NVIDIA H200"}
    table = {
        "bf16": {**trained(0, 0), "gap": None},
        CONTROL: trained(0.0002, 0.001),
        "rowwise": trained(0.0005, 0.002),
        "rowwise_dw_bf16": trained(0.0001, 0.004, dw="bf16"),
        "tensorwise": trained(0.004, 0.001),
        "mxfp8": trained(-0.003, 0.001, y="emulated", dx="emulated", dw="emulated"),
    }
    speeds = {"bf16": (1.0, 10), "rowwise": (1.4, 9), "rowwise_dw_bf16": (1.2, 12), "tensorwise": (1.5, 8)}
    found = {
        "machine": machine, "tokens": 8_000_000, "recipes": table, "bf16": {"losses": [3.0, 3.1], "spread": 0.0123},
        "settings": {"layers": 6, "width": 512, "vocabulary": 8192}, "corpus": {"train_tokens": 10_000_000},
        "errors": {
            "machine": machine, "layers": 42, "steps": 500, "tokens": 16384,
            "recipes": {
                "bf16": errors(50, 50, 50), "rowwise": errors(30, 29, 28), "rowwise_dw_bf16": errors(30, 31, 50),
                "tensorwise": errors(33, 33, 33), "mxfp8": errors(32, 28, 27),
            },
        },
        "speed": {
            "machine": machine, "layers": 2, "width": 4096, "tokens": 8192,
            "recipes": {name: {"ratio": ratio, "peak_bytes": peak} for name, (ratio, peak) in speeds.items()},
        },
    }  # fmt: skip
    return {"recipes": found}


def test_the_page_holds_every_figure(results: dict[str, Any]) -> None:
    text = pages.page("recipes", load() | results)
    assert "{" not in text
    assert "nan" not in text
    words = VARIANTS["rowwise"].words
    row = f"| `rowwise` | {words} | 3 | +0.050% | -0.150% to +0.250% | 30.0 (28.0) | 29.0 (27.0) | 28.0 (26.0) |"
    assert f"{row} 1.40x | 0.90x |" in text
    assert "| 32.0 (30.0) | 28.0 (26.0) | 27.0 (25.0) | – (emulated: y, dx, dw) | – |" in text
    assert "0.80 epochs. NVIDIA H200." in text


def test_the_choice_leaves_out_recipes_with_a_higher_loss(results: dict[str, Any]) -> None:
    choice = {row["for"]: row for row in recipes.recipe_choice(results)}
    assert choice["speed"]["recipe"] == "`rowwise`"
    assert choice["speed"]["because"] == "1.40x of BF16's speed"
    assert choice["little memory"]["because"] == "0.90x of BF16's"
    assert choice["an exact y, in eight bits"]["recipe"] == "`mxfp8`"
    assert choice["an exact dx, in eight bits"]["recipe"] == "`rowwise_dw_bf16`"
    assert choice["an exact dw, in eight bits"]["recipe"] == "`rowwise`"  # that of rowwise_dw_bf16 is in BF16
    results["recipes"]["recipes"]["rowwise"]["diverged"] = 1
    assert next(iter(recipes.recipe_choice(results)))["recipe"] == "`rowwise_dw_bf16`"


def test_the_text_about_the_default_follows_the_table(results: dict[str, Any]) -> None:
    table, speeds = results["recipes"]["recipes"], results["recipes"]["speed"]["recipes"]
    no_faster = "The default is `rowwise`: no other recipe in the choice is faster by more than 2%."
    assert recipes.recipe_default(results) == no_faster
    speeds["rowwise_dw_bf16"]["ratio"] = 1.42  # 1.4 % faster than the default, which counts as equal
    assert recipes.recipe_default(results) == no_faster
    assert next(iter(recipes.recipe_choice(results)))["recipe"] == "`rowwise`"
    table["tensorwise"] = trained(0.0, 0.001)
    assert recipes.recipe_default(results).endswith("Faster in the choice: `tensorwise` (1.50x).")
    table["rowwise"] = trained(0.002, 0.001)  # above zero, but below 0.25 %
    assert "left out" not in recipes.recipe_default(results)
    table["rowwise"] = trained(0.003, 0.001)
    assert "left out of the choice" in recipes.recipe_default(results)
    results["recipes"]["speed"] = None
    assert "not been measured" in recipes.recipe_default(results)


def test_the_resolution_is_stated(results: dict[str, Any]) -> None:
    text = recipes.recipe_resolution(results)
    widths = "3 of 4 recipes reach at most 0.25% to each side; the widest reaches 0.40% (`rowwise_dw_bf16`)."
    assert f"- The intervals of {widths}\n" in text
    assert "- Intervals above zero: `tensorwise`.\n- Intervals below zero: `mxfp8`.\n" in text
    assert "The gap of the control is +0.020% (95 % interval -0.080% to +0.120%)." in text
    for row in results["recipes"]["recipes"].values():
        row["gap"] = row["gap"] and {**row["gap"], "interval": None}
    assert recipes.recipe_resolution(results).startswith("One seed gives no interval")


def test_what_was_not_measured_is_left_empty(results: dict[str, Any]) -> None:
    results["recipes"] |= {"errors": None, "speed": None}
    (row,) = (row for row in recipes.recipe_table(results) if row["recipe"] == "`rowwise`")
    assert (row["SQNR of y"], row["speed"], row["peak memory"]) == ("–", "–", "–")
    assert {row["recipe"] for row in recipes.recipe_choice(results)} == {"not measured"}
    assert "None" not in pages.page("recipes", load() | results)


def test_there_is_no_page_without_results(results: dict[str, Any]) -> None:
    others = {name: result for name, result in load().items() if name != "recipes"}
    assert "recipes" not in pages.pages(others)
    assert "recipes" in pages.pages(others | results)
