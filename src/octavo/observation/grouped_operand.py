"""An operand of a grouped GEMM, of which rows are sampled: their numbers before and after quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.scaling import scale_exponent
from octavo.observation.operands import numbers_of_rows
from octavo.observation.statistics import numbers_of
from octavo.ops.permutation import group_of_rows, group_shifts


class SampledRows(NamedTuple):
    """R rows of an operand [M, K], float32. Those of no expert are zero.

    Attributes:
        x: [R, K], in high precision; where there are only bytes, the numbers that these stand for.
        numbers: [R, K], those of the bytes: x is about numbers * scales.
        scales: [R, 1], or [R, K] where a scale of the columns was folded in.
        least: [R, 1]: numbers up to it become zero where the bytes are shifted for dw; None without a shift.
        group: int64 [R], the expert.
    """

    x: Tensor
    numbers: Tensor
    scales: Tensor
    least: Tensor | None
    group: Tensor


@dataclass(frozen=True)
class GroupedOperand:
    """An operand; the fields are the arguments of `octavo.observation.expert_operands.observe_experts`."""

    kind: str
    source: Sequence[Tensor]
    offsets: Tensor
    data: Tensor
    scale: Tensor
    cast: Cast
    slot: Tensor | None = None
    factor: Tensor | None = None
    column_scale: Tensor | None = None
    row_scale: Tensor | None = None
    shift_scale: Tensor | None = None

    @property
    def experts(self) -> int:
        return len(self.offsets)

    @property
    def rows(self) -> int:
        return len(self.data)

    @cached_property
    def sizes(self) -> Tensor:
        """The rows [E] of x and dy that each expert has."""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1))

    @cached_property
    def group(self) -> Tensor:
        """int64 [M]: the expert of each row; E for a row of none."""
        if self.kind == "w":
            return torch.arange(self.rows, device=self.offsets.device) // (self.rows // self.experts)
        return group_of_rows(self.offsets, self.rows).long()

    @cached_property
    def unfolded(self) -> Tensor:
        """The scales [M, 1] without the factor of the rows."""
        return self.scale if self.row_scale is None else self.scale / self.row_scale

    def sample(self, index: Tensor) -> SampledRows:
        """The rows `index`, int64 [R]."""
        inside, group = (self.group[index] < self.experts).unsqueeze(1), self.group[index].clamp(max=self.experts - 1)
        numbers = numbers_of(self.data.view(torch.uint8)[index].view(self.data.dtype), torch.float32)
        numbers = torch.where(inside, numbers, 0)  # a row of no expert has any bytes
        unfolded = self.unfolded[index]
        scales = unfolded if self.column_scale is None else unfolded / self.column_scale[group]
        x = self._wide(index) if self.source else numbers * scales
        return SampledRows(torch.where(inside, x, 0).float(), numbers, scales, self._least(index), group)

    def _wide(self, index: Tensor) -> Tensor:
        first, *rest = self.source
        token = index if self.slot is None else self.slot[index] // (len(self.slot) // len(first))
        rows = numbers_of_rows("x" if self.kind == "w" else self.kind, [first[token], *(t[index] for t in rest)])
        return rows if self.factor is None else rows * self.factor[index]

    def _least(self, index: Tensor) -> Tensor | None:
        if self.shift_scale is None:
            return None
        exponent = (scale_exponent(self.shift_scale) + scale_exponent(self.scale)).view(-1)
        shift = group_shifts(exponent, self.group, self.experts)[1][index].clamp(max=100).float().unsqueeze(1)
        return torch.exp2(shift) * (self.cast.fmt.smallest_subnormal / 2)  # a tie rounds to 0
