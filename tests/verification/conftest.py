"""Packings of a Llama. No test changes them."""

from pathlib import Path
from typing import Any

import pytest
from packed_examples import small_shards
from tiny_models import Folders

from octavo.packing import pack
from octavo.verification import verifier as pipeline


@pytest.fixture
def no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a reader is given a folder."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a reader was tried")

    monkeypatch.setattr(pipeline, "try_readers", refuse)


@pytest.fixture
def model(made: Folders) -> Path:
    """The Llama."""
    return made("llama")


@pytest.fixture(scope="session")
def good(made: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packings of the Llama, by scheme or layout."""
    folders = {scheme: made("llama", scheme=scheme) for scheme in ("channel", "block", "mx", "tensor", "static")}
    with small_shards(100_000):
        shards = pack(made("llama"), tmp_path_factory.mktemp("packed") / "shards").folder
    return folders | {"fp8": made("llama", scheme="block", layout="fp8"), "shards": shards}
