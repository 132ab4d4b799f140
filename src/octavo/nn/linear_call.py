"""The settings of one call of a linear layer or of a fused module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from octavo.nn.delayed import ScaleHistory
from octavo.numerics.qtensor import QTensor
from octavo.ops import scaled_mm
from octavo.recipe import FusableRecipe, Gemm, Recipe

R = TypeVar("R", Recipe, FusableRecipe)


@dataclass(frozen=True, eq=False)
class LinearCall(Generic[R]):
    """The arguments of a call that are not tensors.

    Args:
        recipe: a `Recipe`, or a `FusableRecipe` where the call is one of a fused module.
        dtype: of y, and of the GEMMs without casts.
        x_history, w_history, dy_history: the histories of delayed scaling.
    """

    recipe: R
    dtype: torch.dtype
    x_history: ScaleHistory | None = None
    w_history: ScaleHistory | None = None
    dy_history: ScaleHistory | None = None

    def mm(self, gemm: Gemm, a: QTensor, b: QTensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a [M, R] @ b [N, R]^T + bias [N], as `gemm` accumulates it."""
        emulate = self.recipe.emulate
        return scaled_mm(
            a, b, bias=bias, out_dtype=out_dtype, fast_accumulation=gemm.fast_accumulation, emulate=emulate
        )
