"""docs/performance.md, docs/accuracy.md and the plots are what the files in bench/results give."""

import copy
import re
from pathlib import Path

import matplotlib
import pytest

from bench.gpu import stack
from bench.gpu.modes import BASE, FUSED, FUSED_EAGER, PLAIN, speedup
from bench.report import pages, parity, performance, plots
from bench.report.aims import Aim, aims
from bench.report.tables import load, machine, markdown, pivot
from octavo.recipe import PRESETS

RESULTS = load()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def results() -> dict:
    return copy.deepcopy(RESULTS)


def words(plot: Path) -> list[str]:
    """The text in a plot."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", plot.read_text())


def measured(results: dict) -> dict[str, Aim]:
    return {aim.claim: aim for aim in aims(results)}


# --- The repository --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pages.pages(RESULTS))
def test_the_page_in_the_repository_is_what_the_results_give(name):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert text == pages.page(name, RESULTS), "run make docs"
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_the_plots_in_the_repository_are_what_the_results_give(tmp_path):
    before = dict(matplotlib.rcParams)
    plots.draw(RESULTS, tmp_path)
    text = pages.page("performance", RESULTS) + pages.page("scaling", RESULTS)
    linked = re.findall(r"\]\(performance/(\w+\.svg)\)", text)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(linked)
    for path in tmp_path.iterdir():  # by their words: another version of matplotlib draws other bytes
        assert words(path) == words(ROOT / "docs" / "performance" / path.name)
    assert dict(matplotlib.rcParams) == before


def test_every_mode_that_the_pages_name_is_measured():
    assert {BASE, FUSED, FUSED_EAGER, PLAIN} <= stack.MODES.keys()


def test_the_guide_to_training_has_the_figures_of_the_results():
    guide = (ROOT / "docs" / "training.md").read_text()
    layers = performance.layer_sizes(RESULTS).partition("</details>")[0]
    tokens = {line.split(" | ")[0]: line for line in guide.partition("## Sizes")[2].partition("##")[0].splitlines()}
    for m in (512, 2048, 8192, 32768):
        rows = [re.search(rf"^\| {m:,} x {k:,} \| (.*) \|$", layers, re.MULTILINE) for k in (1024, 2048, 4096, 8192)]
        assert f"| {m:,} | {' | '.join(row[1].split(' | ')[i] for i, row in enumerate(rows))} |" == tokens[f"| {m:,}"]
    stack_of = RESULTS["gpu_stack"]
    modes = {row["mode"]: row for row in stack_of["modes"]}
    fused, plain = (modes[mode]["peak_gb"] / modes[BASE]["peak_gb"] for mode in (FUSED, PLAIN))
    assert f"{stack_of['kept']['ratio']:.2f}x of BF16 instead of {modes[FUSED]['ratio']:.2f}x" in guide
    assert f"{fused:.2f} of BF16's when fused, {plain:.2f} when not" in guide
    assert f"fused blocks reach {modes[FUSED_EAGER]['ratio']:.2f}x" in guide


def test_each_recipe_of_the_guide_is_measured():
    table = (ROOT / "docs" / "training.md").read_text().partition("## Recipes")[2].partition("[Recipes]")[0]
    named = re.findall(r"^\| (`.*`) \|", table, re.MULTILINE)
    recipes = {name.strip("` ") for names in named for name in names.split(",")}
    assert recipes == PRESETS.keys() - {"bf16"}
    page = pages.page("recipes", RESULTS)
    assert [name for name in recipes - {"delayed"} if f"| `{name}` |" not in page] == []
    assert "| `delayed_e5m2_margin_1` |" in page  # the preset


# --- Tables ----------------------------------------------------------------------------------------------------


def test_a_table_has_the_headings_of_all_its_rows():
    assert markdown([{"a": "1"}, {"a": "2", "b": "3"}]) == "| a | b |\n| --- | --- |\n| 1 | – |\n| 2 | 3 |"
    assert markdown([]) == "Not measured."
    assert pivot("", [("x", "one", "1"), ("y", "two", "2")]) == [{"": "x", "one": "1"}, {"": "y", "two": "2"}]


def test_readme_gets_its_rows_between_the_markers():
    begin, end = pages.MARKERS
    text = pages.with_gains(f"before\n{begin}\nold\n{end}\nafter", RESULTS)
    assert len(re.findall(r"^\| .* \|$", text, re.MULTILINE)) == 2 + 9
    assert "old" not in text
    assert "| Train 6 blocks of ViT-H/14, H200 | 1.20x | 1.21x |" in text
    assert "| Train a layer of 8 experts of Mixtral's shape, H200 | 1.43x | 1.19x |" in text
    assert text.startswith(f"before\n{begin}\n")
    assert text.endswith(f"\n{end}\nafter")


def test_modes_are_compared_within_a_round():
    cell = {"rounds": {"bf16": [1.0, 2.0, 3.0], "ours": [2.0, 4.0, 1.0]}}
    assert speedup(cell, "ours", "bf16") == 0.5  # of the medians: 1


def test_a_mode_that_was_not_measured_leaves_its_cells_empty(results):
    rows = results["gpu_stack"]["modes"]
    results["gpu_stack"]["modes"] = [row for row in rows if not row["mode"].startswith("torchao")]
    assert {row["vs best torchao"] for row in performance.stack_modes(results)} == {"–"}
    results["gpt_parity"]["step_times"] = None
    del results["gpt_parity"]["gaps"]["torchao"]
    assert list(performance.parity_steps(results)) == []
    assert "nan" not in pages.page("performance", results | {"gpu_stack": RESULTS["gpu_stack"]})


def test_one_seed_has_no_interval(results):
    results["gpt_parity"]["gaps"] = {"torchao": {"seeds": [0], "mean": -0.005, "interval": None}}
    assert next(iter(parity.parity_gaps(results)))["95 % interval"] == "– (one seed)"


def test_a_part_that_is_faster_than_its_floor_is_reported(results):
    found = results["gpu_stack"]
    found["profiles"][FUSED].update(gemm=10.0, attention=20.0, rest=30.0)
    found["floors"]["cast"].update(gemm=11.0, attention=19.0, rest=29.0)
    assert "gemm (10.00 ms, floor 11.00)." in performance.stack_warning(results)
    found["floors"]["cast"]["gemm"] = 9.0
    assert performance.stack_warning(results) == ""


def test_the_line_of_the_machine_says_what_is_known():
    known = {"measured": "2030-01-02", "threads": 4, "triton": None, "gpu": "NVIDIA H100"}
    assert machine({"machine": known}) == "NVIDIA H100, 4 threads, 2030-01-02."


# --- Aims ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sign", "at", "below"), [("≥", "met", "**missed**"), ("≤", "met", "met")])
def test_an_aim_is_met_at_its_bound(sign, at, below):
    assert Aim("", 1.0, sign, 1.0).verdict == at
    assert Aim("", 0.99, sign, 1.0).verdict == below
    assert Aim("", 1.0, "<", 1.0).verdict == "**missed**"
    assert Aim("", None, sign, 1.0).row()["verdict"] == "not measured"


def test_a_speed_is_the_others_time_over_ours(results):
    for row in results["gpu_stack"]["modes"]:
        row["median"], row["peak_gb"] = {BASE: (150.0, 10.0), FUSED: (100.0, 7.9)}.get(row["mode"], (125.0, 8.0))
    found = measured(results)
    assert found["stack, fused rowwise, compile: speed vs BF16"].value == 1.5
    assert found["stack, fused rowwise, compile: speed vs the best torchao mode"].value == 1.25
    assert found["stack, fused rowwise, compile: peak memory vs the leanest torchao mode"].value == 7.9 / 8


def test_a_gap_may_be_as_large_as_the_spread_of_bf16(results):
    claim = "a GPT on text, rowwise: mean gap of the final loss to BF16, without its sign"
    for mean, spread, verdict in ((0.0025, 0.0, "met"), (0.004, 0.005, "met"), (-0.004, 0.003, "**missed**")):
        results["gpt_parity"] |= {"gaps": {"rowwise": {"mean": mean}}, "bf16_spread": spread}
        assert measured(results)[claim].verdict == verdict


def test_kernels_on_little_data_do_not_count(results):
    claim = "kernels at 8192 x 4096 and above: least share of a copy's bandwidth"
    results["gpu_kernels"]["kernels"] = [{"share": 0.9, "shape": [8192, 4096]}, {"share": 0.1, "shape": [1024, 4096]}]
    assert measured(results)[claim].value == 0.9


# --- Plots -----------------------------------------------------------------------------------------------------


def test_plots_are_the_same_bytes_twice_and_small(tmp_path):
    for folder in ("a", "b"):
        plots.draw(RESULTS, tmp_path / folder)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
        assert path.stat().st_size < 200_000
        assert "<image" not in path.read_text()
