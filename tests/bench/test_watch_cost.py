"""The benchmarks of the watch, rehearsed at tiny sizes on a CPU."""

import pytest
from test_stack import CONFIG

from bench.cpu import watch as on_cpu
from bench.gpu import watch as on_gpu
from bench.gpu.modes import FUSED_EAGER


def test_the_stack_is_timed_with_and_without_a_watch():
    found = on_gpu.measure(FUSED_EAGER, rounds=2, repeat=1, many=3, config=CONFIG, tokens=16, device="cpu")
    assert found["equal"] == {"outputs": True}
    assert set(found["ms"]) == {on_gpu.UNSAMPLED, on_gpu.BRIEF, on_gpu.FULL, on_gpu.DEFAULT}
    assert found["sample_ms"][on_gpu.FULL] > 0
    assert found["memory"] is None


def test_the_gradients_of_a_small_stack_are_equal():
    found = on_gpu.small_equality(FUSED_EAGER, config=CONFIG, tokens=16, device="cpu")
    assert found == {"repeated": True, "watched": True}


def test_a_sample_takes_time_on_a_cpu(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a quire of sheets folded three times makes eight leaves\n" * 200)
    sizes = ["--data", str(text), "--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2"]
    found = on_cpu.measure(8, *sizes)
    step, extra = found["step_ms"], found["extra_ms"]
    assert extra["both"] > 0
    expected = (extra["not sampled"] * 90 + extra["brief"] * 9 + extra["both"]) / 100 / step
    assert found["overhead"] == pytest.approx(expected)
