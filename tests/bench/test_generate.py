"""bench/gpu/generate.py, with a small model on the CPU."""

import json
import sys
from pathlib import Path

import pytest

from bench import record
from bench.gpu import generate, llama
from bench.gpu.modes import FP8_CACHE, HOOKED
from octavo.models import LlamaConfig
from octavo.speed.programs import EAGER, OCTAVO, STATIC

pytestmark = pytest.mark.slow

SMALL = LlamaConfig(vocabulary=512, layers=1, width=64, heads=2, kv_heads=1, mlp_width=128, context=64, tied=False)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The benchmark with these words, of the small model; returns what it wrote."""
    folder = tmp_path / "models"
    original = generate.Bench
    monkeypatch.setattr(generate, "Bench", lambda shape, folder, _: original(shape, folder, "cpu"))
    monkeypatch.setattr(llama, "CONFIG", SMALL)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for name, value in {"PROMPTS": (8, 16), "PROMPT": 16, "TOKENS": 4}.items():
        monkeypatch.setattr(generate, name, value)

    def run(*words: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["generate", "--layers", "1", "--folder", str(folder), *words])
        generate.main()
        return json.loads((tmp_path / f"{generate.NAME}.json").read_text())

    return run


def test_sections_are_added_to_those_of_before(call, capfd: pytest.CaptureFixture[str]) -> None:
    found = call("--only", "prompt", "--batches", "1,2")
    assert [row["way"] for row in found["prompt"]] == [OCTAVO, FP8_CACHE, EAGER] * 2
    assert [start["program"] for start in found["starts"]] == [OCTAVO, HOOKED, FP8_CACHE, "transformers, BF16"]
    assert found[f"check of {OCTAVO}"]["equal"] == [4, 4]
    assert "machine" in found
    assert "packing to" in capfd.readouterr().out
    again = call("--only", "decode 2", "--batches", "1,2")
    assert again["prompt"] == found["prompt"]
    assert [row["way"] for row in again["decode 2"]] == [OCTAVO, HOOKED, FP8_CACHE, EAGER, STATIC]
    assert {row["batch"] for row in again["decode 2"]} == {2}
    assert "packing to" not in capfd.readouterr().out  # the folders are there


def test_a_section_that_does_not_exist_is_refused_before_anything_is_made(call, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--only takes prompt, decode 1, graphs 1, got 'decode 7'"):
        call("--only", "decode 7", "--batches", "1")
    assert not (tmp_path / "models").exists()
