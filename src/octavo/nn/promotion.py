"""Giving a converted layer more precision while its model trains: BF16, or gradients in e5m2.

Parameters, optimizer states and scale histories stay as they are, so a checkpoint from before the change fits the model
after it. A module that fuses layers of one recipe runs them one by one when their recipes differ. Compiled code of the
block that holds the layer is compiled again at its next call. The experts of a layer are one module, and move together.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from octavo.nn.backends import gemm_backends
from octavo.nn.experts import Experts
from octavo.nn.grouped_linear import GroupedLinear
from octavo.nn.linear import RecipeLayer
from octavo.recipe import Gemm, Recipe

PRECISIONS = ("bf16", "e5m2")


def promote(layer: nn.Module, to: str) -> None:
    """Change the recipe of `layer` in place. Leave the block of `octavo.cast_once` first.

    A weight that FSDP2 gathers in eight bits (`octavo.dist.fp8_all_gather`) is still gathered so: in BF16 the GEMMs
    then read the numbers that the eight bits stand for.

    Args:
        layer: a linear layer or the experts of a converted model.
        to: "bf16", for all three GEMMs; or "e5m2", for dy in place of e4m3, which has 14 binades less.

    Raises:
        ValueError: another precision; a layer that is not converted; or "e5m2" for a layer whose dy is not in e4m3, for
            experts, or on a device without the GEMMs.

    Example:
        >>> report = octavo.convert(model, "rowwise")
        >>> promote(model[0], "e5m2")
    """
    if to not in PRECISIONS:
        raise ValueError(f"a layer can move to {' or '.join(PRECISIONS)}; got {to!r}")
    if not isinstance(layer, RecipeLayer | Experts | GroupedLinear) or layer.recipe is None:
        raise ValueError(
            f"promote takes a layer of a model that octavo.convert has converted; got {type(layer).__name__}"
        )
    if to == "bf16":
        layer.recipe = Recipe("bf16", emulate=layer.recipe.emulate)
        return
    recipe = e5m2_gradients(layer)
    if recipe is None:
        raise ValueError(
            f"the gradients of {layer.name} cannot move to e5m2: {layer.recipe.name} has no dy in e4m3, or "
            f"{_device(layer)} has no GEMM for e5m2. Move the layer to bf16"
        )
    assert isinstance(layer, RecipeLayer)
    layer.recipe = recipe
    history = layer.history_of("dy")
    if history is not None and recipe.dy is not None:
        with torch.no_grad():
            history.scale.mul_(history.cast.fmt.max / recipe.dy.fmt.max)
        history.cast = recipe.dy


def e5m2_gradients(layer: Any) -> Recipe | None:
    """The recipe of `layer` with dy in e5m2; None if its dy is not in e4m3, or its device lacks the GEMMs.

    No device has the grouped GEMMs of experts in e5m2.
    """
    recipe: Recipe = layer.recipe
    if not isinstance(layer, RecipeLayer) or recipe.dy is None or not recipe.dy.format.startswith("e4m3"):
        return None
    wider = replace(recipe, name=f"{recipe.name}_e5m2", dx=_in_e5m2(recipe.dx), dw=_in_e5m2(recipe.dw))
    backends = gemm_backends(wider, _device(layer)).values()
    return wider if recipe.emulate or all(backend.name != "none" for backend in backends) else None


def _in_e5m2(gemm: Gemm | None) -> Gemm | None:
    """A GEMM whose first operand is dy, with dy in e5m2."""
    return None if gemm is None else replace(gemm, a=replace(gemm.a, format=gemm.a.format.replace("e4m3", "e5m2")))


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device
