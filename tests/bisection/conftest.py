"""A tiny run: one layer of width 16. A step takes some milliseconds on one thread."""

import pytest
from tiny_runs import SMALLEST, one_thread, write_text  # noqa: F401, pytest finds the fixture one_thread here

from octavo.train.config import Config

TINY = SMALLEST | {
    "width": 16, "mlp_width": 32, "batch": 4, "steps": 12, "save_every": 4, "evaluate_every": 12, "evaluate_batches": 1,
}  # fmt: skip


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory, 100)


@pytest.fixture
def settings(tmp_path, text):
    """settings(**overrides): the configuration of a tiny run in `tmp_path`/run."""
    base = TINY | {"data": (str(text),), "out": str(tmp_path / "run")}
    return lambda **overrides: Config.from_dict(base | overrides)
