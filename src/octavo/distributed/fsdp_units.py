"""The units of FSDP2 in a model, and how each gathers its weights.

PyTorch has no public way to ask for a unit's policies, so this file reads the private state of torch 2.11 to 2.13.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from octavo.nn.fused_modules import DecoderLayer, FusedMLP, FusedModule, NormLinear
from octavo.nn.linear import Linear
from octavo.nn.module_tools import check_module
from octavo.ops.rows import add_rows
from octavo.util import plural, some_of


class UnitWeight:
    """A weight that FSDP2 shards. `group` and `state` are FSDP2's own, of those that are gathered together and of it
    alone; `unit` is the name of the FSDP unit that gathers it."""

    def __init__(self, unit: str, group: Any, state: Any) -> None:
        self.unit, self.group, self.state = unit, group, state
        self.rows: int = state._orig_size[0]  # of the gathered weight; matrices of a stack
        self.shard_rows: int = state.padded_sharded_param_size[0]  # that each rank sends; on the last, some are padding
        self.world: int = getattr(state.mesh_info, "shard_mesh_size", 1)  # the ranks over which it is sharded
        self.reason = _reason(group, state)  # why FSDP2 cannot gather it in eight bits; "" where it can

    @property
    def gathers_for_y_alone(self) -> bool:
        """True in a forward pass after which the weight is freed: the backward pass gathers it again."""
        group = self.group
        return group._training_state == TrainingState.FORWARD and group.post_forward_mesh_info is not None


def check_sharded(model: nn.Module) -> None:
    """Raise a ValueError unless `fully_shard` was called on a module of `model`."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("FSDP2 does not shard the model: call fully_shard on its blocks, and on the model, first")


def has_run(model: nn.Module) -> bool:
    """True if a unit of `model` has been prepared for its first forward pass, after which hooks come too late."""
    units: Iterator[Any] = (module for module in model.modules() if isinstance(module, FSDPModule))
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
            found[info.module, info.param_name] = UnitWeight(units[info.module], group, parameter)
    return found


def _groups(model: nn.Module) -> list[Any]:
    groups = [group for module in model.modules() if isinstance(module, FSDPModule) for group in _groups_of(module)]
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


# ---- The modules that run several layers in one pass, and the FSDP2 units that prevent it.
#
# FSDP2 gathers the weights of a unit when the unit is called. A fused module reads weights of layers that it does not
# call. So the unit must hold the fused module and its layers, as a decoder block does.


def fused_modules(model: nn.Module) -> dict[str, FusedModule]:
    """The modules of `model` that fuse their layers, if no hook prevents it: all are converted, with one recipe."""

    def has_one_recipe(module: FusedModule) -> bool:
        recipe, *others = {layer.recipe if isinstance(layer, Linear) else None for layer in module.layers}
        return not others and recipe is not None and recipe.fusable is not None

    return {name: m for name, m in model.named_modules() if isinstance(m, FusedModule) and has_one_recipe(m)}


