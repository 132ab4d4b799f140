"""A quantized tensor: data, scales, format and granularity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.numerics.codec import widen
from octavo.numerics.formats import Format
from octavo.numerics.granularity import Granularity

SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)


@dataclass(frozen=True, eq=False)
class QTensor:
    """x ≈ data * scale. A plain frozen container, not a subclass of Tensor.

    Invariants, checked at construction:
        data.dtype == format.dtype
        scale.ndim == data.ndim, and scale.shape == granularity.scale_shape(data.shape)
        scale.dtype is float32 or float8_e8m0fnu, on the device of data

    Example:
        >>> q = octavo.quantize(torch.randn(4, 8))
        >>> q.data.shape, q.scale.shape, q.dequantize().shape
        (torch.Size([4, 8]), torch.Size([4, 1]), torch.Size([4, 8]))
    """

    data: Tensor
    scale: Tensor
    format: Format
    granularity: Granularity

    def __post_init__(self) -> None:
        if not torch.compiler.is_dynamo_compiling():  # to trace it for each tensor of a model takes seconds
            self._check()

    def _check(self) -> None:
        if self.data.dtype != self.format.dtype:
            raise TypeError(f"{self.format.name} data must be {self.format.dtype}, got {self.data.dtype}")
        if self.scale.dtype not in SCALE_DTYPES:
            raise TypeError(f"a scale must be float32 or float8_e8m0fnu, got {self.scale.dtype}")
        required = self.granularity.scale_shape(self.data.shape)
        if self.scale.shape != required:
            raise ValueError(
                f"{self.granularity.name} scales of data {list(self.data.shape)} must have shape {list(required)}, "
                f"got {list(self.scale.shape)}"
            )
        if self.scale.device != self.data.device:
            raise ValueError(
                f"data is on {self.data.device} and its scale on {self.scale.device}: move one to the other"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that was quantized."""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """data * scale, computed in float32 and rounded once to `dtype`.

        A finite tensor stays finite: a product beyond the range of float32 (or of bfloat16, for that `dtype`) becomes
        the largest number there, not inf. Such a product occurs if a number near the largest float32 is rounded up in a
        block with a power-of-two scale. The MX specification leaves it to the implementation.
        """
        wide, scale = widen(self.data), self.granularity.expand(self.scale.float(), tuple(self.shape))
        largest = torch.finfo(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).max
        x = wide * scale
        return torch.where(wide.isfinite() & scale.isfinite(), x.clamp(-largest, largest), x).to(dtype)

    def t(self) -> QTensor:
        """The transposed matrix, as a view, for granularities whose scale transposes with the bytes."""
        if self.data.ndim != 2 or not self.granularity.transposes:
            raise ValueError(
                f"only a matrix with tensor or square-block scales transposes as it is; this is {list(self.shape)} "
                f"with {self.granularity.name} scales: quantize the transposed matrix instead"
            )
        return QTensor(self.data.t(), self.scale.t(), self.format, self.granularity)
