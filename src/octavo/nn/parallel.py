"""Linear layers of which each rank of a mesh has a part: tensor parallelism.

`octavo.dist.ColumnParallel` and `RowParallel` give such a layer the attribute `parallel`, which computes it together
with the other ranks, before and after `octavo.convert`. This module is all that layers know of other ranks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from octavo.nn.precomputed import PrecomputedProjections
from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor


class Parallel(Protocol):
    """The computation of a layer of which each rank has a part."""

    def linear(self, layer: Any, x: Tensor) -> Tensor:
        """The output of `layer`, an `nn.Linear`, converted or not."""

    def norm_linear(self, module: Any, x: Tensor, residual: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """`NormLinear.forward` of a module whose layers are computed so."""

    def mlp(self, module: Any, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`FusedMLP.run` of a module whose inner layers are computed so."""

    def quantize(self, stacks: Sequence[tuple[Sequence[nn.Linear], Cast]]) -> list[QTensor]:
        """This rank's parts of the weights of each stack of parallel layers, by a cast of row scales."""


class ParallelLinear(nn.Linear):
    """An `nn.Linear` of which each rank has a part, not converted."""

    parallel: Parallel

    def forward(self, x: Tensor | PrecomputedProjections) -> Tensor:
        return x.output_of(self) if isinstance(x, PrecomputedProjections) else self.parallel.linear(self, x)


def parallel_of(layers: Sequence[nn.Module]) -> Parallel | None:
    """The computation of layers that share an input; None for layers that each rank has whole.

    Raises:
        ValueError: some of them are parallel and others are not.
    """
    ways = {layer.__dict__.get("parallel") for layer in layers}
    if len(ways) > 1:
        raise ValueError(
            "layers that share an input must be parallelized together: give the style octavo.dist.ColumnParallel to "
            f"each of {', '.join(map(str, layers))}"
        )
    way: Parallel | None = ways.pop()
    return way
