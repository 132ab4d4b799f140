"""bench/gpu/start.py, with a small model on the CPU."""

import json
import sys
from pathlib import Path

import pytest

from bench import record
from bench.gpu import generate, start
from octavo.models import LlamaConfig

pytestmark = pytest.mark.slow

SMALL = LlamaConfig(vocabulary=512, layers=1, width=64, heads=2, kv_heads=1, mlp_width=128, context=64, tied=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return generate.make_folders(SMALL, tmp_path_factory.mktemp("models"), "cpu")


@pytest.fixture
def words(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    wide, packed = folders
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return [str(packed), "--against", str(wide), "--prompt", "8", "--device", "cpu"]


def test_a_start_in_a_new_process(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["start", *words])
    seconds = start.run(start.OCTAVO, start.parse(), tmp_path, "--profile")
    assert all(seconds[key] > 0 for key in start.FIGURES)
    out = capsys.readouterr().out
    assert "Ordered by: cumulative time" in out
    assert "Ordered by: internal time" in out


def test_each_way_starts_in_turn(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start of each way counts for nothing: it fills the caches."""
    started: list[str] = []

    def run(way: str, *_: object) -> dict[str, float]:
        started.append(way)
        return dict.fromkeys(start.FIGURES, float(len(started)))

    monkeypatch.setattr(start, "run", run)
    monkeypatch.setattr(sys, "argv", ["start", *words, "--rounds", "3"])
    start.main()
    assert started == [start.OCTAVO, start.EAGER, *start.WAYS * 3]
    found = json.loads((tmp_path / f"{start.NAME}.json").read_text())
    assert [found["seconds"][way]["load"] for way in start.WAYS] == [6, 7, 8]
    assert found["times_bf16"] == {start.OCTAVO: 6 / 8, start.NEW_MACHINE: 7 / 8, start.EAGER: 1}
