"""Experts that FSDP2 shards in a watch, and promoted: what one rank with the same tokens finds."""

from typing import Any

import numpy as np
import pytest
import torch
from fsdp_examples import backward, sharded, train
from fsdp_expert_examples import model_of
from ranks import run_ranks
from tensor_parallel_examples import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.dist import expert_parallel, fp8_all_gather
from octavo.nn import Experts
from octavo.nn.promotion import promote
from octavo.telemetry.experts import first_matrix

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


@pytest.mark.slow
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


def first_of_two_dimensions(rank: int) -> tuple[int, list[int]]:
    """`first_matrix` and the numbers of the matrices where expert parallelism and FSDP2 divide the experts."""
    mesh, model = mesh_of(2, 2), nn.Sequential(Experts(6, 16, 16))
    with torch.no_grad():
        model[0].down_proj.copy_(torch.arange(6.0).reshape(6, 1, 1))
    octavo.convert(model)
    expert_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    weight: Any = model[0].down_proj
    return first_matrix(weight), weight.to_local()[:, 0, 0].tolist()


def test_the_first_matrix_under_expert_parallelism_and_fsdp() -> None:
    found = run_ranks(4, first_of_two_dimensions)
    assert [numbers for _, numbers in found] == [[0, 1], [3, 4], [2], [5]]
    assert all(first == numbers[0] for first, numbers in found)
