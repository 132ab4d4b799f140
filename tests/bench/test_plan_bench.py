"""bench/gpu/plan.py, the model small and on the CPU."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import record
from bench.gpu import plan
from bench.report.plan import configuration_machines, configurations, image_errors
from octavo.plan.hardware import find_gpu

SMALL = plan.MODELS["8b"].change(
    **{"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 96, "context": 32, "compile.blocks": False},
    device="cpu",
)


@pytest.mark.slow
def test_planned_and_measured_beside_each_other() -> None:
    """The first configuration fails; the other, of two processes, is measured all the same."""
    chosen = [(1, SMALL.change(data=["nowhere.txt"])), (2, SMALL.change(recipe="bf16", batch=4))]
    failed, two = plan.measure(chosen, 2, find_gpu("h200"))
    assert "exit code" in plan.line(failed)
    assert two["seconds"] > 0
    assert (two["gpus"], two["recipe"]) == (2, "bf16")
    assert ["error" in row for row in (failed, two)] == [True, False]


def test_one_process_writes_what_the_line_shows(tmp_path: Path) -> None:
    config, result = SMALL.change(recipe="rowwise", out=str(tmp_path / "run")), tmp_path / "result.json"
    (tmp_path / "task.json").write_text(json.dumps({"config": config.to_dict(), "out": str(result)}))
    plan.work(tmp_path / "task.json")
    one = plan.compared(config, 1, find_gpu("h200"), json.loads(result.read_text()))
    assert one["seconds"] > 0
    assert 0 < one["host_seconds"] < 2 * one["seconds"]  # without a GPU the host does all of it
    assert set(one["errors"]) == {"time"}  # the CPU has no peak of a GPU
    assert one["planned"]["peak_bytes"] > 16 * 2 * 64 * (64 + 96)
    assert "rowwise  none      1 GPU" in plan.line(one)
    assert f"{one['host_seconds'] * 1e3:.1f} ms of the host" in plan.line(one)


def test_the_plan_is_within_its_aims_of_what_was_measured() -> None:
    missed = set()
    files = sorted((Path(plan.__file__).parents[1] / "results").glob("gpu_plan_*.json"))
    assert files
    for file in files:
        found = [plan.planned_again(row) for row in json.loads(file.read_text())["rows"]]
        assert len(found) == len(plan.CONFIGURATIONS)
        for row in found:
            names = [name for name, error in row["errors"].items() if abs(error) > plan.AIMS[name]]
            missed |= {(row["model"], row["gpus"], row["recipe"], row["checkpointing"], name) for name in names}
    assert not missed


def test_the_plan_of_vit_is_within_its_aims_of_what_was_measured() -> None:
    path = Path(plan.__file__).parents[1] / "results/gpu_vision.json"
    rows = list(image_errors({"gpu_vision": json.loads(path.read_text())}))
    assert [row["recipe"] for row in rows] == ["bf16", "rowwise"]
    for row in rows:
        assert abs(float(row["error of ms"].rstrip("%"))) <= 100 * plan.AIMS["time"]
        assert abs(float(row["error of peak GB"].rstrip("%"))) <= 100 * plan.AIMS["memory"]


def test_a_row_of_another_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="no configuration"):
        plan.planned_again({"model": "8b", "recipe": "bf16", "checkpointing": "selective", "gpus": 4, "gpu": "h200"})


def test_a_run_that_was_cut_off_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time one of six configurations fails and one is not reached; the second time these two are run."""
    runs: list[int] = []

    def measure(configs: list[tuple[int, plan.Config]], there: int, gpu: plan.Gpu) -> Iterator[plan.Row]:
        runs.append(len(configs))
        for gpus, config in configs[: 5 if len(runs) == 1 else None]:
            failed = {"error": "exit code 1"} if len(runs) == 1 and gpus == 2 else {"seconds": [1.0], "peak_bytes": 1e9}
            yield plan.compared(config, gpus, gpu, failed)

    monkeypatch.setattr(plan, "measure", measure)
    monkeypatch.setattr(plan, "gpu_here", lambda: find_gpu("h200"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "facts", lambda: {"commit": f"commit {len(runs)}"})
    monkeypatch.setattr(sys, "argv", ["plan", "--model", "1b", "--missing"])
    for _ in range(3):
        plan.main()
    assert runs == [6, 2, 0]
    result = json.loads((tmp_path / "gpu_plan_1b.json").read_text())
    assert [plan.configuration_of(row) for row in result["rows"]] == plan.CONFIGURATIONS
    commits = [row.get("measured before, at commit") for row in configurations({"gpu_plan_1b": result})]
    assert commits == [*["commit 1"] * 4, None, None]
    assert result["machine"]["commit"] == "commit 2"


def test_the_page_takes_each_model_that_was_measured() -> None:
    """One row of two misses the aim of the time, and one was not measured."""
    gpu, config = find_gpu("h200"), plan.configured("3b", 1, "bf16", "none")
    planned = plan.compared(config, 1, gpu, {"error": "not run"})["planned"]
    exact = {"seconds": [planned["seconds"]], "peak_bytes": planned["peak_bytes"], "host_seconds": 0.0321}
    slow = exact | {"seconds": [1.2 * planned["seconds"]]}
    rows = [{"model": "3b", **plan.compared(config, 1, gpu, found)} for found in (exact, slow, {"error": "not run"})]
    results = {"gpu_plan_3b": {"machine": {"gpu": "H200", "commit": "1a"}, "rows": rows}}
    table = list(configurations(results))
    assert [row["model"] for row in table] == ["3b"] * 3
    assert [row.get("ms of the host, measured") for row in table] == ["32.1", "32.1", None]
    line = configuration_machines(results)
    assert line == "- `3b`: 2 of 2 within 5 % of the memory and 1 of 2 within 10 % of the time. H200, commit 1a."


@pytest.mark.parametrize("model", plan.MODELS)
def test_the_six_configurations(model: str) -> None:
    assert len(plan.CONFIGURATIONS) == 6
    for each in plan.CONFIGURATIONS:
        row = plan.compared(plan.configured(model, *each), each[0], find_gpu("h200"), {"error": "not run"})
        assert row["planned"]["peak_bytes"] < find_gpu("h200").memory
