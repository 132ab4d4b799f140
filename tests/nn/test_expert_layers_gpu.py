"""Experts on a Hopper GPU: accuracy against BF16, the same bits compiled and eager, and no wait for the device."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from gpus import ONLY_HOPPER, no_waits, poison
from grouped_examples import results
from metrics import sqnr

import octavo
from octavo.nn import Experts
from octavo.recipe import blockwise, mxfp8, rowwise

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

RECIPES = [rowwise(), blockwise(), mxfp8()]
SHAPES = {"few": (8, 512, 1024, 2, 1000), "small": (128, 256, 128, 8, 700)}  # E, K, F, top_k, T


def example(shape: str) -> tuple[Experts, tuple[torch.Tensor, ...]]:
    e, k, f, top_k, t = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("cuda"):
        module, score = Experts(e, k, f).bfloat16(), torch.rand(t, e)
        score[:, 3] = -1  # nobody chooses expert 3
        x, dy = (torch.randn(t, k).bfloat16() for _ in range(2))
        weight = torch.rand(t, top_k, requires_grad=True)
    return module, (x.requires_grad_(), score.topk(top_k).indices, weight, dy)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_accuracy_and_the_same_bits_again(shape, recipe):
    module, values = example(shape)
    exact = results(module, *values)
    module.recipe = recipe
    found = results(module, *values)
    assert all(sqnr(a, b) > 22 for a, b in zip(exact, found, strict=True))
    assert not found[3][3].any()
    assert not found[4][3].any()
    for module.recompute in (False, recipe.fusable is not None):
        assert all(torch.equal(a, b) for a, b in zip(found, results(module, *values), strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_code_has_the_same_bits(shape, recipe):
    module, values = example(shape)
    module.recipe = recipe
    expected = results(module, *values)
    module.compile(fullgraph=True)
    for one, other in zip(results(module, *values), expected, strict=True):
        if recipe.fusable is None:
            assert sqnr(other, one) > 30  # Inductor rounds the products of the activation less often
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_no_step_waits_for_the_device(recipe):
    module, values = example("few")
    module.recipe = recipe
    results(module, *values)
    with no_waits():
        module(*values[:3]).backward(values[3])


def test_a_watch_records_them_without_waiting_and_changes_nothing():
    module, values = example("small")
    octavo.convert(module, "rowwise")
    expected = results(module, *values)
    with octavo.watch(module, interval=1) as watch:
        for _ in range(2):
            found = results(module, *values)
            watch.step()
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        with no_waits():
            module(*values[:3]).backward(values[3])
        watch.step()
        sample = watch.latest()
    assert (sample.operands["sqnr"] > 22).all()
    assert len(sample.operands) == 2 * 3
    assert (sample.experts["idle"] == 1).all()
    assert (sample.experts["load"] > 1).all()
    assert (sample.experts["sqnr"] > 15).all()


def brief(module: Experts, values: tuple[torch.Tensor, ...]) -> np.ndarray:
    """The records of the operands in a brief sample, which takes no wait for the device."""
    with octavo.watch(module, interval=100) as watch:
        with no_waits() if values[0].is_cuda else nullcontext():
            module(*values[:3]).backward(values[3])
        watch.step()
        [(operands, _)] = watch.take()
    return np.sort(operands, order=("layer", "operand"))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rules_judge_experts_by_the_numbers_of_a_cpu(shape):
    module, values = example(shape)
    octavo.convert(module, "rowwise")
    results(module, *values)
    poison()
    found = brief(module, values)
    host = tuple(t.detach().cpu().requires_grad_(t.requires_grad) for t in values)
    expected = brief(copy.deepcopy(module).cpu(), host)
    assert (found[["layer", "operand"]] == expected[["layer", "operand"]]).all()
    assert len(found) > 2 * SHAPES[shape][0]
    assert not found["nonfinite"].any()
    same = found["operand"] == 1
    for name in ("amax", "scale", "kurtosis", "flushed"):
        assert found[name][same] == pytest.approx(expected[name][same], rel=1e-3), name
        assert found[name] == pytest.approx(expected[name], rel=0.2, abs=1e-3), name
