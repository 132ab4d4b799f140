"""bench/gpu/plan.py, the model small and on the CPU."""

from bench.gpu import plan
from octavo.plan.hardware import find_gpu

SMALL = plan.CONFIG.change(
    **{"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 96, "context": 32, "compile.blocks": False},
    device="cpu",
)


def test_planned_and_measured_beside_each_other() -> None:
    """The first configuration fails; the others, of one process and of two, are measured all the same."""
    chosen = [
        (1, SMALL.change(data=["nowhere.txt"])),
        (1, SMALL.change(recipe="rowwise")),
        (2, SMALL.change(recipe="bf16", batch=4)),
    ]
    failed, one, two = plan.measure(chosen, 2, find_gpu("h200"))
    assert "exit code" in plan.line(failed)
    assert one["seconds"] > 0
    assert set(one["errors"]) == {"time"}  # the CPU has no peak of a GPU
    assert one["planned"]["peak_bytes"] > 16 * 2 * 64 * (64 + 96)
    assert "rowwise  none      1 GPU" in plan.line(one)
    assert (two["gpus"], two["recipe"]) == (2, "bf16")
    assert ["error" in row for row in (failed, one, two)] == [True, False, False]


def test_the_six_configurations() -> None:
    assert len(plan.CONFIGURATIONS) == 6
    for gpus, settings in plan.CONFIGURATIONS:
        row = plan.compared(plan.CONFIG.change(**settings), gpus, find_gpu("h200"), {"error": "not run"})
        assert row["planned"]["peak_bytes"] < find_gpu("h200").memory
