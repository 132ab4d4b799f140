"""The units of FSDP2 in a model, and how each gathers its weights.

PyTorch has no public way to ask for a unit's policies, so this file reads the private state of torch 2.11 to 2.13.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy


@dataclass(frozen=True)
class UnitWeight:
    """A weight that FSDP2 shards.

    Args:
        unit: the name of the FSDP unit that gathers it.
        group: the same for weights that are gathered together.
        rows: of the gathered weight; matrices of a stack.
        shard_rows: that each rank sends; those of the last ranks may be padding.
        world: the number of ranks over which it is sharded.
        reason: why FSDP2 cannot gather it in eight bits; "" where it can.
    """

    unit: str
    group: int
    rows: int
    shard_rows: int
    world: int
    reason: str


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on `module`."""
    return hasattr(module, "_get_fsdp_state")


def check_sharded(model: nn.Module) -> None:
    """Raise a ValueError unless `fully_shard` was called on a module of `model`."""
    if not any(is_unit(module) for module in model.modules()):
        raise ValueError("FSDP2 does not shard the model: call fully_shard on its blocks, and on the model, first")


def has_run(model: nn.Module) -> bool:
    """Whether a unit of `model` has been prepared for its first forward pass, after which hooks come too late."""
    units: Iterator[Any] = (module for module in model.modules() if is_unit(module))
    return any(getattr(unit._get_fsdp_state(), "_is_root", None) is not None for unit in units)


def sharded_weights(model: nn.Module) -> dict[tuple[nn.Module, str], UnitWeight]:
    """The parameters of `model` that FSDP2 shards, each by its module and its name there."""
    found = {}
    names = {module: name for name, module in model.named_modules()}
    for group in _groups(model):
        # fully_shard takes a list of modules too, which are gathered together
        units = {module: names[unit] for unit in group.modules for module in unit.modules()}
        for parameter in group.fsdp_params:
            info = parameter._module_info
            found[info.module, info.param_name] = UnitWeight(
                units[info.module],
                id(group),
                parameter._orig_size[0],
                parameter.padded_sharded_param_size[0],
                getattr(parameter.mesh_info, "shard_mesh_size", 1),
                _reason(group, parameter),
            )
    return found


def reducing_units(model: nn.Module) -> list[Any]:
    """The units that sum gradients in FP32 over several ranks, each with one group of parameters.

    Modules that `fully_shard` took as a list are one unit, which their first stands for.
    """
    units = {group.modules[0]: group for group in _groups(model)}
    return [unit for unit, group in units.items() if len(_groups_of(unit)) == 1 and _reduces_in_fp32(group)]


def _reduces_in_fp32(group: Any) -> bool:
    ranks = getattr(group.mesh_info, "shard_mesh_size", 1)
    return ranks > 1 and group.mp_policy.reduce_dtype is torch.float32


def _groups(model: nn.Module) -> list[Any]:
    """The groups of parameters that are gathered together, in the order of their first modules."""
    groups = [group for module in model.modules() if is_unit(module) for group in _groups_of(module)]
    return list({id(group): group for group in groups}.values())


def _groups_of(unit: Any) -> list[Any]:
    """The groups of parameters of one unit: one, or none; from torch 2.12 on there may be several."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def _reason(group: Any, parameter: Any) -> str:
    if not hasattr(parameter.mesh_info, "shard_mesh_size"):
        return "FSDP replicates it"
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        return "FSDP offloads it to the CPU"
    if parameter.fsdp_placement.dim != 0:
        return f"FSDP shards it on dimension {parameter.fsdp_placement.dim}, not on its rows"
    if group.post_forward_mesh_info not in (None, group.mesh_info):
        return "FSDP reshards it after forward to a smaller number of ranks (reshard_after_forward=int)"
    if parameter._module_info.shared_modules:
        return "another module has the same weight"
    return ""
