"""The quantized form of an operand of which some rows are sampled: its errors, and the range of its scales."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.observation.statistics import (
    Found,
    least_numbers,
    numbers_of,
    quantization_statistics,
    sampled_rows,
    sampled_scale,
    scale_statistics,
    shift_statistics,
    tensor_statistics,
    without_columns,
)


@dataclass(frozen=True)
class QuantizedOperand:
    """The bytes and scales of an operand [M, K], of which the rows `index` are sampled.

    x ≈ numbers * scale / (row_scale * column_scale): the factors were multiplied into x before it was quantized, and
    are taken out of the scales.

    Args:
        amax: [1, 1], where the scales were known before.
        row_scale: [M, 1].
        shift_scale: [M, 1]: the exponents of c = 2^e * s_g take bytes from h (`scale_folding.dw_operand`).
    """

    data: Tensor
    scale: Tensor
    cast: Cast
    amax: Tensor | None = None
    row_scale: Tensor | None = None
    shift_scale: Tensor | None = None
    index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def cut(self, rows: slice, count: int) -> Self:
        """One of several stacked weights, which have row scales: that of `rows`, of which `count` are sampled."""
        index = sampled_rows(rows.stop - rows.start, count, self.data.device)
        if self.data.shape[0] == rows.stop - rows.start:
            return replace(self, index=index)
        return replace(self, data=self.data[rows], scale=self.scale[rows], index=index)

    def statistics(self, x: Tensor, columns: slice = slice(None), column_scale: Tensor | None = None) -> Found:
        """The errors of the sampled rows x = operand[index, columns], and the range of the scales."""
        numbers = self._numbers(columns)
        found = self._of_scales if column_scale is None else without_columns(self._of_scales, column_scale)
        folded = column_scale is not None or self.row_scale is not None
        found = found | self._of_amax(found["scale"], folded=folded)
        if self.shift_scale is not None:
            found |= shift_statistics(numbers, self._least)
        scale = self._scale if column_scale is None else self._scale / column_scale
        return found | quantization_statistics(x, numbers, scale, self.cast.fmt)

    def of_bytes(self) -> Found:
        """The statistics of a tensor of which there are only bytes: its errors are unknown."""
        x = self._numbers(slice(None)) * self._scale
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=x.device)
        errors = dict.fromkeys(("saturated", "flushed", "noise"), unknown)
        return (
            tensor_statistics(x)[1] | errors | self._of_scales | self._of_amax(self._of_scales["scale"], folded=False)
        )

    def brief(self, columns: slice = slice(None)) -> dict[str, Any]:
        """The fields of an `octavo.observation.brief_samples.Operand`, without x."""
        numbers = self._numbers(columns, torch.bfloat16)
        return {
            "numbers": numbers,
            "scale": self._largest_scale,
            "largest": self.cast.fmt.max,
            "scaled_by_amax": self.amax is None and self.cast.scale == "fp32" and self.row_scale is None,
            "known": self._known,
            "shifted": None if self.shift_scale is None else numbers / self._least,
        }

    def brief_of_bytes(self) -> dict[str, Any]:
        """The same with x, of which there are only bytes: what became of them is unknown."""
        return self.brief() | {"x": self._numbers(slice(None)) * self._scale, "numbers": None}

    @cached_property
    def _largest_scale(self) -> Tensor:
        return self.scale.float().amax()

    @cached_property
    def _known(self) -> Tensor | None:
        """A copy: the history begins a new step before the numbers are computed."""
        return None if self.amax is None else self.amax.float().amax()

    def _numbers(self, columns: slice, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = self.data.view(torch.uint8)[:, columns][self.index].view(self.data.dtype)
        return numbers_of(codes, dtype)

    @cached_property
    def _of_scales(self) -> Found:
        scale = self.scale if self.row_scale is None else self.scale / self.row_scale
        return scale_statistics(scale)

    @cached_property
    def _scale(self) -> Tensor:
        """That of the sampled rows, which broadcasts against them."""
        scale = sampled_scale(self.scale, self.index, self.cast.granularity, self.data.shape[1])
        return scale if self.row_scale is None else scale / self.row_scale[self.index]

    @cached_property
    def _least(self) -> Tensor:
        assert self.shift_scale is not None
        return least_numbers(self.scale, self.shift_scale, self.index, self.cast.fmt)

    def _of_amax(self, scale: Tensor, *, folded: bool) -> Found:
        """The amax of all rows, where the quantization found it, and the gap between a scale known before and it."""
        if self.amax is not None:
            expected = self.scale * self.cast.fmt.max
            return {"all_amax": self.amax.amax(), "minus_gap": torch.log2(self.amax / expected).amax()}
        if self.cast.scale == "fp32" and not folded:
            return {"all_amax": torch.where(scale > SMALLEST_SCALE, scale * self.cast.fmt.max, 0)}
        return {}
