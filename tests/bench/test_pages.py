"""The pages of measurements, their grids, their plots and the tables of the package are what bench/results gives."""

import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest

from bench.gpu import plan as planned
from bench.gpu.modes import BASE, FUSED, FUSED_EAGER, PLAIN, speedup
from bench.report import pages, performance, plan, plots, scaling
from bench.report.filler import Fields, fill, load
from bench.report.training import mean_of
from octavo.plan.step_time import Links, Training
from octavo.recipe import PRESETS

RESULTS = load()
ROOT = Path(__file__).parents[2]


def words(plot: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", plot.read_text())


# --- The repository --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pages.PAGES)
def test_the_page_in_the_repository_is_what_the_results_give(name):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert text == pages.page(name, RESULTS), "run make docs"
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_the_aims_in_the_repository_are_what_the_results_give():
    text = (ROOT / "bench" / "aims.md").read_text()
    assert text == pages.aims_page(RESULTS), "run make docs"
    assert "–" not in text  # each is measured
    assert len(re.findall(r"\| (?:met|\*\*missed\*\*) \|$", text, re.MULTILINE)) == 36 + 12


def test_the_plots_and_grids_in_the_repository_are_what_the_results_give(tmp_path):
    before = dict(matplotlib.rcParams)
    plots.draw(RESULTS, tmp_path)
    performance.write_grids(RESULTS, tmp_path, plan=plan.whole_runs(RESULTS))
    text = "".join(pages.page(name, RESULTS) for name in pages.PAGES) + (ROOT / "README.md").read_text()
    linked = re.findall(r"\]\((?:docs/)?performance/(\w+\.\w+)\)", text)
    drawn = list(tmp_path.iterdir())
    assert sorted(path.name for path in drawn) == sorted(linked)
    for path in drawn:
        there = ROOT / "docs" / "performance" / path.name
        if path.suffix == ".csv":
            assert path.read_text() == there.read_text(), "run make docs"
        else:  # by its words: another version of matplotlib draws other bytes
            assert words(path) == words(there), "run make docs"
            assert path.stat().st_size < 200_000
            assert "<image" not in path.read_text()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_the_same_results_give_the_same_plots(tmp_path):
    for name in ("one", "other"):
        plots.draw(RESULTS, tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


@pytest.mark.parametrize("name", pages.shipped_tables(RESULTS))
def test_the_package_ships_the_speeds_of_the_results(name):
    assert (ROOT / "src" / "octavo" / name).read_text() == pages.shipped_tables(RESULTS)[name], "run make docs"


def test_the_guide_to_training_has_the_figures_of_the_results():
    guide = (ROOT / "docs" / "training.md").read_text()
    sizes = {(row.M, row.K, row.N): row.speedup for row in performance.layer_sizes() if row.recipe == "rowwise"}
    tokens = {line.split(" | ")[0]: line for line in guide.partition("## Sizes")[2].partition("##")[0].splitlines()}
    for m in (512, 2048, 8192, 32768):
        cells = [f"{sizes[m, k, k]:.2f}x" for k in (1024, 2048, 4096, 8192)]
        assert f"| {m:,} | {' | '.join(cells)} |" == tokens[f"| {m:,}"]
    stack_of = RESULTS["gpu_stack"]
    modes = {row["mode"]: row for row in stack_of["modes"]}
    fused, plain = (modes[mode]["peak_gb"] / modes[BASE]["peak_gb"] for mode in (FUSED, PLAIN))
    assert f"{stack_of['kept']['ratio']:.2f}x of BF16 instead of {modes[FUSED]['ratio']:.2f}x" in guide
    assert f"{fused:.2f} of BF16's when fused, {plain:.2f} when not" in guide
    assert f"fused blocks reach {modes[FUSED_EAGER]['ratio']:.2f}x" in guide
    cells = {(cell["m"], cell["k"], cell["n"]): cell for cell in RESULTS["gpu_layer"]["cells"]}
    layer = cells[8192, 2048, 2048]
    assert f"at 8,192 tokens reaches {speedup(layer, 'ours', 'bf16'):.3f}x" in " ".join(guide.split())
    llama = RESULTS["pretrain_300m"]
    speeds = mean_of(llama, "tokens_per_second")
    tokens_seen = llama["settings"]["batch"] * llama["settings"]["context"]
    gained = f"{speeds['rowwise'] / speeds['bf16']:.2f}x for [a Llama of width {llama['settings']['width']:,}]"
    assert f"{gained}(pretraining.md) whose layers see {tokens_seen:,}" in guide


def test_each_recipe_of_the_guide_is_measured():
    table = (ROOT / "docs" / "training.md").read_text().partition("## Recipes")[2].partition("[Recipes]")[0]
    named = re.findall(r"^\| (`.*`) \|", table, re.MULTILINE)
    assert {name.strip("` ") for names in named for name in names.split(",")} == PRESETS.keys() - {"bf16"}
    page = pages.page("recipes", RESULTS)
    rows = re.findall(r"^\| ([^|]*) \|.* not measured", table, re.MULTILINE)
    unmeasured = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert {name for name in PRESETS.keys() - {"delayed"} if f"| `{name}` |" not in page} == unmeasured
    assert "| `delayed_e5m2_margin_1` |" in page  # the preset


# --- The filler ------------------------------------------------------------------------------------------------


def test_fields_outside_of_tables_are_filled_and_must_be_there():
    result = Fields(ms=Fields({"bf16, compile": 2.0}), rows=[])
    assert fill('{stack.ms["bf16, compile"]:.1f} ms', {"stack": result}) == "2.0 ms"
    for missing in ("{stack.speed}", "{other}"):
        with pytest.raises((AttributeError, NameError)):
            fill(missing, {"stack": result})


@pytest.mark.parametrize("world", [1, 2, 8])
def test_the_fit_of_a_step_gives_the_measured_time_back(world):
    """The model of a step on several GPUs, docs/scaling.md."""
    training = Training(
        layers=4, block=0.3, rest=0.05, optimizer=0.08, gathered=8e9, reduced=16e9, root_gathered=2e9, root_reduced=4e9
    )  # fmt: skip
    links = Links(100e9)
    found = scaling.fit(training.step(links, world), replace(training, block=0.0), links, world)
    assert found.block == pytest.approx(training.block, rel=1e-6)


def test_the_plan_is_within_its_aims_of_what_was_measured():
    missed = set()
    for name in (name for name in RESULTS if name.startswith("gpu_plan_")):
        found = [planned.with_plan(row) for row in RESULTS[name]["rows"]]
        assert len(found) == len(planned.CONFIGURATIONS)
        for row in found:
            names = [name for name, error in row["errors"].items() if abs(error) > planned.AIMS[name]]
            missed |= {(row["model"], row["gpus"], row["recipe"], row["checkpointing"], name) for name in names}
    assert not missed
    with pytest.raises(ValueError, match="no configuration"):
        planned.with_plan({"model": "8b", "recipe": "bf16", "checkpointing": "selective", "gpus": 4, "gpu": "h200"})


@pytest.mark.parametrize(
    ("errors_of", "most"),
    [
        (plan.stack_errors, 0.05), (plan.fsdp_errors, 0.05), (plan.tensor_parallel_errors, 0.1),
        (plan.expert_errors, 0.1), (plan.image_errors, 0.05), (plan.gpt2_errors, 0.05), (plan.serving_errors, 0.1),
    ],
)  # fmt: skip
def test_the_plan_is_near_each_step_that_was_measured(errors_of, most):
    """But for short kernels, which decide small experts, and a mode whose code was replaced."""
    for row in errors_of(RESULTS):
        if not {performance.REPLACED, "small experts"} & {row.get("mode"), row.get("experts")}:
            speed = row.get("ms") or row["rate"]
            assert speed.planned == pytest.approx(speed.measured, rel=most), row
