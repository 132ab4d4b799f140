"""Linear layers stacked along their outputs, to run as one GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor
from octavo.ops import quantize_stack


@dataclass(frozen=True)
class Layers:
    """Linear layers stacked along their outputs: sizes and dtypes of the weights, dtypes of the biases."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    bias_dtypes: tuple[torch.dtype | None, ...]

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Layers:
        """The layers with these parameters."""
        dtypes = tuple(None if bias is None else bias.dtype for bias in biases)
        return cls(tuple(w.shape[0] for w in weights), weights[0].dtype, dtypes)

    @property
    def biased(self) -> bool:
        """Whether any layer has a bias."""
        return any(dtype is not None for dtype in self.bias_dtypes)

    def split(self, dw: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the weights, then those of the biases, from stacked dw [N, K] and dy [T, N]."""
        biases: list[Tensor | None] = [None] * len(self.sizes)
        if self.biased:
            parts = torch.split(dy.sum(0, dtype=torch.float32), list(self.sizes))
            biases = [None if d is None else p.to(d) for p, d in zip(parts, self.bias_dtypes, strict=True)]
        return *torch.split(dw, list(self.sizes)), *biases


def cast_weights(weights: Sequence[Tensor], data: Tensor | None, scale: Tensor | None, cast: Cast) -> QTensor:
    """The stacked weights in eight bits: those that were kept, or cast here."""
    if data is not None and scale is not None:
        return QTensor(data, scale, cast.fmt, cast.granularity)
    return quantize_stack(weights, cast)


def stacked_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases as one, zeros where a layer has none; None where none has."""
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    return torch.cat([given.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)])
