"""Recipes as a person may write them to a file: the settings of each operand drawn at random, or chosen."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.evaluation.metrics import energies, sqnr
from octavo.recipe import get_recipe

GRANULARITIES = ("tensor", "row", "group:32", "group:128", "block:32x32", "block:1x64")
RULES = ("max", "most_recent", "ema", "percentile")


def operand(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "format": draw.choice(("e4m3", "e5m2")),
        "granularity": draw.choice(GRANULARITIES),
        "scale": draw.choice(("fp32", "pow2", "e8m0")),
        "rounding": draw.choice(("nearest", "stochastic")),
        "relative_floor": draw.choice((0, 2**-8)),
    }
    if fields["granularity"] == "tensor" and draw.random() < 0.5:
        fields["history"] = {"length": draw.choice((1, 4)), "rule": draw.choice(RULES)}
        fields["history"] |= {"margin": draw.choice((0, 1, 2)), "interval": draw.choice((1, 3))}
    return fields


def drawn(draw: random.Random) -> dict[str, Any]:
    """A recipe in which each operand has one cast, or another in its second GEMM, and some GEMMs are in BF16."""
    casts = {name: operand(draw) for name in ("x", "w", "dy")}

    def second(name: str) -> dict[str, Any]:
        return casts[name] if draw.random() < 0.7 else operand(draw)

    gemms = {
        "y": {"x": casts["x"], "w": casts["w"]},
        "dx": {"dy": casts["dy"], "w": second("w")},
        "dw": {"dy": second("dy"), "x": second("x")},
    }
    rotate = [name for name in gemms if draw.random() < 0.2]
    return {"rotate": rotate} | {name: g for name, g in gemms.items() if draw.random() < 0.85}


def trained(recipe: Path | None) -> list[Tensor]:
    """y, dx and dw of the third step of a layer; without a recipe in float32."""
    torch.manual_seed(0)
    x, dy = torch.randn(48, 128) * torch.rand(48, 1).exp(), torch.randn(48, 256) * 1e-3
    layer = nn.Linear(128, 256)
    model = nn.Sequential(layer)
    if recipe is not None:
        octavo.convert(model, recipe)
    found = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        layer.weight.grad = None
        y = model(leaf)
        y.backward(dy)
        octavo.update_scales(model)
        assert leaf.grad is not None
        assert layer.weight.grad is not None
        found = [y.detach(), leaf.grad, layer.weight.grad]
    return found


def check(recipe: Path) -> None:
    for exact, actual in zip(trained(None), trained(recipe), strict=True):
        assert sqnr(*energies(exact, actual)) > 12, recipe.read_text()


@pytest.mark.parametrize("part", range(4))
def test_recipes_drawn_at_random_train(tmp_path: Path, part: int) -> None:
    draw, path, accepted = random.Random(part), tmp_path / "mine.json", 0
    for _ in range(40):
        path.write_text(json.dumps(drawn(draw)))
        try:
            get_recipe(path)
        except ValueError:  # no GEMM takes these casts together
            continue
        check(path)
        accepted += 1
    assert accepted > 20


@pytest.mark.parametrize(
    ("granularity", "history"), [("tensor", None), ("tensor", {"margin": 1, "interval": 2}), ("block:32x32", None)]
)
def test_scales_of_one_byte_train_by_tensor_and_by_square(
    tmp_path: Path, granularity: str, history: dict[str, float] | None
) -> None:
    cast = {"granularity": granularity, "scale": "e8m0", "history": history}
    gemms = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("dy", "x")}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({gemm: dict.fromkeys(operands, cast) for gemm, operands in gemms.items()}))
    check(path)