def unfusing_units(
    model: nn.Module, modules: Mapping[str, FusedModule], units: Mapping[nn.Module, UnitWeight]
) -> dict[str, str]:
    """The names of the units that prevent a fusion, each with the name of the module that would have fused.

    A ValueError if a unit gathers weights that a module outside of it reads, and cannot do without.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for fused, module in modules.items():
        owner = module.owner if isinstance(module, NormLinear) else None
        deciding = (owner.self_attn, owner.mlp) if isinstance(owner, DecoderLayer) else ()  # by their hooks
        found |= {names[part]: fused for part in (*module.layers, *deciding) if isinstance(part, FSDPModule)}
        for layer in module.layers:
            if layer not in units or isinstance(layer, FSDPModule):
                continue
            unit = units[layer].unit
            if not unit or f"{fused}.".startswith(f"{unit}."):  # it is the module, or holds it
                continue
            if not isinstance(owner or module, DecoderLayer | FusedMLP):  # these run their layers one by one too
                raise ValueError(
                    f"{fused} reads the weight of {names[layer]}, which fully_shard gathers in the unit "
                    f"{unit}, when that is called: call fully_shard on a module that holds both, such as the decoder "
                    "block"
                )
            found[unit] = fused
    return found


# ---- The report of `fp8_all_gather`: which weights FSDP2 gathers in eight bits, and why the others stay wide.


@dataclass(frozen=True)
class GatherReport:
    """The report of `octavo.distributed.fp8_all_gather`; printed, it has one line for each reason.

    Args:
        gathered: the names of the converted linear layers, and stacks of experts, whose weights are gathered in eight
            bits, in the order of the model's modules.
        wide: the names of the others, each with the reason. They are gathered in the parameter's dtype, and quantized
            after that on every rank.
        unfused: the names of the FSDP units that keep a module from computing a norm or an activation in the pass of
            its linear layers, each with the name of that module.
    """

    gathered: list[str]
    wide: Mapping[str, str]
    unfused: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        lines = [f"FP8 all-gather: {plural(len(self.gathered), 'weight')} in eight bits, {len(self.wide)} wide"]
        for reason in dict.fromkeys(self.wide.values()):
            names = [name for name, each in self.wide.items() if each == reason]
            lines.append(f"  {len(names)} wide: {reason} ({some_of(names)})")
        for module in dict.fromkeys(self.unfused.values()):
            units = [unit for unit, each in self.unfused.items() if each == module]
            are = "is a unit" if len(units) == 1 else "are units"
            lines.append(
                f"  not fused: {module}, since {some_of(units)} {are} of FSDP's: shard the block that holds it instead"
            )
        return "\n".join(lines)


# ---- FSDP2's reduction of gradients: BF16 on the network, FP32 sums.
#
# With `reduce_dtype=torch.float32` FSDP2 casts the gradients of a unit to FP32 and reduce-scatters them. Gradients of a
# unit that computes in BF16 are BF16 before that cast. So each rank can send the other ranks their parts in BF16, by
# one all-to-all, and sum what it receives in FP32, in the order of the ranks.
#
# FSDP2 asks for the buffer of a reduction before it says which gradients it will hold. They are FP32 where
# micro-batches were accumulated without a reduction. Therefore it gets a tensor without memory, `_Gradients`, which
# takes the dtype of the gradients that FSDP2 copies into it. FP32 gradients are reduced as before.


def send_bf16_gradients(model: nn.Module) -> int:
    """Make FSDP2 send BF16 gradients as they are and sum them in FP32, in place of sending them in FP32.

    Call it after the last `fully_shard`. The sums have the precision of `reduce_dtype=torch.float32`, which the units
    must have; two ranks get the same bits. A rank sends half the bytes, and holds no more memory. Gradients that are
    FP32 are reduced in FP32: those of units without `param_dtype=torch.bfloat16`, and those of micro-batches that
    `set_requires_gradient_sync(False)` accumulated. So are gradients with `set_gradient_divide_factor`.

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        send_bf16_gradients(model)

    Args:
        model: on which `fully_shard` was called, and on all units below it.

    Returns:
        The number of units whose BF16 gradients travel in BF16. Units of one rank send nothing, and units with another
        `reduce_dtype`, or with parameters on several meshes, stay as they are.

    Raises:
        TypeError: `model` is no module.
        ValueError: `fully_shard` was not called.
    """
    check_module(model, "send_bf16_gradients")
    check_sharded(model)
    # Modules that `fully_shard` took as a list are one unit, which their first stands for.
    groups = {group.modules[0]: group for group in _groups(model) if group.mp_policy.reduce_dtype is torch.float32}
    units = [unit for unit, group in groups.items() if getattr(group.mesh_info, "shard_mesh_size", 1) > 1]
    units = [unit for unit in units if len(_groups_of(unit)) == 1]
    for unit in units:
        unit.set_custom_reduce_scatter(BF16Exchange())
    return len(units)


class BF16Exchange(ReduceScatter):
    """The reduce-scatter of one unit of FSDP2: an all-to-all of BF16 gradients, and sums in FP32."""

    def __init__(self) -> None:
        self._filled: _Gradients | None = None  # until FSDP2 asks for the output of their reduction

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input of a reduction, and, in the next call, its output."""
        if self._filled is not None and self._filled.memory is not None:
            self._filled = None
            return torch.empty(*size, dtype=dtype, device=device)
        empty = torch.empty(0, dtype=dtype, device=device)
        self._filled = torch.Tensor._make_subclass(_Gradients, empty)
        self._filled.size_to_fill = int(size[0])
        return self._filled

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce the gradients of `input_tensor`, one row a rank, into this rank's `output_tensor`."""
        assert isinstance(input_tensor, _Gradients)
        assert input_tensor.memory is not None
        sent, average = input_tensor.memory, op == dist.ReduceOp.AVG
        if sent.dtype != torch.bfloat16 or not (average or op == dist.ReduceOp.SUM):
            wide = sent.to(output_tensor.dtype).view(-1)
            return DefaultReduceScatter()(output_tensor, wide, group, op, async_op)
        received = torch.empty_like(sent)
        # bytes, because not every backend knows BF16
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
        add_rows(received, output_tensor, mean=average)
        return None


class _Gradients(Tensor):
    """The input of a reduction that FSDP2 holds. `memory` has a row for each rank, once FSDP2 has filled it."""

    memory: Tensor | None = None
    size_to_fill = 0  # elements of all rows

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.view:
            return args[0]
        if func is torch.ops.fsdp.chunk_cat:
            return _fill(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _fill(tensors: Sequence[Tensor], dim: int, num_chunks: int, out: _Gradients) -> None:
    """Copy the parts of `tensors`, padded, to a row for each rank, in their own dtype."""
    grad = tensors[0]
    out.memory = torch.empty(num_chunks, out.size_to_fill // num_chunks, dtype=grad.dtype, device=grad.device)
    torch.ops.fsdp.chunk_cat(tensors, dim, num_chunks, out=out.memory)
