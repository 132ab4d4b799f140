"""Weights whose rows on this rank are quantized together: in two launches, into one memory.

A row's scale has a floor, a fraction of the largest scale of the tensor. A scale of the whole tensor needs the amax of
the tensor. Both depend on one number a weight, its largest amax, which the caller reduces over the ranks between the
two steps. Where tensor parallelism has split the columns, the amax of each row is reduced over these ranks before.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor

from octavo.dist.sharded_weight import ShardedWeight
from octavo.numerics.granularity import ROW
from octavo.numerics.scaling import scale_from_amax
from octavo.ops.row_batch import RowBatch, cast_rows, row_amaxes


class ShardGroup:
    """Weights with one cast (by row or by tensor), number of columns, dtype and device.

    Args:
        weights: all with a `history`, or none; those of a unit one after the other.
        split: whether tensor parallelism has split their columns.

    Attributes:
        amax: [rows], of each row, infinite where a number is not finite; amax_here: of its part on this rank.
        scale_of_row: [rows].
    """

    def __init__(self, weights: Sequence[ShardedWeight], *, split: bool) -> None:
        self.weights, self.cast = weights, weights[0].cast
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
        self.amax, self.amax_here = torch.zeros(2, rows, device=device)
        self.weight_of_row = torch.repeat_interleave(torch.tensor(sizes, device=device), output_size=rows)
        self.cast_at_once = self.by_row and not split
        scales = torch.split(self.scale, sizes if self.by_row else 1)
        for weight, scale, amax in zip(weights, scales, torch.split(self.largest_here, 1), strict=True):
            weight.take_scale(scale, amax)

    @property
    def given(self) -> bool:
        """Whether histories give the scales."""
        history = self.weights[0].history
        return history is not None and history.ready

    @property
    def needs_largest(self) -> bool:
        """Whether the scales depend on rows of other ranks."""
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
        """Whether the amax of a row of this rank is another than when it was measured."""
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
        if self.by_row:
            self._finish_rows(largest, self.data)
        else:
            self._finish_tensors(largest, self.data)
        self.data = None

    def _finish_rows(self, largest: Tensor, data: Tensor) -> None:
        floor_of = scale_from_amax(largest, self.cast.fmt)[self.weight_of_row]
        scale = self._scale(self.amax, floor_of)
        self.scale_of_row.copy_(scale)
        if not self.cast_at_once or self.cast.relative_floor:
            written = self._scale(self.amax, None) if self.cast_at_once else None
            cast_rows(self.batch, scale, written, data, self.cast)

    def _finish_tensors(self, largest: Tensor, data: Tensor) -> None:
        if self.given:
            scales = torch.cat([weight.history.scale.view(1) for weight in self.weights if weight.history is not None])
            scale = torch.where(largest.isfinite(), scales, torch.nan)
        else:
            scale = scale_from_amax(largest, self.cast.fmt, power_of_two=self.cast.power_of_two)
        self.scale.copy_(scale.view(-1, 1))
        torch.index_select(scale, 0, self.weight_of_row, out=self.scale_of_row)
        cast_rows(self.batch, self.scale_of_row, None, data, self.cast)

    def _scale(self, amax: Tensor, largest_scale: Tensor | None) -> Tensor:
        floor = 0.0 if largest_scale is None else self.cast.relative_floor
        return scale_from_amax(
            amax,
            self.cast.fmt,
            power_of_two=self.cast.power_of_two,
            relative_floor=floor,
            largest_scale=largest_scale,
        )


def _hand_out(data: Tensor, weights: Sequence[ShardedWeight]) -> None:
    """Give each weight its rows of the bytes `data`, in which they lie one after the other."""
    parts = torch.split(data.view(torch.uint8), [weight.unit.shard_rows for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part
