"""FSDP2's all-gather of the weights in eight bits, and the cache that quantizes them anew when they change."""

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from octavo.distributed import fsdp_units, shards
from octavo.distributed.fsdp_units import GatherReport, UnitWeight
from octavo.distributed.shards import ShardedWeight
from octavo.nn.conversion import computed_stacks
from octavo.nn.linear import Linear, RecipeLayer
from octavo.nn.module_tools import check_module
from octavo.recipe import Recipe


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
    that follow. Only the bytes of blocks, rotated weights and experts stay. The bytes and scales are those that one
    rank makes of the whole weight. For that, one small all-reduce takes place for a step, when the first of these
    weights is gathered. There is no other collective. Where y and dx read different bytes, the backward pass gathers
    both.

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
    check_module(model, "fp8_all_gather")
    modules = dict(model.named_modules())
    layers = {name: m for name, m in modules.items() if isinstance(m, RecipeLayer) and m.recipe.quantized}
    # of experts' matrices, each its module and its name there
    parts = ((name, *name.rpartition(".")) for name in computed_stacks(model))
    named: dict[str, tuple[nn.Module, str]] = {name: (layer, "weight") for name, layer in layers.items()}
    named |= {name: (modules[owner], leaf) for name, owner, _, leaf in parts}
    if not named:
        raise ValueError("no layer of the model is converted: call octavo.convert(model) first, then fully_shard")
    fsdp_units.check_sharded(model)
    if fsdp_units.has_run(model):
        raise ValueError(
            "FSDP2 has gathered the weights of this model already: call fp8_all_gather after the last fully_shard and "
            "before the first forward pass"
        )
    sharded = fsdp_units.sharded_weights(model)
    fused, names = fsdp_units.fused_modules(model), {layer: name for name, layer in layers.items()}
    units = {layer: unit for (layer, leaf), unit in sharded.items() if leaf == "weight"}
    unfused = fsdp_units.unfusing_units(model, fused, units)
    reasons = {name: _wide_reason(key[0], sharded.get(key)) for name, key in named.items()}
    for module in fused.values():  # layers that run as one GEMM are gathered all alike
        inner = [names[layer] for layer in module.inner]
        if wide := next((name for name in inner if reasons[name]), ""):
            together = f"it runs as one GEMM with {wide}, which is gathered wide"
            reasons |= {name: reasons[name] or together for name in inner}
    gathered = {named[name] for name, reason in reasons.items() if not reason}
    weights = {key: ShardedWeight(*key, unit) for key, unit in sharded.items() if key in gathered}
    for module in fused.values():
        stacked = [weights[layer, "weight"] for layer in module.inner if (layer, "weight") in weights]
        if stacked and len({weight.unit.group for weight in stacked}) == 1:
            stack = shards.WeightStack(stacked, [module.weight_cache])
            for weight in stacked:
                weight.stack = stack
    if weights:
        ShardCache(model, list(weights.values()))
    return GatherReport([name for name in named if not reasons[name]], {n: r for n, r in reasons.items() if r}, unfused)


def _wide_reason(layer: Any, unit: UnitWeight | None) -> str:
    """Why the weight of `layer`, or a stack of its experts' matrices, is gathered wide; "" where in eight bits."""
    recipe: Recipe = layer.recipe
    if type(layer).__name__ == "Conv1D":
        return "a Conv1D stores its weight transposed: its shards are not rows of outputs"
    if isinstance(layer, RecipeLayer) and not isinstance(layer, Linear):
        return f"a {type(layer).__name__} has no weight [N, K]: only linear layers are gathered in eight bits"
    if unit is None or unit.reason:
        return "fully_shard was not called on a module that holds it" if unit is None else unit.reason
    if recipe.w is None or recipe.y is None or (recipe.dx is None and not recipe.exact_backward):
        return f"the recipe {recipe.name} reads the weight in high precision"
    casts = shards.casts_of(layer)
    if any(cast.rounding != "nearest" for cast in casts):
        return f"the recipe {recipe.name} rounds the weight at random"
    if not isinstance(layer, Linear):  # each rank has whole matrices
        return f"the recipe {recipe.name} reads other bytes of experts for dx than y" if recipe.reads_w_twice else ""
    if "dx" in recipe.rotate:
        return f"the recipe {recipe.name} rotates the weight along its rows for dx: rotate y alone"
    if recipe.w.scale == "e4m3":
        return f"the scales of the recipe {recipe.name} depend on all rows of the weight"
    if len(casts) > 1 and any(cast.by_row for cast in casts):
        return f"the recipe {recipe.name} quantizes the weight twice, by row: use scales by tensor or group"
    for rows in (recipe.w.granularity.rows, *(shards.upright(cast).rows for cast in casts[1:])):
        if rows is not None and unit.world > 1 and unit.shard_rows % rows:
            return f"the shards of {unit.shard_rows} rows do not divide into blocks of {rows}"
    return ""


