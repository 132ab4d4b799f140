"""bench/gpu/start.py, with a small model on the CPU."""

import json
import sys
from pathlib import Path

import pytest

from bench import record
from bench.gpu import generate, start
from octavo.models import LlamaConfig

SMALL = LlamaConfig(vocabulary=512, layers=1, width=64, heads=2, kv_heads=1, mlp_width=128, context=64, tied=False)


def test_each_way_starts_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide, packed = generate.make_folders(SMALL, tmp_path / "models", "cpu")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    words = [str(packed), "--against", str(wide), "--rounds", "1", "--prompt", "8", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["start", *words])
    start.main()
    found = json.loads((tmp_path / f"{start.NAME}.json").read_text())
    assert found["times_bf16"][start.EAGER] == 1
    assert all(seconds > 0 for way in start.WAYS for seconds in found["seconds"][way].values())
    monkeypatch.setattr(sys, "argv", ["start", *words, "--profile"])
    start.main()
    assert "load_transformers" in capsys.readouterr().out
