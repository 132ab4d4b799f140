"""octavo bench, as it is typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Folders

pytestmark = pytest.mark.slow

Octavo = Callable[..., tuple[Any, str, str]]
SMALL = ("--prompt", "8,16", "--batch", "2", "--tokens", 6, "--rounds", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def folders(made: Folders) -> tuple[Path, str, Path]:
    """The words FOLDER --against MODEL."""
    return made("llama", scheme="channel"), "--against", made("llama")


def test_the_table(octavo: Octavo, folders: tuple[Any, ...]) -> None:
    code, out, err = octavo("bench", *folders, *SMALL)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "check: octavo generates the same 6 greedy tokens as transformers' loop, for 2 prompts"
    assert "loading, and the first call: one prompt of 8 tokens" in lines
    assert "6 new tokens, medians of 2 rounds" in lines
    ways = [("octavo",), ("BF16,", "eager"), ("BF16,", "static")]
    cells = [line.split() for line in lines if line.split()[:1] == ["2"]]
    assert [tuple(cell[1 : 2 + len(way)]) for cell, way in zip(cells, ways * 2, strict=True)] == [
        (prompt, *way) for prompt in ("8", "16") for way in ways
    ]
    assert all("x" in " ".join(cell) for cell in cells)
    assert "peak GB" not in out  # of a GPU
    assert "GB of memory at most, with all models" in out
    assert "vLLM is not installed, so it was not measured" in out


def test_json(octavo: Octavo, folders: tuple[Any, ...]) -> None:
    code, out, err = octavo("bench", *folders, *SMALL, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out, parse_constant=pytest.fail)
    assert found["check"]["ok"] is True
    assert found["grid"] == {"batches": [2], "prompts": [8, 16], "tokens": 6, "rounds": 2, "seed": 0}
    assert found["machine"]["torch"] == torch.__version__
    assert {"octavo", "commit", "transformers", "processor", "gpu"} <= found["machine"].keys()
    for row in found["rows"]:
        whole, first = (sorted(row[f"{name}_seconds"]) for name in ("whole", "prompt"))
        seconds = sum(whole) / 2 - sum(first) / 2
        expected = 2 * 5 / seconds if seconds > 0 else None
        assert row["tokens_per_second"] == (None if expected is None else pytest.approx(expected))


def test_memory_that_does_not_suffice(
    octavo: Octavo, folders: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from speed_examples import too_large

    monkeypatch.setattr("octavo.speed.programs.generation", lambda _model, **_settings: too_large(2))
    sizes = ("--prompt", 8, "--batch", "2,4", "--tokens", 4, "--rounds", 1)
    code, out, err = octavo("bench", *folders, *sizes, "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.count("does not fit: CUDA out of memory. Tried to allocate 3 GiB") == 3


@pytest.fixture(scope="module")
def encoder(made: Folders) -> Path:
    return made("bert", scheme="channel")


def test_errors_are_one_line(
    folders: tuple[Any, ...], encoder: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    packed = folders[0]
    (tmp_path / "run" / "model").mkdir(parents=True)
    for path in (tmp_path / "run", tmp_path / "run" / "model"):
        (path / "config.json").write_text("{}")
    for words, message in (
        ((tmp_path,), "holds no config.json: give a run of octavo train, a folder of octavo pack, or a"),
        ((packed, "--against", packed), f"{packed} is quantized: --against takes a Hugging Face model folder in BF16"),
        ((packed, "--against", tmp_path / "run"), "is a run of octavo train: --against takes a Hugging Face model"),
        ((packed, "--against", tmp_path / "no"), "there is no folder"),
        ((packed, "--prompt", "60", "--tokens", 8), "are 68 tokens, and the model of"),
        ((packed, "--batch", "1,x"), "--batch takes numbers, such as 1,16,64, got '1,x'"),
        ((packed, "--batch", "0"), "batch must be at least 1, got 0"),
        ((packed, "--rounds", 0), "rounds must be at least 1, got 0"),
        ((packed, "--device", "cuda:77"), "cuda:77"),
        ((encoder,), f"{encoder} holds a BertModel, which generates no text"),
    ):
        assert message in refused("bench", *words)
