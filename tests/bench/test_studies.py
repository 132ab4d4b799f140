"""bench/gpu/runs.py and bench/gpu/recipes.py, the models small and on the CPU: every study and every recipe trains."""

import json
import math
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import scipy.stats
import torch

from bench.gpu import recipes, runs
from bench.gpu.harness import decibels
from bench.gpu.runs import STUDIES, Study, tiny
from bench.gpu.variants import BASE, CONTROL, VARIANTS, implementations, recipe_of
from octavo.models.tokenizer import Corpus
from octavo.recipe import PRESETS, Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study() -> Study:
    return tiny(STUDIES["recipes-cpu"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, study: Study) -> Path:
    out = tmp_path_factory.mktemp("recipes")
    runs.train_all(study, [(name, seed) for name in VARIANTS for seed in (0, 1)], out)
    return out


@pytest.fixture(scope="module")
def data(trained: Path, study: Study) -> Corpus:
    return runs.tokens_of(study, trained)


# --- Runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "moe", "300m", "attention"])
def test_each_study_trains_and_is_merged(name: str, tmp_path: Path) -> None:
    study = tiny(STUDIES[name], emulate=True)
    runs.train_all(study, [(mode, seed) for seed in (0, 1) for mode in ("bf16", "rowwise")], tmp_path)
    result = runs.merge(tmp_path)
    assert [(run["mode"], run["seed"]) for run in result["runs"]] == [*product(("bf16", "rowwise"), (0, 1))]
    assert result["tokens"] == 4 * 4 * 16
    assert [point["step"] for point in result["runs"][0]["evaluations"]] == ([1, 2, 3, 4] if name == "300m" else [4])
    gap = result["gaps"]["rowwise"]
    low, high = scipy.stats.t.interval(0.95, 1, gap["mean"], statistics.stdev(gap["gaps"]) / math.sqrt(2))
    assert gap["interval"] == pytest.approx([low, high])
    assert 0 < max(map(abs, gap["gaps"])) < 0.05
    for run in result["runs"]:
        assert run["tokens_per_second"] == pytest.approx(4 * 4 * 16 / run["evaluations"][-1]["seconds"])
        assert run["final"] == result["losses"][run["mode"]][str(run["seed"])]
    assert runs.early(result) == ""


def test_every_mode_starts_from_the_same_weights_and_batches(data: Corpus, study: Study) -> None:
    learners = [runs.learner_of(mode, study.config) for mode in ("bf16", "rowwise")]
    for seed in (0, 1):
        batches = runs.training_batches(data, study.config, seed)
        for learner in learners:
            learner.step(3, runs.batch_at(batches, 3))
            runs.begin(learner, seed)
        states = [learner.state() for learner in learners]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
        weights = dict(learners[0].model.named_parameters())
        assert not any(tensor.count_nonzero() for name, tensor in states[0].items() if name not in weights)


def test_gradients_in_fp8_are_off_by_what_fp8_costs(data, study, monkeypatch):
    learners = {mode: runs.learner_of(mode, study.config) for mode in ("bf16", "rowwise")}
    tokens = runs.batch_at(runs.training_batches(data, study.config, 0), 0)
    assert 0.02 < runs.gradient_errors(learners, tokens)["rowwise"] < 0.3
    monkeypatch.setattr(runs, "GRADIENT_ERRORS", (0.9, 1.0))
    with pytest.raises(RuntimeError, match="must be off by"):
        runs.gradient_errors(learners, tokens)


def test_a_run_that_is_stopped_has_the_losses_of_a_whole_one(tmp_path: Path) -> None:
    study, found, path = tiny(STUDIES["300m"])._replace(evaluations=2), {}, runs.path_of(tmp_path, "bf16", 0)
    for stop in (2, 4):
        runs.train_all(study._replace(stop=stop), [("bf16", 0)], tmp_path)
        written = path.stat().st_mtime_ns
        runs.train_all(study._replace(stop=stop), [("bf16", 0)], tmp_path)  # nothing is left to train
        assert path.stat().st_mtime_ns == written
        found[stop] = json.loads(path.read_text())["evaluations"]
        assert found[stop][-1]["step"] == stop
        assert runs.early(runs.merge(tmp_path)) == ("_2" if stop == 2 else "")
    assert [point["loss"] for point in found[2]] == [point["loss"] for point in found[4]][:1]


def test_workers_share_the_modes(trained: Path, tmp_path: Path, study: Study) -> None:
    (tmp_path / "tokens.npz").write_bytes((trained / "tokens.npz").read_bytes())
    names = [BASE, "rowwise", "tensorwise"]
    runs.train_all(study, [(name, 0) for name in names], tmp_path, processes=2)
    for name in names:
        here, there = (json.loads(runs.path_of(folder, name, 0).read_text())["final"] for folder in (tmp_path, trained))
        assert here == pytest.approx(there, rel=1e-6)


def test_delayed_scaling_begins_anew_with_each_seed(trained: Path, tmp_path: Path, study: Study) -> None:
    name = "delayed_e5m2_margin_1"
    runs.train_all(study, [(name, 1)], tmp_path)  # alone, not after seed 0
    alone, after = (json.loads(runs.path_of(out, name, 1).read_text())["final"] for out in (tmp_path, trained))
    assert alone == after != json.loads(runs.path_of(trained, name, 0).read_text())["final"]


def test_runs_that_cannot_be_compared_are_not_merged(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "rowwise-0.json").write_bytes((trained / "rowwise-0.json").read_bytes())
    with pytest.raises(ValueError, match="those of bf16 among them"):
        runs.merge(tmp_path)
    run = json.loads((trained / "bf16-0.json").read_text()) | {"settings": {}}
    (tmp_path / "bf16-0.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match="the same settings"):
        runs.merge(tmp_path)


def test_a_run_that_diverges_is_counted_and_is_in_no_mean(trained: Path, tmp_path: Path) -> None:
    for name in ("bf16-0", "bf16-1", "tensorwise-0", "tensorwise-1"):
        run = json.loads((trained / f"{name}.json").read_text())
        (tmp_path / f"{name}.json").write_text(json.dumps(run | ({"final": None} if name == "tensorwise-0" else {})))
    row = recipes.merge(tmp_path)["recipes"]["tensorwise"]
    assert (row["diverged"], row["gap"]["seeds"], row["gap"]["interval"]) == (1, [1], None)


# --- Recipes ---------------------------------------------------------------------------------------------------


def test_every_preset_is_compared_and_no_recipe_twice() -> None:
    known = {name: variant.recipe for name, variant in VARIANTS.items() if name != CONTROL}
    fields = [{**recipe.to_dict(), "name": ""} for recipe in known.values()]
    assert all(fields.count(each) == 1 for each in fields)
    for preset in PRESETS.values():
        assert preset().to_dict() in [recipe.to_dict() for recipe in known.values()]
    for name in VARIANTS:
        assert Recipe.from_json(recipe_of(name).to_json()) == recipe_of(name)
        assert set(implementations(name, torch.device("cpu")).values()) <= {"bf16", "emulated"}
    recipe = VARIANTS["rowwise_stochastic"].recipe
    assert [cast and cast.rounding for cast in (recipe.x, recipe.w, recipe.dy)] == ["nearest", "nearest", "stochastic"]


def test_every_recipe_trains_and_has_a_gap(trained: Path) -> None:
    result = recipes.merge(trained)
    assert list(result["recipes"]) == list(VARIANTS)
    base = result["recipes"][BASE]
    assert base["gap"] is None
    for name, row in result["recipes"].items():
        assert row["diverged"] == 0
        if name != BASE:
            expected = [row["losses"][seed] / base["losses"][seed] - 1 for seed in ("0", "1")]
            assert row["gap"]["gaps"] == pytest.approx(expected)
            assert 0 < max(map(abs, expected)) < 0.01, name


def test_the_errors_are_of_the_operands_of_a_trained_model(data: Corpus, study: Study) -> None:
    found = recipes.errors([*VARIANTS], study, data)["recipes"]
    assert found.keys() == VARIANTS.keys() - {CONTROL}
    for row in found.values():
        assert all(5 < row[gemm]["worst"] <= row[gemm]["median"] < 70 for gemm in ("y", "dx", "dw"))
        assert all(row[gemm]["worst_channel"] < row[gemm]["worst"] for gemm in ("y", "dx", "dw"))
    medians = {name: {gemm: row[gemm]["median"] for gemm in row} for name, row in found.items()}
    assert medians["bf16"]["dw"] == pytest.approx(medians["rowwise_dw_bf16"]["dw"], abs=1)
    assert medians["bf16"]["y"] > medians["rowwise"]["y"] + 10
    assert medians["tensorwise_e4m3"]["dx"] > medians["tensorwise"]["dx"] + 2  # a bit more of mantissa
    assert medians["rowwise"]["dx"] > medians["rowwise_stochastic"]["dx"] + 0.5


def test_the_worst_channel_is_a_row_or_a_column_that_is_not_zero() -> None:
    exact = torch.ones(4, 6, dtype=torch.float64)
    exact[2], exact[:, 5] = 0.0, 10.0
    actual = exact.clone()
    actual[1, 3], actual[0, 5] = 1.5, 10.5
    worst = 10 * math.log10(3 / 0.5**2)  # of column 3, whose row of zeros counts nothing
    assert recipes.worst_channel(exact, actual) == pytest.approx(worst)
    assert recipes.worst_channel(exact.t(), actual.t()) == pytest.approx(worst)


def test_the_operands_are_those_of_the_layer(data: Corpus, study: Study) -> None:
    learner = runs.learner_of(BASE, study.config)
    layers, sequences = recipes.linears(learner.model), runs.batch_at(runs.training_batches(data, study.config, 0), 0)
    found = recipes.operands(learner, layers, sequences)
    torch.autograd.backward(learner.forward(learner.model, sequences))
    for name, layer in layers.items():
        x, dy = (t.double() for t in found[name])
        assert (x.shape, dy.shape) == ((64, layer.in_features), (64, layer.out_features))
        assert decibels(dy.t() @ x, layer.weight.grad) > 40


def test_speed_is_measured_once_for_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    names = ["rowwise", "delayed_e5m2_margin_0", "delayed_e5m2_margin_2", "delayed_e4m3_margin_1", "mxfp8", CONTROL]
    tiny = replace(recipes.CONFIG, width=64, heads=2, kv_heads=1, mlp_width=128, layers=1)
    found = recipes.speeds(names, tiny, 32, rounds=2)["recipes"]
    assert {name: row["measured_as"] for name, row in found.items()} == {
        **{name: name for name in (BASE, *names[:2])}, names[2]: names[1], **{name: name for name in names[3:5]},
    }  # fmt: skip
    assert all(min(row["sqnr"]) > 10 and row["median"] > 0 for name, row in found.items() if name != BASE)


def test_the_command_refuses_unknown_recipes() -> None:
    for words, message in ((["--cpu", "--recipes", "rowise"], "unknown recipe 'rowise'"), ([], "needs --cpu")):
        with pytest.raises(SystemExit, match=message):
            recipes.main(words)
