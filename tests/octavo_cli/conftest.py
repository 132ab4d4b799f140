"""Tiny runs of `octavo train` for the tests of commands, made once."""

import json
import random
from pathlib import Path

import pytest
from tiny_runs import SMALLEST, SMALLEST_TOML

from octavo.numerics import History
from octavo.packing import pack
from octavo.recipe import delayed
from octavo.train.config import Config
from octavo.train.processes import training_console
from octavo.train.trainer import start_run


@pytest.fixture(scope="session")
def book() -> str:
    return " ".join(random.Random(0).choices(["folio", "quarto", "octavo", "duodecimo"], k=400))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, book: str) -> Path:
    """A folder with text.txt, the runs bf16 and fp8 (delayed), and fp8 packed. Not to be changed."""
    root = tmp_path_factory.mktemp("trained")
    (root / "text.txt").write_text(book)
    for name, recipe in (("bf16", "bf16"), ("fp8", "delayed")):
        settings = SMALLEST | {"data": (str(root / "text.txt"),), "recipe": recipe, "out": str(root / name)}
        start_run(Config(**settings), training_console()).run()
    pack(root / "fp8", root / "packed")
    return root


@pytest.fixture
def here(tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with text.txt, other.txt, tiny.toml, and mine.json: delayed with another margin."""
    mine = delayed(history=History(8, margin=2.0, interval=2)).to_dict() | {"name": "mine"}
    files = {"tiny.toml": SMALLEST_TOML, "mine.json": json.dumps(mine)}
    files |= {"text.txt": book[: len(book) // 2], "other.txt": book[len(book) // 2 :]}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path