class ShardCache:
    """Quantizes the rows of all weights again when an optimizer, a load or a write in place has changed one.

    Ranks must agree on when that happens, since it takes an all-reduce. A rank that has no rows of one weight sees no
    write to it, but sees the writes to others. So it happens for all weights at once: after the step of an optimizer
    that updates all of them, or else when the next forward pass of the model begins (docs/distributed.md).

    `torch.distributed.checkpoint.load` writes into the tensors of a `state_dict`, which leaves no trace on the
    parameters. So after a call of `state_dict` the next forward pass looks at the numbers. It does not quantize again
    because of the call alone, which one rank may have made by itself.
    """

    def __init__(self, model: nn.Module, weights: Sequence[ShardedWeight]) -> None:
        """Keep `weights` fresh and make FSDP2 call their hooks: one at least, in the order in which it gathers them."""
        self.weights = weights
        self.rotated = [weight for weight in weights if weight.is_pair and not weight.is_alone]
        self.alone = [weight for weight in weights if weight.is_alone]
        self.groups: list[shards.ShardGroup] = []
        self.stale = True
        self.measured = False  # whether the ranks have yet to agree on the scales
        self.exposed = False  # whether `state_dict` was called since the weights were compared
        self.stream: Any = None  # in which the weights are quantized
        self.written: Any = None  # when the bytes were made, an event of `stream`
        self.waited: set[Any] = set()  # the streams that have waited for it
        for weight in weights:
            weight.attach()
            weight.layer.register_state_dict_pre_hook(self.note_state_dict)
        for _, found in groupby(weights, lambda weight: weight.unit.group):
            unit = list(found)
            unit[0].prepare = partial(self.prepare, unit)
        not_traced: Any = torch.compiler.disable  # a decorator of a method would import the compiler with this file
        # Before FSDP2's own hook, which gathers the weights of the root.
        model.register_forward_pre_hook(not_traced(self.before_forward), prepend=True)
        # PyTorch holds the hook for good: it must not hold the model, whose end removes it.
        this = weakref.proxy(self)
        after_step = not_traced(lambda optimizer, *_: this.note_step(optimizer))
        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    @property
    def streams(self) -> Any:
        """The module of the weights' device, such as torch.cuda. torch.cpu has streams too, which do nothing."""
        return torch.get_device_module(self.weights[0].local.device)

    def note_state_dict(self, *_: Any) -> None:
        self.exposed = True

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that `optimizer` has changed weights. If it is the one that updates all, begin to quantize them.

        There the GPU still has work, and the host may not: a loop reads the loss after a step. Where several optimizers
        update the weights, or their scales come from histories that are updated later, the next forward pass does it.
        """
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = [id(weight.parameter) in updated for weight in self.weights]
        self.stale = self.stale or any(ours)
        if self.stale and all(ours) and all(weight.history is None for weight in self.weights):
            self.begin()

    def before_forward(self, *_: Any) -> None:
        for weight in self.weights:
            weight.attach()
        changed = self.stale or any(weight.current_key() != weight.key for weight in self.weights)
        if self.exposed and not changed:
            self.streams.current_stream().wait_stream(self.stream)  # which found the amaxes to compare with
            with torch.no_grad():  # a write shows as far as the amaxes of this rank's rows show it
                changed = any(shards.has_changed(weight) for weight in (*self.alone, *self.rotated))
                changed = changed or any(group.has_changed() for group in self.groups)
        if changed:
            self.begin()
        self.exposed = False

    def prepare(self, unit: Sequence[ShardedWeight]) -> None:
        """Called in the stream that will send the bytes of the weights of a unit, before it does."""
        if self.stale or any(weight.current_key() != weight.key for weight in unit):
            self.begin()  # `unshard()` was called before the forward pass
        if self.measured:
            self.finish()
        stream = self.streams.current_stream()
        if stream not in self.waited:
            stream.wait_event(self.written)
            self.waited.add(stream)
        for weight in unit:
            weight.sending = weight.data
            if weight.data is None and weight.cast_again is not None:
                weight.cast_again()

    @torch.no_grad()
    def begin(self) -> None:
        """Measure the rows of all weights, in a stream beside that of the caller.

        So the first gather of a forward pass, that of the root, does not wait for it. The memory of the bytes is of the
        caller's stream, which computes: it has that memory again, for activations, when the bytes are sent.
        """
        caller = self.streams.current_stream()
        if self.stream is None:
            streams, stream = self.streams, self.streams.Stream()
            self.stream = stream
            # A model may be deleted after its last step: its memory is used again by the stream that computes.
            weakref.finalize(self, lambda: streams.current_stream().wait_stream(stream)).atexit = False
        with self.streams.stream(self.stream):
            grouping = [weight for weight in self.weights if not weight.is_alone and not weight.is_pair]
            self.groups = self.groups or shards.grouped(grouping)
        caller.wait_stream(self.stream)  # bytes of an earlier call that were not sent are freed
        for group in self.groups:
            group.allocate()
        for weight in self.alone:  # they need nothing of other weights
            shards.hold_quantized(weight)
        self.stream.wait_stream(caller)
        with self.streams.stream(self.stream):
            for group in self.groups:
                group.measure()
        for weight in self.weights:
            weight.key = weight.current_key()
        self.stale, self.measured = False, True

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the amaxes over the ranks; write the scales, and the bytes by them. Every rank must call this.

        It is called where the first weight that needs them is gathered. Collectives of one process group run in the
        order of their calls: before the gather of the root, the all-reduce would make that wait for the amaxes.
        """
        with self.streams.stream(self.stream):
            shards.reduce_largest([(group.amax, group.columns) for group in self.groups])
            largest = [(group, group.largest()) for group in self.groups]
            shards.reduce_largest([(value, group.ranks) for group, value in largest if group.needs_largest])
            for group, value in largest:
                group.finish(value)
            shards.hold_rotated(self.rotated)
            self.written, self.waited = self.stream.record_event(), set()
        self.measured = False
