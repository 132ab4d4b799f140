"""What tests of tiny runs share: one thread, a text to train on, and calls around the steps of a run."""

import json
import random

import pytest
import torch

from octavo.train.config import SIZES

SENTENCE = "a quire of sheets folded three times makes eight leaves an octavo and cut pages"
TINY = {
    "layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 32, "batch": 2, "steps": 8,
    "warmup": 2, "learning_rate": 1e-2, "min_learning_rate": 1e-3, "device": "cpu", "log_every": 1,
    "evaluate_every": 4, "evaluate_batches": 2, "save_every": 4,
}  # fmt: skip

SMALLEST = TINY | {
    "layers": 1, "context": 16, "steps": 4, "warmup": 1, "evaluate_every": 2, "evaluate_batches": 3, "save_every": 2,
}  # fmt: skip
SMALLEST_TOML = "".join(f"{name} = {json.dumps(value)}\n" for name, value in SMALLEST.items())


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Products of a few thousand elements wait for a second thread longer than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(base, changes):
    """The settings `base` with `changes`, without the sizes that the model does not read: those of a folder, all."""
    unread = {"llama": (), "mixture": (), "gpt2": ("kv_heads", "mlp_width")}.get(changes.get("model", "llama"), SIZES)
    return {key: value for key, value in base.items() if key not in unread} | changes


def write_text(tmp_path_factory, lines):
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(" ".join(draw.choices(SENTENCE.split(), k=12)) for _ in range(lines)))
    return path


def before_steps(trainer, call):
    step = trainer.step
    trainer.step = lambda: (call(), step())[1]


def after_steps(trainer, call):
    step = trainer.step
    trainer.step = lambda: (step(), call())[0]
