"""Experts that FSDP2 shards in a watch, and promoted: what one rank with the same tokens finds."""

from typing import Any

import numpy as np
from fsdp_examples import backward, sharded, train
from fsdp_expert_examples import model_of
from ranks import run_ranks
from torch import nn

import octavo
from octavo.dist import fp8_all_gather
from octavo.nn.promotion import promote

ROWS = 96
X, W, DY = range(3)


def brief(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """The records of a brief sample, those of operands in order."""
    with octavo.watch(model, interval=100) as watch:
        backward(model, 0, ROWS)
        watch.step()
        [(operands, layers)] = watch.take()
    return np.sort(operands, order=("layer", "operand")), layers


def of_ranks(rank: int) -> dict[str, Any]:
    whole = model_of(3)  # two ranks cannot share 3 evenly
    wide, gathered = sharded(whole), sharded(whole)
    fp8_all_gather(gathered)
    found: dict[str, Any] = {"one": brief(whole), "wide": brief(wide), "gathered": brief(gathered)}
    for block in (*whole, *gathered):
        promote(block.experts, "bf16")
    ours, theirs = train(gathered, steps=2), train(whole, steps=2)
    found["promoted"] = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
    return found


def test_two_ranks_find_what_one_does() -> None:
    first, second = run_ranks(2, of_ranks)
    operands, layers = first["one"]
    assert len(operands) > 2 * 3 * 2
    for kind in ("wide", "gathered"):
        found, aligned = first[kind]
        for a, b in zip(first[kind], second[kind], strict=True):
            assert np.array_equal(a.view(np.uint8), b.view(np.uint8))
        assert np.array_equal(found[["layer", "operand"]], operands[["layer", "operand"]])
        for name in ("amax", "scale", "kurtosis", "nonfinite", "shift_lost"):
            known = operands["operand"] != W if kind == "gathered" and name in ("amax", "kurtosis") else slice(None)
            assert np.allclose(found[name][known], operands[name][known], rtol=1e-4, equal_nan=True), (kind, name)
        flushed = found["flushed"][found["operand"] == W]
        assert np.isnan(flushed).all() == (kind == "gathered")
        assert np.allclose(aligned["alignment"], layers["alignment"], rtol=1e-5)
    assert first["promoted"] < 0.05  # the ranks read the numbers that bytes stand for
