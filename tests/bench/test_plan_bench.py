"""bench/gpu/plan.py, the model small and on the CPU."""

from bench.gpu import plan
from octavo.plan.hardware import find_gpu

SMALL = plan.CONFIG.change(
    **{"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 96, "context": 32, "compile.blocks": False},
    device="cpu",
)


def test_planned_and_measured_beside_each_other() -> None:
    [row] = plan.measure([(1, SMALL.change(recipe="rowwise"))], 1, find_gpu("h200"))
    assert row["seconds"] > 0
    assert set(row["errors"]) == {"time"}  # the CPU has no peak of a GPU
    assert row["planned"]["peak_bytes"] > 16 * 2 * 64 * (64 + 96)
    assert "rowwise  none      1 GPU" in plan.line(row)


def test_two_processes_share_a_configuration() -> None:
    [row] = plan.measure([(2, SMALL.change(recipe="bf16", batch=4))], 2, find_gpu("h200"))
    assert (row["gpus"], row["recipe"]) == (2, "bf16")
    assert "error" not in row


def test_a_configuration_that_fails_does_not_end_the_others() -> None:
    rows = plan.measure([(1, SMALL.change(data=["nowhere.txt"])), (1, SMALL)], 1, find_gpu("h200"))
    assert ["error" in row for row in rows] == [True, False]
    assert "exit code" in plan.line(rows[0])


def test_the_six_configurations() -> None:
    assert len(plan.CONFIGURATIONS) == 6
    for gpus, settings in plan.CONFIGURATIONS:
        row = plan.compared(plan.CONFIG.change(**settings), gpus, find_gpu("h200"), {"error": "not run"})
        assert row["planned"]["peak_bytes"] < find_gpu("h200").memory
