"""The scale of least squared error for each block of a weight, searched over a grid around amax/448.

    e[f] = sum over the block of (w - s q)^2,    s = f * amax / 448,    q = w/s rounded to e4m3, saturating

Factors below 1 clip the largest elements so that the others lie on a finer grid. That helps integers; a float's grid is
relative already, and here it is worth 0.02 to 0.1 dB. Factors above 1 clip nothing: they move all elements against the
binades of e4m3, whose relative step is twice as large at the bottom of a binade as at its top, and lose only
subnormals. They are worth more, the fewer elements share a scale: of normal weights 0.01 dB a tensor, 0.1 a block of
128 x 128, 0.4 a row of 1024, 1.0 a group of 128 and 1.9 a group of 32. Powers of two cannot move so: their factors are
1 and 1/2.

q is computed without a cast: 1.5 * 2^(e + 20), where 2^e <= |w/s| < 2^(e+1), has 2^(e - 3), e4m3's step there, as its
last bit, so that adding and subtracting it rounds to that step, to nearest even.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics import Cast, Granularity, QTensor
from octavo.numerics.codec import cast as cast_to
from octavo.numerics.formats import E4M3
from octavo.numerics.scaling import SMALLEST_SCALE

FACTORS = (1.0, *(1 + i / 16 for i in range(1, 16)), *(1 - i / 20 for i in range(1, 9)))
POWER_OF_TWO_FACTORS = (1.0, 0.5)
_CHUNK = 1 << 16  # elements that a core's cache holds, several times over
_EXPONENT, _LEAST, _TO_MAGIC = 0x7F800000, (127 - 6) << 23, 20 << 23


class Found(NamedTuple):
    """The `scale` found, and the squared error of the weights as a whole with the scale begun from and with this."""

    scale: Tensor
    before: Tensor
    after: Tensor


def least_squares(weights: Iterable[Tensor], scale: Tensor, cast: Cast) -> Found:
    """The scale of least squared error near `scale`; of equals the first factor, 1 before all.

    Args:
        weights: [N, K] each, floating; several only where the granularity is tensor: they then get one scale.
        scale: amax/448 in the shape that the cast's granularity gives it, float32. Blocks must fill the weights.
        cast: e4m3, of any granularity; power-of-two scales stay such.

    Returns:
        scale float32, of the shape of `scale`; before and after float64 [number of weights].
    """
    factors = POWER_OF_TWO_FACTORS if cast.power_of_two else FACTORS
    grid = [(scale * factor).clamp(min=SMALLEST_SCALE) for factor in factors]
    errors = torch.stack([_errors(w, grid, cast.granularity) for w in weights])  # [weights, factors, *scale.shape]
    totals = errors.sum(0)
    best, chosen, least = totals[0], grid[0], errors[:, 0]
    for i in range(1, len(grid)):
        better = totals[i] < best
        best = torch.where(better, totals[i], best)
        chosen = torch.where(better, grid[i], chosen)
        least = torch.where(better, errors[:, i], least)
    return Found(chosen, errors[:, 0].flatten(1).sum(1), least.flatten(1).sum(1))


def cast_by(w: Tensor, scale: Tensor, cast: Cast) -> QTensor:
    """`w` [N, K] in e4m3 by the scale [of the granularity's shape] that is given; what is larger saturates."""
    layout = cast.granularity
    data = torch.empty(w.shape, dtype=torch.uint8)
    for rows, of in _chunks(w, layout):
        part = w[rows].float()
        inv_scale = layout.expand(1 / scale[of], tuple(part.shape))
        data[rows] = cast_to(part * inv_scale, E4M3).view(torch.uint8)
    return QTensor(data.view(E4M3.dtype), scale, E4M3, layout)


def _errors(w: Tensor, grid: Sequence[Tensor], layout: Granularity) -> Tensor:
    """The squared error of each block with each scale of the grid, float64 [len(grid), *scale.shape]."""
    errors = torch.zeros(len(grid), *grid[0].shape, dtype=torch.float64)
    inverse = [1 / scale for scale in grid]
    for rows, of in _chunks(w, layout):
        part = w[rows].float()
        for i, inv_scale in enumerate(inverse):
            scaled = part * layout.expand(inv_scale[of], tuple(part.shape))
            errors[i, of] += _sum_blocks(_rounding(scaled).square_(), layout)
    return errors.mul_(torch.stack(list(grid)).double().square())


def _rounding(x: Tensor) -> Tensor:
    """What rounding float32 `x` to e4m3 adds to it."""
    exponent = x.view(torch.int32).bitwise_and(_EXPONENT).clamp_(min=_LEAST)
    magic = exponent.add_(_TO_MAGIC).view(torch.float32).mul_(1.5)
    return (x + magic).sub_(magic).clamp_(-E4M3.max, E4M3.max).sub_(x)


def _sum_blocks(x: Tensor, layout: Granularity) -> Tensor:
    """The sum over each block of `x`, float64 in the scale's shape."""
    (n, k), (r, c) = x.shape, layout.block(tuple(x.shape))
    return x.view(n // r, r, k // c, c).sum(3).double().sum(1)


def _chunks(w: Tensor, layout: Granularity) -> list[tuple[slice, slice]]:
    """Slices of whole blocks of rows of `w`, each with the rows of the scale that belong to it."""
    n, k = w.shape
    high = layout.rows or 1
    step = max(_CHUNK // max(k, 1) // high, 1)
    whole = slice(0, 1)  # a scale for the tensor
    return [
        (slice(i * high, (i + step) * high), whole if layout.rows is None else slice(i, i + step))
        for i in range(0, n // high, step)
    ]
