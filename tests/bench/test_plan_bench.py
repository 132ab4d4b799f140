"""bench/gpu/plan.py, the model small and on the CPU."""

import json
from pathlib import Path

import pytest

from bench.gpu import plan
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
    assert set(one["errors"]) == {"time"}  # the CPU has no peak of a GPU
    assert one["planned"]["peak_bytes"] > 16 * 2 * 64 * (64 + 96)
    assert "rowwise  none      1 GPU" in plan.line(one)


def test_the_plan_is_within_its_aims_of_what_was_measured() -> None:
    files = sorted((Path(plan.__file__).parents[1] / "results").glob("gpu_plan_*.json"))
    assert files
    for file in files:
        found = [plan.planned_again(row) for row in json.loads(file.read_text())["rows"]]
        assert len(found) == len(plan.CONFIGURATIONS)
        for row in found:
            assert all(abs(error) <= plan.AIMS[name] for name, error in row["errors"].items()), plan.line(row)


def test_a_row_of_another_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="no configuration"):
        plan.planned_again({"model": "8b", "recipe": "bf16", "checkpointing": "selective", "gpus": 4, "gpu": "h200"})


@pytest.mark.parametrize("model", plan.MODELS)
def test_the_six_configurations(model: str) -> None:
    assert len(plan.CONFIGURATIONS) == 6
    for each in plan.CONFIGURATIONS:
        row = plan.compared(plan.configured(model, *each), each[0], find_gpu("h200"), {"error": "not run"})
        assert row["planned"]["peak_bytes"] < find_gpu("h200").memory
