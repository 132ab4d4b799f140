"""One weight of FSDP2 and what its all-gather moves: the bytes and scales of this rank's rows.

FSDP2 looks for `fsdp_pre_all_gather` and `fsdp_post_all_gather` on the local tensor of a sharded parameter. Ours are
attributes of that one tensor, so the parameter stays a plain DTensor: `state_dict`, optimizers and DCP see no subclass.
Only the gathered parameter is one (`GatheredWeight`).
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor

from octavo.distributed.fsdp_units import UnitWeight
from octavo.nn.delayed import ScaleHistory
from octavo.nn.linear import Linear, RecipeLayer, WeightCache
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import ROW, TENSOR, Cast, Granularity, QTensor
from octavo.numerics.scaling import scale_from_amax
from octavo.ops import quantize, quantize_matrices, quantize_scaled, quantize_transposed, rotate
from octavo.ops.launching import RowBatch
from octavo.ops.rows import cast_rows, row_amaxes

_HOOK = "fsdp_pre_all_gather"


class ShardedWeight:
    """A weight `leaf` of a converted layer, which FSDP2 shards as `unit` says.

    It is [N, K], sharded on its rows, or the stack [E, N, K] of experts' matrices, sharded on these.
    """

    def __init__(self, layer: Any, leaf: str, unit: UnitWeight) -> None:
        self.layer, self.leaf, self.unit = layer, leaf, unit
        self.casts = casts_of(layer)
        self.cast = self.casts[0]
        self.rotated = isinstance(layer, Linear) and "y" in layer.recipe.rotate
        # Of bytes [N, K] each; those for dx have scales along N.
        self.granularities = [self.cast.granularity, *(upright(cast) for cast in self.casts[1:])]
        self.for_dx: tuple[Tensor, ...] = ()  # of a pair, the bytes and the scale of this rank's rows for dx
        self.gathered: list[Tensor] = []  # of a pair, what FSDP2 gathers into
        self.history = _history(layer)
        self.stack = WeightStack([self], [])
        # The sharded parameter. `layer.weight` is the gathered one between a forward pass and its reshard.
        self.parameter: Any = getattr(layer, leaf)
        self.data: Tensor | None = None  # the bytes [shard_rows, ...] of this rank's rows, uint8
        # `data` while it is sent: until the stream that computes, whose memory it is, has waited for the gather
        self.sending: Tensor | None = None
        self.scale: Tensor | None = None  # of these rows
        self.cast_again: Callable[[], None] | None = None  # makes `data` anew; None where it is held between steps
        # Called before the bytes of a unit are sent, by the first of its weights; None for the others.
        self.prepare: Callable[[], None] | None = None
        self.key: tuple[Any, ...] = ()  # `current_key` when the bytes were made

    @property
    def local(self) -> Tensor:
        """This rank's rows, as FSDP2 holds them: fewer than `shard_rows`, or none, on the last ranks."""
        return self.parameter._local_tensor

    def attach(self) -> None:
        """Put the hooks on the local tensor, which `.to()`, `to_empty` and loading by assignment replace.

        A ValueError if the layer was converted again or restored, and reads other bytes than are gathered.
        """
        recipe: Any = getattr(self.layer, "recipe", None)
        # A layer without a cast of w reads the numbers that the gathered bytes stand for.
        same = recipe is not None and (recipe.w is None or casts_of(self.layer) == self.casts)
        if not same or _history(self.layer) is not self.history:
            now = "restored" if recipe is None else f"converted to {recipe.name}"
            raise ValueError(
                f"{self.layer} of the FSDP unit {self.unit.unit!r} was {now} after fp8_all_gather, which gathers its "
                "weight for the recipe that it had: call octavo.convert or octavo.restore before fp8_all_gather"
            )
        current: Any = self.layer._parameters[self.leaf]
        if current is self.parameter and _HOOK in current._local_tensor.__dict__:
            return
        if isinstance(current, DTensor) and not isinstance(current._local_tensor, GatheredWeight):
            self.parameter = current
        local: Any = self.local
        if not hasattr(local, _HOOK):
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._hooks()

    @property
    def is_alone(self) -> bool:
        """True if the bytes depend on no row of another rank: those of blocks and groups, and of whole matrices."""
        return self.local.ndim == 3 or all(each not in (ROW, TENSOR) for each in self.granularities)

    @property
    def is_pair(self) -> bool:
        """True if y and dx read different bytes."""
        return len(self.casts) > 1

    def current_key(self) -> tuple[Any, ...]:
        """Differs from `key` if the weight was written, or its scale has changed, since the bytes were made."""
        history = self.history
        scale = None if history is None else (history.ready, history.scale._version)
        # An operation on the DTensor counts as a write to that alone, one on its local tensor as a write to both.
        return self.parameter._version, self.local._version, self.local.data_ptr(), scale

    def _hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # A scale of the whole tensor is known to every rank. On one rank FSDP2 passes on the first input only.
        world = self.unit.world
        travels = [world > 1 and sent for each in self.granularities for sent in (True, each != TENSOR)]
        travels[0] = True

        def held() -> tuple[list[Tensor], list[Tensor]]:
            """What travels, and what stays."""
            assert self.data is not None
            assert self.scale is not None
            parts = list(zip((self.data, self.scale, *self.for_dx), travels, strict=True))
            return [t for t, sent in parts if sent], [t for t, sent in parts if not sent]

        def pre_all_gather(mesh: Any) -> tuple[tuple[Tensor, ...], list[Tensor]]:
            """The inputs of the all-gather, and what the other hook needs besides."""
            if self.prepare is not None:
                self.prepare()
            sent, stays = held()
            # Bytes that were made after a step lie in one memory with those of other weights. It is freed when all have
            # arrived, so that it is not beside the activations. Later gathers cast the rows again.
            if self.cast_again is not None:
                self.data = None
            if self.is_pair:
                sent = sent[: sum(travels[:2])] if self.unit.gathers_for_y_alone else sent
                self.unit.state.all_gather_outputs = self.gathered[: len(sent)]
            return tuple(sent), stays

        def post_all_gather(
            outputs: Sequence[Tensor], stays: Sequence[Tensor], dtype: torch.dtype, *, out: Tensor | None = None
        ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
            """The gathered weight and the memory that FSDP2 is to free; None where `out` is filled."""
            self.sending = None
            if out is not None:
                self.stack.refill()
                return None
            later: list[Tensor] = []
            if self.is_pair:
                later = [t.new_empty(world * t.shape[0], *t.shape[1:]) for t in held()[0][len(outputs) :]]
                self.gathered = [t.view(-1) for t in (*outputs, *later)]
            sources = [iter(stays), iter((*outputs, *later))]
            parts = [next(sources[sent]) for sent in travels]
            operands = []
            for i, (data, scale) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
                shape = self.unit.rows, *data.shape[1:]  # without rows of padding
                rows = self.granularities[i].scale_shape(shape)[0]
                operands.append((data[: shape[0]].view(self.casts[i].fmt.dtype), scale[:rows]))
            taken = self.stack.take(self, operands, dtype)
            for t in later:  # FSDP2 allocates it again in the backward pass
                t.untyped_storage().resize_(0)
            return taken

        pre: Any = pre_all_gather
        pre.__signature__ = inspect.signature(pre)  # FSDP2 asks for it at each all-gather: this makes that fast
        return pre, post_all_gather


def casts_of(layer: Any) -> tuple[Cast, ...]:
    """The cast of the weight of a layer; the one for y and the one for dx where these read different bytes."""
    recipe: Any = layer.recipe
    return (recipe.y.b, recipe.dx.b) if isinstance(layer, Linear) and recipe.reads_w_twice else (recipe.w,)


def upright(cast: Cast) -> Granularity:
    """The granularity of the weight [N, K] that dx reads by `cast`, transposed: groups are columns."""
    granularity = cast.granularity
    return granularity if cast.bytes_serve_both else Granularity(granularity.cols, granularity.rows)


def _history(layer: nn.Module) -> ScaleHistory | None:
    """The history of a layer's weight, if its scale comes from one. Restored layers and experts have none."""
    return layer.history_of("w") if isinstance(layer, RecipeLayer) else None


class WeightStack:
    """Weights of a unit that run as one GEMM: their gathered bytes lie one under the other, in memory FSDP2 frees.

    `caches` are those of the modules that run the stack. The cache of each layer gets its own part.
    """

    def __init__(self, parts: Sequence[ShardedWeight], caches: Sequence[WeightCache]) -> None:
        self.parts, self.caches = parts, list(caches)
        self.starts = [0, *accumulate(part.unit.rows for part in parts)]
        self.stacked: tuple[Tensor, ...] = ()  # data and scale, of several parts
        self.copies: tuple[list[Tensor], list[Tensor]] = [], []  # destinations and sources, as words
        self.freed: list[Tensor] = []  # what FSDP2 gathers into
        self.arrived = 0  # parts, since the last copy

    def take(
        self, part: ShardedWeight, operands: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Take the gathered bytes of a part for the first time; the result is that of `fsdp_post_all_gather`."""
        (data, scale), *others = operands
        owned: tuple[Tensor, ...] = ()
        if len(self.parts) > 1:
            if not self.stacked:
                with torch.inference_mode(False):  # autograd saves them
                    self.stacked = owned = tuple(t.new_empty(self.starts[-1], t.shape[1]) for t in (data, scale))
                self._publish(self.stacked[0], self.stacked[1], self.caches)
            i = self.parts.index(part)
            rows = slice(self.starts[i], self.starts[i + 1])
            self.freed += [data, scale] if part.unit.world > 1 else [data]
            for source, destination in zip((data, scale), self.stacked, strict=True):
                self.copies[0].append(_as_words(destination[rows]))
                self.copies[1].append(_as_words(source))
            data, scale = (t[rows] for t in self.stacked)
            self.refill()
        else:
            self._publish(data, scale, self.caches)
        if isinstance(part.layer, Linear):
            self._publish(data, scale, [part.layer.weight_cache])
        for_dx = [t for operand in others for t in operand]
        return GatheredWeight(data, scale, dtype, part.cast.granularity.name, part.rotated, *for_dx), owned

    def refill(self) -> None:
        """Note that a part is gathered. The last part copies all into the stack, in one launch, and frees them."""
        self.arrived = (self.arrived + 1) % len(self.parts)
        if not self.arrived and self.copies[0]:
            with torch.no_grad(), _unsafe_preserve_version_counter(self.stacked):
                torch._foreach_copy_(*self.copies)
            for t in self.freed:  # FSDP2 allocates it again by itself
                t.untyped_storage().resize_(0)

    def _publish(self, data: Tensor, scale: Tensor, caches: Sequence[WeightCache]) -> None:
        cast = self.parts[0].cast
        for cache in caches:
            cache.gathered = QTensor(data, scale, cast.fmt, cast.granularity)


def _as_words(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 8-byte words, or as bytes where it does not divide into words. A copy of
    words is about twice as fast as one of bytes."""
    data = t.view(-1).view(torch.uint8)
    aligned = data.numel() % 8 == 0 and data.storage_offset() % 8 == 0
    return data.view(torch.int64) if aligned else data


# ---- Weights whose rows on this rank are quantized together: in two launches, into one memory.
#
# A row's scale has a floor, a fraction of the largest scale of the tensor. A scale of the whole tensor needs the amax
# of the tensor. Both depend on one number a weight, its largest amax, which the caller reduces over the ranks between
# the two steps. Where tensor parallelism has split the columns, the amax of each row is reduced over these ranks
# before.


ProcessGroups = tuple[Any, ...]


class ShardGroup:
    """Weights with one cast (by row or by tensor), number of columns, dtype and device.

    All have a `history`, or none; the weights of a unit come one after the other. `columns` are the process groups over
    which tensor parallelism has split their columns, and `ranks` all that shard them.
    """

    def __init__(self, weights: Sequence[ShardedWeight], columns: ProcessGroups, ranks: ProcessGroups) -> None:
        self.weights, self.cast, self.columns, self.ranks = weights, weights[0].cast, columns, ranks
        self.by_row = self.cast.granularity == ROW
        local, sizes = weights[0].local, [weight.unit.shard_rows for weight in weights]
        self.starts = [0, *accumulate(sizes)][:-1]
        rows, device = sum(sizes), local.device
        self.shape = rows, local.shape[1]
        self.data: Tensor | None = None  # between `measure` and `finish`, which write it
        self.scale_of_row = torch.ones(rows, device=device)
        self._find_matrices()
        # cuBLASLt demands that the scale of a tensor begins at a multiple of 16 bytes.
        self.scale = self.scale_of_row[:, None] if self.by_row else torch.ones(len(weights), 4, device=device)[:, :1]
        self.largest_here = torch.zeros(len(weights), 1, device=device)
        # Of each row, infinite where a number is not finite; and of its part on this rank.
        self.amax, self.amax_here = torch.zeros(2, rows, device=device)
        self.weight_of_row = torch.repeat_interleave(torch.tensor(sizes, device=device), output_size=rows)
        self.cast_at_once = self.by_row and not columns
        scales = torch.split(self.scale, sizes if self.by_row else 1)
        for weight, scale, amax in zip(weights, scales, torch.split(self.largest_here, 1), strict=True):
            weight.scale = scale
            if weight.history is not None:
                weight.layer.weight_cache.amax = amax

    @property
    def given(self) -> bool:
        """True if histories give the scales."""
        history = self.weights[0].history
        return history is not None and history.ready

    @property
    def needs_largest(self) -> bool:
        """True if the scales depend on rows of other ranks."""
        return not self.given and (not self.by_row or bool(self.cast.relative_floor))

    def _find_matrices(self) -> None:
        local = [weight.local for weight in self.weights]
        self.batch = RowBatch(local, self.starts)
        for _, found in groupby(range(len(local)), lambda i: self.weights[i].unit.group):
            unit = list(found)
            weights, first = [self.weights[i] for i in unit], self.starts[unit[0]]
            batch = RowBatch([local[i] for i in unit], [self.starts[i] - first for i in unit])
            scale = self.scale_of_row[first : first + sum(weight.unit.shard_rows for weight in weights)]
            for weight in weights:
                weight.cast_again = partial(self._cast_again, weights, batch, scale)

    def _cast_again(self, weights: Sequence[ShardedWeight], batch: RowBatch, scale: Tensor) -> None:
        """Make the bytes of the weights of a unit by their scales, in one launch; any bytes in rows of padding."""
        data = torch.empty(len(scale), self.shape[1], dtype=self.cast.fmt.dtype, device=scale.device)
        with torch.no_grad():
            cast_rows(batch, scale, None, data, self.cast)
        _hand_out(data, weights)

    def allocate(self) -> None:
        """Hand out memory for the bytes. It is of the stream of the caller, which has it again once it is freed."""
        if self.data is not None:  # measured, and not finished
            return
        for weight in self.weights:
            weight.data = None  # those of the step before, where none were sent since
        self.data = torch.empty(self.shape, dtype=self.cast.fmt.dtype, device=self.scale.device)
        _hand_out(self.data, self.weights)

    def measure(self) -> None:
        """Find the amax of each row; also write the bytes by it where most rows need no other scale."""
        if self.batch.addresses != [weight.local.data_ptr() for weight in self.weights]:
            self._find_matrices()
        row_amaxes(self.batch, self.amax, self.data if self.cast_at_once else None, self.cast)
        self.amax_here.copy_(self.amax)

    def has_changed(self) -> bool:
        """True if the amax of a row of this rank is another than when it was measured."""
        amax = torch.zeros_like(self.amax)
        row_amaxes(self.batch, amax, None, self.cast)
        return not torch.equal(amax, self.amax_here)

    def largest(self) -> Tensor:
        """The largest amax [weights] of the rows of this rank, by row that of the finite ones: the floor's."""
        amax = torch.where(self.amax.isfinite(), self.amax, 0) if self.by_row else self.amax
        found = torch.zeros(len(self.weights), device=amax.device)
        found.scatter_reduce_(0, self.weight_of_row, amax, "amax")
        self.largest_here.copy_(found.view(-1, 1))
        return found

    def finish(self, largest: Tensor) -> None:
        """Write the scales, and the bytes by them; `largest` [weights] is that of all ranks where it is needed."""
        assert self.data is not None
        scale_of = partial(scale_from_amax, fmt=self.cast.fmt, power_of_two=self.cast.power_of_two)
        if self.by_row:
            floor_of = scale_from_amax(largest, self.cast.fmt)[self.weight_of_row]
            scale = scale_of(self.amax, relative_floor=self.cast.relative_floor, largest_scale=floor_of)
            self.scale_of_row.copy_(scale)
            if not self.cast_at_once or self.cast.relative_floor:
                written = scale_of(self.amax) if self.cast_at_once else None
                cast_rows(self.batch, scale, written, self.data, self.cast)
        else:
            if self.given:
                scales = torch.cat([each.history.scale.view(1) for each in self.weights if each.history is not None])
                scale = torch.where(largest.isfinite(), scales, torch.nan)
            else:
                scale = scale_of(largest)
            self.scale.copy_(scale.view(-1, 1))
            torch.index_select(scale, 0, self.weight_of_row, out=self.scale_of_row)
            cast_rows(self.batch, self.scale_of_row, None, self.data, self.cast)
        self.data = None


def _hand_out(data: Tensor, weights: Sequence[ShardedWeight]) -> None:
    parts = torch.split(data.view(torch.uint8), [weight.unit.shard_rows for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part


# ---- Quantizing the rows of a rank, to the bytes and scales that one rank makes of the whole weight.
#
# Square blocks and stacks of matrices, which are sharded between matrices, need nothing of other ranks.


def grouped(weights: Sequence[ShardedWeight]) -> list[ShardGroup]:
    together: defaultdict[Any, list[ShardedWeight]] = defaultdict(list)
    for weight in weights:
        local, ranks = weight.local, _groups(weight, lambda placement: not placement.is_replicate())
        by_row = weight.cast.granularity == ROW
        columns = _groups(weight, lambda placement: placement.is_shard(1)) if by_row else ()
        key = weight.cast, weight.history is not None, local.shape[1], local.dtype, local.device, columns, ranks
        together[key].append(weight)
    return [ShardGroup(found, *key[-2:]) for key, found in together.items()]


def _groups(weight: ShardedWeight, takes: Callable[[Any], bool]) -> ProcessGroups:
    mesh, placements = weight.parameter.device_mesh, weight.parameter.placements
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if takes(placement))


# Where y and dx read different bytes, in groups along K and along N or rotated for y alone, the all-gather of a forward
# pass sends those for y. That of the backward pass sends both, since activation checkpointing computes y again there.


def quantize_operand(weight: ShardedWeight, i: int, scale: Tensor | None = None) -> QTensor:
    """This rank's rows for y (0) or dx (1), by the `scale` of the whole weight where they have one."""
    cast, granularity = weight.casts[i], weight.granularities[i]
    local = rotate(weight.local) if i == 0 and weight.rotated else weight.local
    if local.ndim == 3:
        return quantize_matrices(local, cast)
    if scale is not None:
        return quantize_scaled(local, scale, cast)[0]
    if granularity == cast.granularity:
        return quantize(local, cast)
    q = quantize_transposed(local, cast)
    return QTensor(q.data.t(), q.scale.t(), cast.fmt, granularity)


def hold_quantized(weight: ShardedWeight, scales: Mapping[Any, Tensor] | None = None) -> None:
    """Write the bytes for y, and those for dx, padded to the rows of a rank, in the memory of an earlier step.

    `scales` has those that ranks have agreed on, by the weight and 0 for y or 1 for dx.
    """
    held: list[Any] = [weight.data, weight.scale, *weight.for_dx, None, None]
    for i, granularity in enumerate(weight.granularities):
        q, data = quantize_operand(weight, i, (scales or {}).get((weight, i))), held[2 * i]
        if data is None or data.device != q.data.device:
            data = q.data.new_zeros(weight.unit.shard_rows, *q.shape[1:], dtype=torch.uint8)
            held[2 * i :] = data, q.scale.new_empty(granularity.scale_shape(tuple(data.shape))), None, None
        data[: len(q.data)] = q.data.view(torch.uint8)
        held[2 * i + 1][: len(q.scale)] = q.scale
    weight.data, weight.scale, *for_dx = held[: 2 * len(weight.casts)]
    weight.for_dx = tuple(for_dx)


def hold_rotated(weights: Sequence[ShardedWeight]) -> None:
    """Write the bytes of weights that scale by tensor, with one all-reduce for all. Every rank must call this."""
    found = [(weight, i) for weight in weights for i, each in enumerate(weight.granularities) if each == TENSOR]
    scales = {(weight, i): quantize_operand(weight, i).scale for weight, i in found}
    groups = [_groups(weight, lambda placement: not placement.is_replicate()) for weight, _ in found]
    bits = [scale.view(torch.int32).view(-1) for scale in scales.values()]  # in the order of the floats, NaN above
    reduce_largest(list(zip(bits, groups, strict=True)))
    for weight in weights:
        hold_quantized(weight, scales)


def has_changed(weight: ShardedWeight) -> bool:
    """True if the bytes that are held are not those of this rank's rows."""
    if weight.data is None:
        return False
    now = quantize_operand(weight, 0, weight.scale if weight.cast.granularity == TENSOR else None).data
    return not torch.equal(weight.data[: len(now)], now.view(torch.uint8))


def reduce_largest(values: Sequence[tuple[Tensor, ProcessGroups]]) -> None:
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
