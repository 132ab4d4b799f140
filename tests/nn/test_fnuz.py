"""The formats of AMD's MI300 through the same layers: as exact as the OCP formats, by emulation."""

import pytest
import torch
from metrics import sqnr
from torch import Tensor, nn

import octavo
from octavo.recipe import fnuz


def passes(recipe: octavo.Recipe | None) -> list[Tensor]:
    """y, dx and dw of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 64))
    if recipe is not None:
        octavo.convert(model, recipe)
    x, dy = torch.randn(80, 96, requires_grad=True), torch.randn(80, 64)
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(layer.weight.grad for layer in (model[0], model[2]))]


@pytest.mark.parametrize("preset", ["rowwise", "rowwise_dw_bf16", "tensorwise", "delayed"])
@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_both_passes_are_as_exact_as_with_the_ocp_formats(preset: str, gradients: str) -> None:
    recipe, exact = octavo.PRESETS[preset](gradients), passes(None)
    for wide, ocp, own in zip(exact, passes(recipe), passes(fnuz(recipe)), strict=True):
        assert not torch.equal(ocp, own)
        assert sqnr(wide, own) > sqnr(wide, ocp) - 1
        assert sqnr(wide, own) > 18
