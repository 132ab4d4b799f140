"""Modules of one class, converted with different recipes and compiled in one process."""

import copy

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.numerics.scaling import History
from octavo.recipe import PRESETS, delayed

RECIPES = [PRESETS[name]() for name in ("rowwise", "tensorwise", "blockwise", "rowwise_dw_bf16")]
RECIPES += [delayed(history=History(margin=margin)) for margin in (1.0, 2.0)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x).relu())
        return found


@pytest.mark.slow
def test_a_second_recipe_compiles_after_the_first() -> None:
    torch.manual_seed(0)
    original, x = Block(), torch.randn(16, 32)
    found = []
    for recipe in RECIPES:
        eager, compiled = (copy.deepcopy(original) for _ in range(2))
        for model in (eager, compiled):
            octavo.convert(model, recipe)
        compiled.compile(backend="aot_eager")
        for model in (eager, compiled):
            for _ in range(2):
                model(x).square().sum().backward()
                octavo.update_scales(model)
        for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        found.append(compiled.a.weight.grad)
    assert not any(torch.equal(found[0], other) for other in found[1:])
