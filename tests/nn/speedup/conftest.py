from collections.abc import Callable
from pathlib import Path

import pytest
from speedup_examples import NATIVE

from octavo.nn import conversion
from octavo.nn import only_if_faster as lookup
from octavo.rates.measured import Machine, Shape


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], list[Shape]]:
    """pretend(machine): this CPU is that GPU, its speedups 1.5 for N > 4096, else 0.5; returns the shapes timed."""
    timed: list[Shape] = []

    def time_linears(recipe: object, shapes: list[Shape], device: object, done: Callable[[], None]) -> list:
        timed.extend(shapes)
        return [(done(), (3.0, 2.0 if n > 4096 else 6.0))[1] for _, _, n in shapes]

    def call(machine: Machine) -> list[Shape]:
        monkeypatch.setattr(conversion, "gemm_backends", lambda *_: NATIVE)
        monkeypatch.setattr(lookup, "this_machine", lambda device: machine)
        monkeypatch.setattr(lookup, "time_linears", time_linears)
        return timed

    return call
