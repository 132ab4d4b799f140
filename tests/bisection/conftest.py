"""A tiny run: one layer of width 16. A step takes some milliseconds on one thread."""

import random

import pytest
import torch

from octavo.train.config import Config

SENTENCE = "a quire of sheets folded three times makes eight leaves an octavo and cut pages"
TINY = {
    "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 32, "context": 16, "batch": 4, "steps": 12,
    "warmup": 1, "learning_rate": 1e-2, "min_learning_rate": 1e-3, "device": "cpu", "save_every": 4,
    "evaluate_every": 12, "evaluate_batches": 1,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Products of a few thousand elements wait for a second thread longer than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text file."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(" ".join(draw.choices(SENTENCE.split(), k=12)) for _ in range(100)))
    return path


@pytest.fixture
def settings(tmp_path, text):
    """settings(**overrides): the configuration of a tiny run in `tmp_path`/run."""
    base = TINY | {"data": (str(text),), "out": str(tmp_path / "run")}
    return lambda **overrides: Config.from_dict(base | overrides)
