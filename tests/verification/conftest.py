"""Models, and packings of one of them. No test changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packed_examples import small_shards
from verify_examples import make_model, write_text

from octavo.calibration import calibrate
from octavo.evaluation import PromptOptions
from octavo.packing import pack
from octavo.verification import pipeline


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by name, and a "text" to take prompts from."""
    root = tmp_path_factory.mktemp("models")
    made = {name: make_model(root / name, name) for name in ("llama", "mistral", "qwen2", "opt", "bert")}
    return made | {"text": write_text(root / "text.txt")}


@pytest.fixture
def no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a reader is given a folder."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a reader was tried")

    monkeypatch.setattr(pipeline, "try_readers", refuse)


@pytest.fixture(scope="session")
def model(models: dict[str, Path]) -> Path:
    """The Llama."""
    return models["llama"]


@pytest.fixture(scope="session")
def good(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packings of the Llama, by scheme or layout."""
    model, root = models["llama"], tmp_path_factory.mktemp("packed")
    calibrate(model, [str(models["text"])], root / "calibrated", prompts=PromptOptions(8, 32))
    options: dict[str, dict[str, Any]] = {
        "channel": {}, "block": {"scheme": "block"}, "fp8": {"scheme": "block", "layout": "fp8"},
        "mx": {"scheme": "mx"}, "tensor": {"scheme": "tensor"},
        "static": {"scheme": "static", "calibration": root / "calibrated"},
    }  # fmt: skip
    folders = {name: pack(model, root / name, **how).folder for name, how in options.items()}
    with small_shards(100_000):
        return folders | {"shards": pack(model, root / "shards").folder}
