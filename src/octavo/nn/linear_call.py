"""A call of a converted layer: its arguments that are not tensors, and the GEMMs by its recipe."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from octavo.nn.delayed import ScaleHistory
from octavo.nn.observer import Observer
from octavo.numerics.qtensor import QTensor
from octavo.ops import scaled_mm
from octavo.recipe import FusableRecipe, Gemm, Recipe

R = TypeVar("R", Recipe, FusableRecipe)


@dataclass(eq=False)  # not frozen: compiled code would look up the defaults of its fields in Python at each call
class LinearCall(Generic[R]):
    """The arguments of a call that are not tensors.

    Args:
        recipe: a `Recipe`, or a `FusableRecipe` where the call is one of a fused module.
        dtype: of y, and of the GEMMs without casts.
        x_history, w_history, dy_history: the histories of delayed scaling.
        observer: where statistics of the operands are recorded; None records none.
        outer_observer: in an MLP, where those of the layer after the activation are recorded.
        input_is_saved: whether another operation saves x for its backward pass, so that saving it here takes no memory.
    """

    recipe: R
    dtype: torch.dtype
    x_history: ScaleHistory | None = None
    w_history: ScaleHistory | None = None
    dy_history: ScaleHistory | None = None
    observer: Observer | None = None
    outer_observer: Observer | None = None
    input_is_saved: bool = False

    @property
    def is_operation(self) -> bool:
        """Whether Dynamo traces, and may take the passes for one operation: they write to no history or observer."""
        written = (self.x_history, self.w_history, self.dy_history, self.observer, self.outer_observer)
        return torch.compiler.is_dynamo_compiling() and all(state is None for state in written)

    def mm(self, gemm: Gemm, a: QTensor, b: QTensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a [M, R] @ b [N, R]^T + bias [N], as `gemm` accumulates it."""
        fast, emulate = gemm.fast_accumulation, self.recipe.emulate
        return scaled_mm(a, b, bias=bias, out_dtype=out_dtype, fast_accumulation=fast, emulate=emulate)


Call = LinearCall[Recipe]
FusedCall = LinearCall[FusableRecipe]


def shaped(y: Tensor, shape: torch.Size) -> Tensor:
    """y [T, N], which was computed here, as an output [..., N] for an input of `shape`. FSDP warns of a view."""
    result: Tensor = torch.ops.aten._unsafe_view(y, (*shape[:-1], y.shape[1]))
    return result
