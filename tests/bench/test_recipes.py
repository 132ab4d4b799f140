"""bench/gpu/recipes, the model small and on the CPU: every recipe trains and gives a row."""

import json
import math
import queue
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch

from bench import record
from bench.gpu.gpt_trainer import Data, restart, trainer_of
from bench.gpu.pretrain import save_tokens
from bench.gpu.recipes import __main__ as command
from bench.gpu.recipes import errors, losses, speed
from bench.gpu.recipes.variants import BASE, CONTROL, VARIANTS, implementations, recipe_of
from bench.gpu.timing import decibels
from octavo.models.tokenizer import ByteTokenizer
from octavo.recipe import PRESETS, Recipe
from octavo.text import read_text
from octavo.train.data import build_corpus
from octavo.train.evaluation import next_token_loss

pytestmark = pytest.mark.slow

CONFIG = losses.CPU.change(
    layers=1, width=64, heads=2, kv_heads=2, mlp_width=128, context=16, vocabulary=256, batch=4, steps=4, warmup=1,
    evaluate_batches=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recipes")
    texts = read_text([str(Path(__file__))]).texts
    save_tokens(build_corpus(texts, ByteTokenizer(), CONFIG.context, 0.2), out / losses.TOKENS)
    return out


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return losses.tokens_of(CONFIG, folder)


# --- The recipes -----------------------------------------------------------------------------------------------


def test_every_preset_is_compared_and_no_recipe_twice() -> None:
    recipes = {name: variant.recipe for name, variant in VARIANTS.items() if name != CONTROL}
    fields = [{**recipe.to_dict(), "name": ""} for recipe in recipes.values()]
    assert all(fields.count(each) == 1 for each in fields)
    for preset in PRESETS.values():
        assert preset().to_dict() in [recipe.to_dict() for recipe in recipes.values()]
    assert len({variant.words for variant in VARIANTS.values()}) == len(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_recipe_can_be_written_to_a_file_and_read_again(name: str) -> None:
    assert Recipe.from_json(recipe_of(name).to_json()) == recipe_of(name)
    assert implementations(name, torch.device("cpu")) == {
        gemm: "bf16" if getattr(recipe_of(name), gemm) is None else "emulated" for gemm in ("y", "dx", "dw")
    }


def test_only_the_gradients_are_rounded_stochastically() -> None:
    recipe = VARIANTS["rowwise_stochastic"].recipe
    casts = {"x": recipe.x, "w": recipe.w, "dy": recipe.dy}
    assert {name: cast and cast.rounding for name, cast in casts.items()} == {
        "x": "nearest", "w": "nearest", "dy": "stochastic",
    }  # fmt: skip


# --- Losses ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    losses.train_all([*VARIANTS], range(2), CONFIG, folder, math.inf, processes=1)
    return folder


def test_every_recipe_trains_and_has_a_gap(trained: Path) -> None:
    result = command.merge(trained)
    assert result["tokens"] == 4 * 4 * 16
    assert list(result["recipes"]) == list(VARIANTS)
    base = result["recipes"][BASE]
    assert base["gap"] is None
    for name, row in result["recipes"].items():
        assert row["diverged"] == 0
        if name != BASE:
            expected = [row["losses"][seed] / base["losses"][seed] - 1 for seed in ("0", "1")]
            assert row["gap"]["gaps"] == pytest.approx(expected)
            spread = statistics.stdev(expected) / math.sqrt(2)
            low, high = scipy.stats.t.interval(0.95, 1, statistics.mean(expected), spread)
            assert row["gap"]["interval"] == pytest.approx([low, high])
            assert 0 < max(map(abs, expected)) < 0.01, name


def test_seeds_differ_and_delayed_scaling_begins_anew(trained: Path, data: Data, tmp_path: Path) -> None:
    name = "delayed_e5m2_margin_1"
    losses.train_seeds(name, [1], CONFIG, data, tmp_path, math.inf)  # alone, not after seed 0
    alone, after = (json.loads(losses.path_of(out, name, 1).read_text())["final"] for out in (tmp_path, trained))
    assert alone == after
    assert after != json.loads(losses.path_of(trained, name, 0).read_text())["final"]


def test_a_run_that_is_there_is_not_repeated(trained: Path) -> None:
    path = losses.path_of(trained, "mxfp8", 1)
    before = path.stat().st_mtime_ns
    losses.train_all(["mxfp8"], range(2), CONFIG, trained, math.inf, processes=1)
    assert path.stat().st_mtime_ns == before


def test_workers_share_the_recipes(trained: Path, tmp_path: Path) -> None:
    (tmp_path / losses.TOKENS).write_bytes((trained / losses.TOKENS).read_bytes())
    names = [BASE, "rowwise", "tensorwise"]
    losses.train_all(names, [0], CONFIG, tmp_path, math.inf, processes=2)
    for name in names:
        here, there = (json.loads(losses.path_of(folder, name, 0).read_text()) for folder in (tmp_path, trained))
        assert here["final"] == pytest.approx(there["final"], rel=1e-6)


def test_a_recipe_that_fails_does_not_end_the_others(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / losses.TOKENS).write_bytes((trained / losses.TOKENS).read_bytes())
    monkeypatch.setattr(losses, "round_weights", lambda trainer: 1 / 0)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of this process
    jobs: queue.Queue[str | None] = queue.Queue()
    for job in (CONTROL, "rowwise", None):
        jobs.put(job)
    losses.work(0, jobs, [0], CONFIG, tmp_path, math.inf)
    assert [path.name for path in tmp_path.glob("*.json")] == ["rowwise-0.json"]
    assert f"{CONTROL} failed" in capsys.readouterr().out


def test_no_run_is_started_after_the_deadline(folder: Path, data: Data, tmp_path: Path) -> None:
    losses.train_seeds("rowwise", range(2), CONFIG, data, tmp_path, time.monotonic() - 1)
    assert not list(tmp_path.iterdir())


def test_a_run_that_diverges_is_counted_and_is_in_no_mean(trained: Path, tmp_path: Path) -> None:
    for path in trained.glob("*-*.json"):
        content = json.loads(path.read_text())
        if content["mode"] in (BASE, "tensorwise"):
            content["final"] = None if content["mode"] == "tensorwise" and content["seed"] == 0 else content["final"]
            (tmp_path / path.name).write_text(json.dumps(content))
    row = command.merge(tmp_path)["recipes"]["tensorwise"]
    assert row["diverged"] == 1
    assert row["gap"]["seeds"] == [1]
    assert row["gap"]["interval"] is None


def test_runs_that_differ_in_more_than_recipe_and_seed_are_not_merged(trained: Path, tmp_path: Path) -> None:
    path = losses.path_of(trained, BASE, 0)
    content: dict[str, Any] = json.loads(path.read_text())
    (tmp_path / "rowwise-0.json").write_text(json.dumps(content | {"mode": "rowwise"}))
    with pytest.raises(ValueError, match="those of bf16 among them"):
        command.merge(tmp_path)
    (tmp_path / "bf16-0.json").write_text(json.dumps(content | {"settings": {}}))
    with pytest.raises(ValueError, match="the same settings"):
        command.merge(tmp_path)


def test_speeds_of_two_gpus_are_added_to_the_losses_that_are_there(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    record.RESULTS.mkdir()
    before = command.merge(trained)
    record.write("recipes", before)
    for name, machine in (("rowwise", "a"), ("blockwise", "a"), ("tensorwise", "b")):
        (tmp_path / name).mkdir()
        speeds = {"machine": machine, "layers": 2, "recipes": {name: {"ratio": 1.5}}}
        (tmp_path / name / "speed.json").write_text(json.dumps(speeds))
        if machine == "a":
            found = command.merge(tmp_path)
    assert found["speed"]["recipes"] == {"rowwise": {"ratio": 1.5}, "blockwise": {"ratio": 1.5}}
    assert found["recipes"] == before["recipes"]
    with pytest.raises(ValueError, match="of one machine"):
        command.merge(tmp_path)


# --- Errors and speed ------------------------------------------------------------------------------------------


def test_the_errors_are_of_the_operands_of_a_trained_model(data: Data) -> None:
    result = errors.measure([*VARIANTS], CONFIG, data)
    assert result["layers"] == 7
    found = result["recipes"]
    assert found.keys() == VARIANTS.keys() - {CONTROL}
    for row in found.values():
        assert all(5 < row[gemm]["worst"] <= row[gemm]["median"] < 70 for gemm in ("y", "dx", "dw"))
    medians = {name: {gemm: row[gemm]["median"] for gemm in row} for name, row in found.items()}
    assert medians["bf16"]["dw"] == pytest.approx(medians["rowwise_dw_bf16"]["dw"], abs=1)
    assert medians["bf16"]["y"] > medians["rowwise"]["y"] + 10
    assert medians["tensorwise_e4m3"]["dx"] > medians["tensorwise"]["dx"] + 2  # a bit more of mantissa
    assert medians["rowwise"]["dx"] > medians["rowwise_stochastic"]["dx"] + 0.5


def test_the_operands_are_those_of_the_layer(data: Data) -> None:
    trainer, _ = trainer_of(BASE, CONFIG, data)
    restart(trainer, data, 0)
    layers = errors.linears(trainer.model)
    found = errors.operands(trainer, layers, 0)
    for name, layer in layers.items():
        x, dy = found[name]
        assert (x.shape, dy.shape) == ((64, layer.in_features), (64, layer.out_features))
        assert layer.weight.grad is None
    loss = next_token_loss(trainer.model, trainer.data.training.at(0), torch.device("cpu"), "bf16")
    torch.autograd.backward(loss)
    for name, layer in layers.items():
        x, dy = (t.double() for t in found[name])
        assert layer.weight.grad is not None
        assert decibels(dy.t() @ x, layer.weight.grad) > 40


def test_speed_is_measured_once_for_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    names = ["rowwise", "delayed_e5m2_margin_0", "delayed_e5m2_margin_2", "delayed_e4m3_margin_1", "mxfp8", CONTROL]
    tiny = replace(speed.CONFIG, width=64, heads=2, kv_heads=1, mlp_width=128, layers=1)
    result = speed.measure(names, tiny, 32, rounds=2)
    assert {name: row["measured_as"] for name, row in result["recipes"].items()} == {
        **{name: name for name in (BASE, *names[:2])}, names[2]: names[1], **{name: name for name in names[3:5]},
    }  # fmt: skip
    base = result["recipes"].pop(BASE)  # peaks are compared with its peak
    assert (base["ratio"], "peak_bytes" in base) == (1, True)
    for row in result["recipes"].values():
        assert row["median"] > 0
        assert min(row["sqnr"]) > 10


def test_a_wrong_gradient_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __init__(self, sign: int) -> None:
            self.sign = sign

        def step(self) -> list[torch.Tensor]:
            return [torch.ones(4), self.sign * torch.ones(4)]

    runners: Any = {BASE: Wrong(1), "rowwise": Wrong(-1)}
    with pytest.raises(RuntimeError, match="rowwise must be within"):
        speed.check(runners, {"rowwise": {}})


# --- The command -----------------------------------------------------------------------------------------------


def test_the_command_makes_the_table_and_refuses_unknown_recipes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CPU", CONFIG)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / losses.TOKENS).write_bytes((folder / losses.TOKENS).read_bytes())
    command.main(["--cpu", "--recipes", "bf16,rowwise", "--seeds", "1", "--steps", "3", "--out", str(out)])
    result = json.loads((tmp_path / "recipes.json").read_text())
    assert result["settings"]["steps"] == 3
    assert result["errors"]["recipes"].keys() == {"bf16", "rowwise"}
    assert result["speed"] is None
    with pytest.raises(SystemExit, match="unknown recipe 'rowise'"):
        command.main(["--cpu", "--recipes", "rowise"])
    with pytest.raises(SystemExit, match="needs --cpu"):
        command.main([])
