"""FSDP2's all-gather of the weights in eight bits.

The scales of a rank's rows are found once, after an optimizer step, and every all-gather until the next step sends
them. The bytes are made with them. They are freed when the first forward pass has sent those of all weights, and later
all-gathers cast the rows again. Bytes and scales equal those that one rank makes of the whole weight
(`octavo.dist.shard_quantization`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from octavo.dist.fsdp_units import UnitWeight, check_sharded, has_run, sharded_weights
from octavo.dist.fusion import fused_modules, unfusing_units
from octavo.dist.gather_report import GatherReport, GatherRow
from octavo.dist.shard_cache import ShardCache
from octavo.dist.sharded_weight import ShardedWeight, WeightStack
from octavo.nn.expert_conversion import computed_stacks
from octavo.nn.layer_limits import check_module
from octavo.nn.linear import Linear, RecipeLayer


def fp8_all_gather(model: nn.Module) -> GatherReport:
    """Make FSDP2 gather the converted weights of `model` as eight-bit numbers and scales, where it can.

    Call it after the last `fully_shard` and before the first forward pass. The model may be on the meta device.

        octavo.convert(model, "rowwise")
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        report = fp8_all_gather(model)

    Parameters, `state_dict`, optimizers and checkpoints stay as they are: plain DTensors of the parameters' dtype. A
    rank quantizes its own rows after each optimizer step: one byte a weight, divided by the ranks. It frees the bytes
    once the next forward pass has sent them, and casts the rows of a unit again, by the same scales, for the gathers
    that follow. Only the bytes of square blocks, and of experts, stay. The bytes and scales are those that one rank
    makes of the whole weight. For that, one small all-reduce takes place for a step, when the first of these weights is
    gathered. There is no other collective.

    Weights that were loaded, or written in place, are quantized again at the next forward pass. Two kinds of writes
    leave no trace and are not noticed: through `.data`, by code that is no optimizer, and into the tensors of a
    `state_dict` from before the last forward pass.

    Args:
        model: with converted layers, on which `fully_shard` was called, and on all units below it.

    Returns:
        The report: which weights are gathered in eight bits, and why the others are gathered wide, which is as exact
        and slower.

    Raises:
        TypeError: `model` is no module.
        ValueError: no layer of `model` is converted, `fully_shard` was not called, the model has run already, or a unit
            of FSDP2 gathers weights that a module outside of the unit reads.
    """
    layers, stacks = _converted_layers(model), _expert_stacks(model)
    _check_ready(model, converted=bool(layers or stacks))
    sharded = sharded_weights(model)
    units = {layer: unit for (layer, leaf), unit in sharded.items() if leaf == "weight"}
    modules = fused_modules(model)
    unfused = unfusing_units(model, modules, units)
    reasons = {layer: _wide_reason(layer, units.get(layer)) for layer in layers}
    for module in modules:
        _agree(module.stacked, reasons, layers)
    why = {name: reasons[layer] for layer, name in layers.items()}
    why |= {name: _wide_stack_reason(sharded.get(stack)) for name, stack in stacks.items()}
    of_names = {name: (layer, "weight") for layer, name in layers.items()} | stacks
    gathered = {of_names[name] for name, reason in why.items() if not reason}
    weights = {key: ShardedWeight(*key, unit) for key, unit in sharded.items() if key in gathered}
    for module in modules:
        parts = [weights[layer, "weight"] for layer in module.stacked if (layer, "weight") in weights]
        if parts and len({part.unit.group for part in parts}) == 1:
            stack = WeightStack(parts, [module.cache])
            for part in parts:
                part.stack = stack
    if weights:
        ShardCache(model, list(weights.values()))
    rows = (GatherRow(name, "wide" if reason else "fp8", reason) for name, reason in why.items())
    return GatherReport(tuple(rows), unfused)


def _converted_layers(model: nn.Module) -> dict[RecipeLayer, str]:
    """The converted layers of a model, and their names."""
    check_module(model, "fp8_all_gather")
    return {m: name for name, m in model.named_modules() if isinstance(m, RecipeLayer) and m.recipe.quantized}


def _expert_stacks(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The stacks of experts' matrices that run in FP8, each its module and its name there, by their names."""
    names = computed_stacks(model)
    return {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}


def _check_ready(model: nn.Module, *, converted: bool) -> None:
    if not converted:
        raise ValueError("no layer of the model is converted: call octavo.convert(model) first, then fully_shard")
    check_sharded(model)
    if has_run(model):
        raise ValueError(
            "FSDP2 has gathered the weights of this model already: call fp8_all_gather after the last fully_shard and "
            "before the first forward pass"
        )


def _agree(stacked: Sequence[nn.Module], reasons: dict[RecipeLayer, str], names: Mapping[RecipeLayer, str]) -> None:
    """Gather layers that run as one GEMM all alike: one that is gathered wide makes the others wide."""
    layers = [layer for layer in stacked if isinstance(layer, RecipeLayer)]
    wide = next((layer for layer in layers if reasons[layer]), None)
    for layer in layers:
        if wide is not None and not reasons[layer]:
            reasons[layer] = f"it runs as one GEMM with {names[wide]}, which is gathered wide"


def _wide_stack_reason(unit: UnitWeight | None) -> str:
    """Why a stack of experts' matrices is gathered wide, or ""; each of its ranks has whole matrices."""
    return "fully_shard was not called on a module that holds it" if unit is None else unit.reason


def _wide_reason(layer: RecipeLayer, unit: UnitWeight | None) -> str:
    """Why the weight of `layer` is gathered wide, or "" where it is gathered in eight bits."""
    recipe = layer.recipe
    if type(layer).__name__ == "Conv1D":
        return "a Conv1D stores its weight transposed: its shards are not rows of outputs"
    if not isinstance(layer, Linear):
        return f"a {type(layer).__name__} has no weight [N, K]: only linear layers are gathered in eight bits"
    if unit is None or unit.reason:
        return _wide_stack_reason(unit)
    if recipe.w is None or recipe.y is None or recipe.dx is None:
        return f"the recipe {recipe.name} reads the weight in high precision"
    if recipe.rotates_w:
        return f"the recipe {recipe.name} rotates the weight before it is quantized"
    if not recipe.quantizes_w_once:
        return f"the recipe {recipe.name} quantizes the weight a second time for dx, along its other axis"
    if recipe.w.rounding != "nearest":
        return f"the recipe {recipe.name} rounds the weight at random"
    rows = recipe.w.granularity.rows
    if rows is not None and unit.world > 1 and unit.shard_rows % rows:
        return f"the shards of {unit.shard_rows} rows do not divide into blocks of {rows}"
    return ""
