"""Quantized weights of which each rank has a part, with the bytes and the scales of the whole weight.

column-parallel     w [N, K] is cut along N: a row and its scale are one rank's. The relative floor of the scales
                    depends on the largest scale of all ranks: one number a weight is exchanged.
row-parallel        w [N, K] is cut along K: each rank has a part of every row. The largest of the ranks' scales is
                    that of the row: N numbers are exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.dist.tensor_parallelism.ranks import Ranks
from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor
from octavo.numerics.scaling import ceil_power_of_two
from octavo.ops import requantize, row_scales


@dataclass(frozen=True, eq=False)
class Shards:
    """This rank's parts of weights that are stacked along N.

    Args:
        weights: [N_i / ranks, K] cut along N, or one weight [N, K / ranks] cut along K.
        cast: by row.
        cut_rows: whether they are cut along K: each rank has a part of every row.
    """

    weights: Sequence[Tensor]
    cast: Cast
    cut_rows: bool


def quantize_shards(shards: Sequence[Shards], ranks: Ranks) -> list[QTensor]:
    """Quantize each of `shards`, with one exchange between the ranks for all."""
    scales = [row_scales(part.weights, part.cast) for part in shards]
    sent = [s.view(-1) if part.cut_rows else _largest(part, s) for part, s in zip(shards, scales, strict=True)]
    shared = torch.split(ranks.largest(torch.cat(sent)), [t.numel() for t in sent])
    final = [_final(part, s, common) for part, s, common in zip(shards, scales, shared, strict=True)]
    return [requantize(part.weights, scale, part.cast) for part, scale in zip(shards, final, strict=True)]


def _largest(part: Shards, scale: Tensor) -> Tensor:
    """The largest finite scale [number of weights] of each weight."""
    return torch.stack([_finite(rows).amax() for rows in torch.split(scale, [len(w) for w in part.weights])])


def _finite(scale: Tensor) -> Tensor:
    return torch.where(scale.isfinite(), scale, 0)


def _final(part: Shards, scale: Tensor, shared: Tensor) -> Tensor:
    """The scales [sum of N_i, 1], with the floor relative to the largest of each weight, and rounded by the cast."""
    cast = part.cast
    if part.cut_rows:
        scale = shared.view(-1, 1)
        floor = _finite(scale).amax() * cast.relative_floor
    else:
        rows = [largest.expand(len(w)) for largest, w in zip(shared, part.weights, strict=True)]
        floor = torch.cat(rows).view(-1, 1) * cast.relative_floor
    floored = torch.maximum(scale, floor)
    return torch.where(scale.isnan(), scale, ceil_power_of_two(floored) if cast.power_of_two else floored)
