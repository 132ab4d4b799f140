"""Quantizing the rows of a rank, to the bytes and scales that one rank makes of the whole weight.

All weights of one size are quantized in two launches, and one all-reduce (MAX) of one number a weight serves all
(`octavo.dist.shard_group`). Square blocks and stacks of matrices, which are sharded between matrices, need nothing of
other ranks.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.dist.shard_group import ShardGroup
from octavo.dist.sharded_weight import ShardedWeight
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops import quantize, quantize_matrices

ProcessGroups = tuple[Any, ...]


class ShardQuantizer:
    """Quantizes the rows of this rank of many weights."""

    def __init__(self, weights: Sequence[ShardedWeight]) -> None:
        self.alone = [weight for weight in weights if weight.is_alone]
        self.together = [weight for weight in weights if not weight.is_alone]
        self.groups: list[tuple[ShardGroup, ProcessGroups, ProcessGroups]] = []

    @torch.no_grad()
    def has_changed(self) -> bool:
        """Whether a weight of this rank was written since the last run, as far as the amax of its rows shows it."""
        alone = ((weight.data, _quantize(weight).data) for weight in self.alone)
        return any(group.has_changed() for group, _, _ in self.groups) or any(
            data is not None and not torch.equal(data[: len(now)], now.view(torch.uint8)) for data, now in alone
        )

    def group(self) -> None:
        """Find the weights that are quantized together, and take the memory of their scales, once."""
        if not self.groups:
            self.groups = _grouped(self.together)

    @torch.no_grad()
    def allocate(self) -> None:
        """Take memory for all bytes. Those that need nothing of other weights are written at once."""
        for group, _, _ in self.groups:
            group.allocate()
        for weight in self.alone:
            _hold_quantized(weight)

    @torch.no_grad()
    def measure(self) -> None:
        """Find the amaxes of the rows of this rank, and write the bytes that need no more."""
        for group, _, _ in self.groups:
            group.measure()
        for weight in (*self.together, *self.alone):
            weight.key = weight.current_key()

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the amaxes over the ranks; write the scales, and the bytes by them. Every rank must call this."""
        _reduce([(group.amax, column_groups) for group, column_groups, _ in self.groups])
        largest = [group.largest() for group, _, _ in self.groups]
        needed = [
            (value, shards)
            for value, (group, _, shards) in zip(largest, self.groups, strict=True)
            if group.needs_largest
        ]
        _reduce(needed)
        for value, (group, _, _) in zip(largest, self.groups, strict=True):
            group.finish(value)


def _grouped(weights: Sequence[ShardedWeight]) -> list[tuple[ShardGroup, ProcessGroups, ProcessGroups]]:
    """The weights in groups, each with the process groups that split its columns, and those that shard it at all."""
    together: defaultdict[Any, list[ShardedWeight]] = defaultdict(list)
    for weight in weights:
        local = weight.local
        history = weight.history is not None
        key = weight.cast, history, local.shape[1], local.dtype, local.device, _split(weight), _sharded(weight)
        together[key].append(weight)
    return [(ShardGroup(found, split=bool(key[-2])), key[-2], key[-1]) for key, found in together.items()]


def _split(weight: ShardedWeight) -> ProcessGroups:
    """The process groups over which the columns of a weight that is scaled by row are sharded."""
    if weight.cast.granularity != ROW:
        return ()
    placements = weight.parameter.placements
    mesh = weight.parameter.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard(1))


def _sharded(weight: ShardedWeight) -> ProcessGroups:
    """The process groups over which a weight is sharded."""
    placements = weight.parameter.placements
    mesh = weight.parameter.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


def _quantize(weight: ShardedWeight) -> QTensor:
    local = weight.local
    return quantize_matrices(local, weight.cast) if local.ndim == 3 else quantize(local, weight.cast)


def _hold_quantized(weight: ShardedWeight) -> None:
    local, q = weight.local, _quantize(weight)
    if weight.data is None or weight.data.device != local.device:
        rows = weight.unit.shard_rows
        data = torch.zeros(rows, *local.shape[1:], dtype=torch.uint8, device=local.device)
        scale = torch.ones(
            weight.cast.granularity.scale_shape(tuple(data.shape)), dtype=q.scale.dtype, device=q.scale.device
        )
        weight.hold(data, scale)
    assert weight.data is not None
    assert weight.scale is not None
    weight.data[: local.shape[0]] = q.data.view(torch.uint8)
    weight.scale[: q.scale.shape[0]] = q.scale


def _reduce(values: Sequence[tuple[Tensor, ProcessGroups]]) -> None:
    """Reduce each tensor in place by MAX over its groups, with one all-reduce for all tensors of a group."""
    together: defaultdict[ProcessGroups, list[Tensor]] = defaultdict(list)
    for value, groups in values:
        together[groups].append(value)
    for groups, tensors in together.items():
        if groups:
            flat = torch.cat(tensors)
            for group in groups:
                dist.all_reduce(flat, dist.ReduceOp.MAX, group)
            torch._foreach_copy_(tensors, list(torch.split(flat, [t.numel() for t in tensors])))
