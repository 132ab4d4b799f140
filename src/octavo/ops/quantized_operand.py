"""The quantized form of an operand of which some rows are sampled: its errors, and the range of its scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.ops.statistics import (
    Found,
    brief_statistics,
    flushed_statistics,
    least_numbers,
    numbers_of,
    quantization_statistics,
    sampled_scale,
    saturation_statistics,
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
        brief: whether only the numbers that rules judge are computed.
    """

    data: Tensor
    scale: Tensor
    cast: Cast
    index: Tensor
    amax: Tensor | None = None
    row_scale: Tensor | None = None
    shift_scale: Tensor | None = None
    brief: bool = False

    def cut(self, rows: slice, index: Tensor) -> Self:
        """Those of the rows of one of several stacked weights, which have row scales; `index` counts in `rows`."""
        if self.data.shape[0] == rows.stop - rows.start:
            return replace(self, index=index)
        return replace(self, data=self.data[rows], scale=self.scale[rows], index=index)

    def statistics(
        self, x: Tensor, of_x: Found, columns: slice = slice(None), column_scale: Tensor | None = None
    ) -> Found:
        """The errors of the sampled rows x = operand[index, columns], and the range of the scales.

        Args:
            of_x: the `tensor_statistics` of x.
            column_scale: [1, K'].
        """
        numbers = self._numbers(columns)
        found = self._of_scales if column_scale is None else without_columns(self._of_scales, column_scale)
        folded = column_scale is not None or self.row_scale is not None
        found = found | self._of_amax(found["scale"], folded=folded)
        if self.shift_scale is not None:
            found |= shift_statistics(numbers, self._least)
        if self.brief:
            found |= flushed_statistics(of_x["nonzero"], numbers)
            # A scale that is that of the tensor saturates nothing.
            return found if self.amax is None else found | saturation_statistics(x, self._scale, self.cast.fmt)
        scale = self._scale if column_scale is None else self._scale / column_scale
        return found | quantization_statistics(x, numbers, scale, self.cast.fmt)

    def of_bytes(self) -> Found:
        """The statistics of a tensor of which there are only bytes: its errors are unknown."""
        x = self._numbers(slice(None)) * self._scale
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=x.device)
        errors = dict.fromkeys(("saturated", "flushed", "noise"), unknown)
        found = brief_statistics(x, moments=True) if self.brief else tensor_statistics(x)[1]
        return found | errors | self._of_scales | self._of_amax(self._of_scales["scale"], folded=False)

    def _numbers(self, columns: slice) -> Tensor:
        return numbers_of(self.data.view(torch.uint8)[:, columns][self.index].view(self.data.dtype))

    @cached_property
    def _of_scales(self) -> Found:
        scale = self.scale if self.row_scale is None else self.scale / self.row_scale
        return scale_statistics(scale, brief=self.brief)

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
