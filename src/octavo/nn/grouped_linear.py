"""A linear layer with a weight for each group of rows, as the experts of a mixture have."""

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.gathered_weight import GatheredWeight
from octavo.nn.grouped_function import grouped_linear
from octavo.nn.layer_limits import check_call
from octavo.nn.linear import compute_dtype
from octavo.nn.linear_call import FusedCall, LinearCall
from octavo.nn.observer import ExpertObserver, Observer, expert_observer
from octavo.ops.checks import check_tensor, eager_check
from octavo.recipe import Recipe

# Experts in FP8 are slower than in BF16 where a matrix has a shorter side, as 768 x 2048 (H200, docs/performance.md):
# their GEMMs gain less than the passes that quantize cost.
LEAST_SIDE = 2048


class GroupedLinear(nn.Module):
    """y[m] = x[m] @ weight[e]^T for the rows m of group e: plain PyTorch, until `octavo.convert` gives it a recipe.

    Args:
        groups: E, the number of groups.
        in_features: K, of each row of x.
        out_features: N, of each row of y.

    Example:
        >>> layer = GroupedLinear(2, 32, 64)
        >>> offsets = torch.tensor([3, 8], dtype=torch.int32)  # rows 0 to 2 and 3 to 7
        >>> layer(torch.randn(8, 32), offsets).shape
        torch.Size([8, 64])
    """

    recipe: Recipe | None = None  # set by `octavo.convert`
    name: str = ""
    observers: dict[str, ExpertObserver] | None = None  # of its weight, set by `octavo.watch`

    def __init__(self, groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    @classmethod
    def from_linears(cls, linears: Sequence[nn.Linear]) -> Self:
        """A layer with copies of the weights of `linears`, one group each.

        Raises:
            ValueError: the layers have unequal shapes, or biases, or there is none.
        """
        shapes = sorted({tuple(linear.weight.shape) for linear in linears})
        if len(shapes) != 1 or any(linear.bias is not None for linear in linears):
            raise ValueError(
                f"the experts of a grouped layer have one shape [N, K] and no bias, got {[list(s) for s in shapes]}"
                f"{' with biases' if len(shapes) == 1 else ''}: leave them as separate layers"
            )
        n, k = shapes[0]
        layer = cls(0, k, n)
        layer.weight = nn.Parameter(torch.stack([linear.weight.detach() for linear in linears]))
        return layer

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """y [M, N] of x [M, K].

        Args:
            offsets: int32 [E] on the device of x, where each group of rows ends. A group may be empty. Rows from
                offsets[-1] on have any numbers in y.

        Raises:
            ValueError: `offsets` is not int32 [E].
        """
        check_offsets(offsets, self.weight.shape[0])
        dtype = compute_dtype(x)
        if x.numel() == 0:
            return x.to(dtype) @ wide(self.weight)[0].to(dtype).t()
        if self.recipe is None or not self.recipe.quantized:
            return plain_grouped_linear(x.to(dtype), wide(self.weight), offsets)
        call = grouped_call(self, x, self.weight, observer=expert_observer(self, "weight"))
        return grouped_linear(x, self.weight, offsets, call)

    def extra_repr(self) -> str:
        e, n, k = self.weight.shape
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        return f"groups={e}, in_features={k}, out_features={n}{recipe}"


@eager_check
def check_offsets(offsets: Tensor, groups: int) -> None:
    check_tensor("offsets", offsets, (groups,), torch.int32)


def grouped_call(
    layer: Any, x: Tensor, *weights: Tensor, observer: Observer | None, outer_observer: Observer | None = None
) -> FusedCall:
    """The call of a layer with a recipe, for the input `x`; raises the errors of `check_call`."""
    check_call(layer, x, *weights)
    recipe = layer.recipe.fusable
    if recipe is None:
        raise ValueError(
            f"grouped layers run recipes with row scales, rounded to nearest, and no rotation, got {layer.recipe}: "
            "convert them with 'rowwise', or leave them out by skip="
        )
    # Dynamo cannot trace a call of the alias FusedCall.
    return LinearCall(recipe, compute_dtype(x), observer=observer, outer_observer=outer_observer)


def wide(w: Tensor) -> Tensor:
    """The weights as numbers, where FSDP2 has gathered bytes."""
    return w.dequantize() if isinstance(w, GatheredWeight) else w


def plain_grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The grouped product in the dtype of x, by PyTorch."""
    y: Tensor = F.grouped_mm(x, weight.to(x.dtype).transpose(1, 2), offs=offsets)  # [M_e,K] @ [N,K]^T
    return y
