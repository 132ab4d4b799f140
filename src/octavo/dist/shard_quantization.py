"""Quantizing the rows of a rank, to the bytes and scales that one rank makes of the whole weight.

A row's scale has a floor, a fraction of the largest scale of the tensor. A scale of the whole tensor needs the amax of
the tensor. So one number a weight is reduced over the ranks (MAX), all of them in one all-reduce. Where tensor
parallelism has split the columns, the amax of each row is reduced over these ranks before.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.dist.sharded_weight import ShardedWeight
from octavo.numerics.granularity import ROW, TENSOR
from octavo.numerics.scaling import scale_from_amax
from octavo.ops import quantize_scaled


@torch.no_grad()
def quantize_shards(weights: Sequence[ShardedWeight]) -> None:
    """Quantize this rank's rows of every weight, and store the bytes. Every rank must call this with the same weights."""
    amaxes = [_amax(weight) for weight in weights]
    _reduce([(amax, _groups(weight, column=True)) for weight, amax in zip(weights, amaxes, strict=True)])
    largest = {
        weight: _largest(weight, amax) for weight, amax in zip(weights, amaxes, strict=True) if _needs_largest(weight)
    }
    _reduce([(value, _groups(weight, column=False)) for weight, value in largest.items()])
    for weight, amax in zip(weights, amaxes, strict=True):
        _store(weight, amax, largest.get(weight))


def _amax(weight: ShardedWeight) -> Tensor:
    """The amax of each block of this rank's rows, infinite where a number is not finite: MAX knows no NaN."""
    local, granularity = weight.local, weight.cast.granularity
    if local.numel() == 0:
        return local.new_zeros(granularity.scale_shape(tuple(local.shape)), dtype=torch.float32)
    return granularity.amax(local.float()).nan_to_num(torch.inf, torch.inf)


def _needs_largest(weight: ShardedWeight) -> bool:
    if weight.cast.granularity == TENSOR:
        return weight.history is None or not weight.history.ready
    return bool(weight.cast.relative_floor)


def _largest(weight: ShardedWeight, amax: Tensor) -> Tensor:
    """The number [1] that decides over all rows: the amax, or the largest scale."""
    if weight.cast.granularity == TENSOR:
        return amax.view(1)
    scale = scale_from_amax(amax, weight.cast.fmt).nan_to_num(0, 0, 0)
    return scale.amax().view(1) if scale.numel() else scale.new_zeros(1)


def _store(weight: ShardedWeight, amax: Tensor, largest: Tensor | None) -> None:
    cast, local = weight.cast, weight.local
    whole = amax.amax().view(1, 1) if amax.numel() else amax.new_zeros(1, 1)
    if cast.granularity == TENSOR and largest is None:
        assert weight.history is not None
        q, _ = quantize_scaled(local, weight.history.scale, cast)
        return weight.store(q.data, torch.where(amax.isfinite(), q.scale, torch.nan), whole)
    if cast.granularity == TENSOR:
        assert largest is not None
        amax, largest = largest.view(1, 1), None
    scale = scale_from_amax(
        amax, cast.fmt, power_of_two=cast.power_of_two, relative_floor=cast.relative_floor, largest_scale=largest
    )
    inv_scale = cast.granularity.expand(1 / scale, tuple(local.shape))
    return weight.store((local.float() * inv_scale).to(cast.fmt.dtype), scale, whole)


def _groups(weight: ShardedWeight, *, column: bool) -> tuple[Any, ...]:
    """The process groups over which the weight is sharded, or those over which its columns are."""
    parameter = weight.parameter
    if column and weight.cast.granularity != ROW:
        return ()
    return tuple(
        parameter.device_mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if (placement.is_shard(1) if column else not placement.is_replicate())
    )


def _reduce(values: Sequence[tuple[Tensor, tuple[Any, ...]]]) -> None:
    """Reduce each tensor in place by MAX over its groups, with one all-reduce for all tensors of a group."""
    together: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for value, groups in values:
        together[groups].append(value)
    for groups, tensors in together.items():
        if groups:
            flat = torch.cat([t.view(-1) for t in tensors])
            for group in groups:
                dist.all_reduce(flat, dist.ReduceOp.MAX, group)
            for t, reduced in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                t.copy_(reduced.view(t.shape))
