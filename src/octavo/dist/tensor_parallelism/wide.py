"""The exchanges of tensor parallelism in high precision, differentiable: for layers whose recipe is not `rowwise`.

The backward pass of `gather_rows` is the exchange of `scatter_rows`, and the other way round.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.dist.tensor_parallelism.ranks import Ranks


def gather_rows(x: Tensor, ranks: Ranks) -> Tensor:
    """[..., T, K] of this rank's rows x [..., T / R, K]. Without sequence parallelism, x itself."""
    rows: Tensor = _Gather.apply(x.reshape(-1, x.shape[-1]), ranks)  # type: ignore[no-untyped-call]
    return ranks.by_sequence(rows, x.shape[:-2])


def scatter_rows(y: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows [T / R, N] of the sum of the ranks' y [T, N], rows in the order of the ranks."""
    own: Tensor = _Scatter.apply(y, ranks)  # type: ignore[no-untyped-call]
    return own


def own_rows(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows [..., T / R, K] of x [..., T, K], which each rank has whole."""
    own: Tensor = _Own.apply(x, ranks)  # type: ignore[no-untyped-call]
    return own


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.own(ranks.by_rank(x)).reshape(*x.shape[:-2], -1, x.shape[-1]).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gather_rows(dy, ctx.ranks), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.done(ranks.gather(x)[0]) if ranks.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.done(ctx.ranks.scatter(dy)), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.done(ranks.scatter(y))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.done(ctx.ranks.gather(dy)[0]) if ctx.ranks.sequence else dy, None
