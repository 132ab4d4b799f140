"""The modules that run several layers in one pass, and the FSDP2 units that prevent it.

FSDP2 gathers the weights of a unit when the unit is called. A fused module reads weights of layers that it does not
call. So the unit must hold the fused module and its layers, as a decoder block does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from octavo.dist.fsdp_units import UnitWeight, is_unit
from octavo.nn.linear import Linear
from octavo.nn.mlp import FusedMLP
from octavo.nn.norm_linear import NormLinear
from octavo.nn.transformers_fusion import DecoderLayer
from octavo.nn.weight_cache import WeightCache


@dataclass(frozen=True, eq=False)
class FusedModule:
    """A module that runs several layers in one pass.

    Args:
        name: in the model.
        stacked: the layers that run as one GEMM.
        layers: all layers that run in the pass.
        unwatched: the modules that must have no hooks: `layers`, and others that decide whether it fuses them.
        cache: of the quantized weights of `stacked`.
        falls_back: whether it runs the layers one by one where it cannot fuse them.
    """

    name: str
    stacked: Sequence[nn.Module]
    layers: Sequence[nn.Module]
    unwatched: Sequence[nn.Module]
    cache: WeightCache
    falls_back: bool


def fused_modules(model: nn.Module) -> list[FusedModule]:
    """The modules of `model` that fuse their layers, if no hook prevents it: all are converted, with one recipe."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, NormLinear):
            linears, owner = module.linears, module.owner
            falls_back = isinstance(owner, DecoderLayer)
            unwatched = [*linears, owner.self_attn, owner.mlp] if isinstance(owner, DecoderLayer) else linears
            found.append(FusedModule(name, linears, linears, unwatched, module.weight_cache, falls_back))
        elif isinstance(module, FusedMLP):
            layers = (*module.inner, module.outer)
            found.append(FusedModule(name, module.inner, layers, layers, module.weight_cache, True))
    return [module for module in found if _has_one_recipe(module.layers)]


def unfusing_units(
    model: nn.Module, modules: Sequence[FusedModule], units: Mapping[nn.Module, UnitWeight]
) -> dict[str, str]:
    """The names of the units that prevent a fusion, each with the name of the module that would have fused.

    Raises:
        ValueError: a unit gathers weights that a module outside of it reads, and cannot do without.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for module in modules:
        found |= {names[part]: module.name for part in module.unwatched if is_unit(part)}
        for layer in module.layers:
            if layer not in units or is_unit(layer) or _holds(units[layer].unit, module.name):
                continue
            if not module.falls_back:
                raise ValueError(
                    f"{module.name} reads the weight of {names[layer]}, which fully_shard gathers in the unit "
                    f"{units[layer].unit}, when that is called: call fully_shard on a module that holds both, such as "
                    "the decoder block"
                )
            found[units[layer].unit] = module.name
    return found


def _has_one_recipe(layers: Sequence[nn.Module]) -> bool:
    converted = [layer for layer in layers if isinstance(layer, Linear)]
    recipes = {layer.recipe for layer in converted}
    return len(converted) == len(layers) and len(recipes) == 1 and recipes.pop().fusable is not None


def _holds(unit: str, name: str) -> bool:
    """Whether the unit called `unit` is the module called `name`, or holds it."""
    return not unit or name == unit or name.startswith(f"{unit}.")
