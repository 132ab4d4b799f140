"""Linear layers stacked along their outputs, to run as one GEMM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor
from octavo.ops import quantize_stack


@dataclass(frozen=True, eq=False)
class Stack:
    """The parameters of stacked layers.

    Args:
        weights: [N_i, K].
        biases: [N_i], or None for a layer without one.
        cached: the quantized weights [sum of N_i, K], where `octavo.cast_once` holds them.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    cached: QTensor | None = None

    def arguments(self) -> tuple[Tensor | None, ...]:
        """The tensors as arguments of an autograd Function, which `from_arguments` reads."""
        data, scale = (None, None) if self.cached is None else (self.cached.data, self.cached.scale)
        return data, scale, *self.weights, *self.biases

    @classmethod
    def from_arguments(cls, tensors: Sequence[Tensor | None], cast: Cast) -> Self:
        """The stack that gave these `arguments`; `cast` is that of the weights."""
        data, scale, *parameters = tensors
        half = len(parameters) // 2
        weights = [w for w in parameters[:half] if w is not None]
        cached = None if data is None or scale is None else QTensor(data, scale, cast.fmt, cast.granularity)
        return cls(weights, parameters[half:], cached)

    def quantize(self, cast: Cast) -> QTensor:
        """The quantized weights [sum of N_i, K]: those cached, or cast now."""
        return quantize_stack(self.weights, cast) if self.cached is None else self.cached

    def bias(self) -> Tensor | None:
        """The biases [sum of N_i] as one, zeros where a layer has none; None where no layer has one."""
        if len(self.biases) == 1:
            return self.biases[0]
        given = next((bias for bias in self.biases if bias is not None), None)
        if given is None:
            return None
        pairs = zip(self.weights, self.biases, strict=True)
        return torch.cat([given.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])


@dataclass(frozen=True)
class StackInfo:
    """The facts of a stack that the backward pass needs: sizes N_i and dtype of the weights, dtypes of the biases."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    bias_dtypes: tuple[torch.dtype | None, ...]

    @classmethod
    def of(cls, stack: Stack) -> Self:
        dtypes = tuple(None if bias is None else bias.dtype for bias in stack.biases)
        return cls(tuple(w.shape[0] for w in stack.weights), stack.weights[0].dtype, dtypes)

    @property
    def biased(self) -> bool:
        return any(dtype is not None for dtype in self.bias_dtypes)

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """The gradient of the stacked biases, float32 [sum of N_i], from dy [T, sum of N_i]; empty without biases."""
        return dy.sum(0, dtype=torch.float32) if self.biased else dy.new_empty(0)

    def gradients(self, dw: Tensor, dbias: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `Stack.arguments`, from stacked dw [sum of N_i, K] and dbias [sum of N_i]."""
        biases: list[Tensor | None] = [None] * len(self.sizes)
        if self.biased:
            parts = torch.split(dbias, list(self.sizes))
            biases = [None if d is None else p.to(d) for p, d in zip(parts, self.bias_dtypes, strict=True)]
        return None, None, *torch.split(dw, list(self.sizes)), *biases
