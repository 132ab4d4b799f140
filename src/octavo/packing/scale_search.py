"""For each block of a weight, the scale of least mean squared error (MSE), searched on a grid around amax/448.

    e[f] = sum over the block of (w - s q)^2,    s = f * amax / 448,    q = w/s rounded to e4m3, saturating

For int8, s = f * amax / 127 and q is an integer. Factors f below 1 clip the largest elements and put the others on a
finer grid, so integers have factors from 1 down to 0.6. The grid of a float is relative already, and the gain of such
factors is 0.02 to 0.1 dB. Factors above 1 clip nothing. They move all elements against the binades of e4m3, whose
relative step is twice as large at the bottom of a binade as at its top, and lose only subnormals. Their gain grows as
fewer elements share a scale. For normal weights it is 0.01 dB with one scale for a tensor, 0.1 for a block of 128 x
128, 0.4 for a row of 1024, 1.0 for a group of 128, and 1.9 for a group of 32. Scales that are powers of two can only
take the factors 1 and 1/2.

q of e4m3 is computed without a cast. For 2^e <= |w/s| < 2^(e+1) the step of e4m3 is 2^(e-3), which is the last bit of
the float32 number 1.5 * 2^(e+20). Adding that number and subtracting it again rounds w/s to the step, to nearest
even.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics import Cast, QTensor
from octavo.numerics.formats import E4M3, INT8, Format
from octavo.numerics.formats import cast as cast_to
from octavo.numerics.scaling import SMALLEST_SCALE

FACTORS = (1.0, *(1 + i / 16 for i in range(1, 16)), *(1 - i / 10 for i in range(1, 5)))
POWER_OF_TWO_FACTORS = (1.0, 0.5)
INTEGER_FACTORS = tuple(1 - i / 40 for i in range(17))
# A chunk of elements that fits into a core's cache several times, and that torch computes on one thread: with more
# threads, the many short passes over it would mostly wait for each other.
_CHUNK = (1 << 15) - 1
_EXPONENT, _LEAST, _TO_MAGIC = 0x7F800000, (127 - 6) << 23, (20 << 23) + (1 << 22)


class SearchedScale(NamedTuple):
    """A scale, and each weight's squared error with amax/448 (`before`) and with it (`after`), float64 [weights]."""

    scale: Tensor
    before: Tensor
    after: Tensor


def search_scale(w: Tensor, scale: Tensor, cast: Cast) -> SearchedScale:
    """For each block of a weight w [N, K] on the CPU, the scale of least squared error near `scale`, amax/448 in
    float32 and the shape of the cast's granularity. Among equals the first factor wins, and 1 is the first of all.
    Scales that are powers of two remain powers of two."""
    # The elements of each block as a row, blocks in the order of their scales.
    (n, k), (rows, columns) = w.shape, cast.granularity.block(tuple(w.shape))
    blocks = w.reshape(n // rows, rows, k // columns, columns).transpose(1, 2).reshape(-1, rows * columns)
    flat = scale.reshape(-1)
    chosen, before, after = torch.empty_like(flat), torch.zeros(1).double(), torch.zeros(1).double()
    step = max(_CHUNK // blocks.shape[1], 1)
    for i in range(0, len(blocks), step):
        grid = _grid(flat[i : i + step], cast)
        errors = _errors(blocks[i : i + step], grid, cast.fmt)
        # `min` with indices and `gather` would start torch's threads, which slows the passes that follow.
        chosen[i : i + step] = grid[errors.argmin(0), torch.arange(grid.shape[1])]
        before += errors[0].sum()
        after += errors.amin(0).sum()
    return SearchedScale(chosen.view(scale.shape), before, after)


def search_shared_scale(weights: Iterable[Tensor], scale: Tensor, cast: Cast) -> SearchedScale:
    """`search_scale` for weights [N_i, K] that share one scale [1, 1]. One weight at a time is in memory."""
    grid = _grid(scale.reshape(1), cast)
    errors = torch.stack([_errors(w.reshape(1, -1), grid, cast.fmt)[:, 0] for w in weights])  # [weights, factors]
    best = int(errors.sum(0).argmin())
    return SearchedScale(grid[best].view(1, 1), errors[:, 0], errors[:, best])


def cast_by(w: Tensor, scale: Tensor, cast: Cast) -> QTensor:
    """Cast `w` [N, K] with `scale`, in the shape of the cast's granularity. Larger elements saturate."""
    inv_scale = cast.granularity.expand(1 / scale, tuple(w.shape))
    return QTensor(cast_to(w.float() * inv_scale, cast.fmt), scale, cast.fmt, cast.granularity)


def _grid(scale: Tensor, cast: Cast) -> Tensor:
    """The scales [factors, blocks] to try."""
    usual = INTEGER_FACTORS if cast.fmt is INT8 else FACTORS
    factors = torch.tensor(POWER_OF_TWO_FACTORS if cast.power_of_two else usual)
    return (scale * factors[:, None]).clamp_(min=SMALLEST_SCALE)


def _errors(blocks: Tensor, grid: Tensor, fmt: Format) -> Tensor:
    """The squared error, float64 [factors, blocks], of `blocks` [blocks, elements] with the scales of `grid`."""
    errors, inverse = torch.zeros(grid.shape, dtype=torch.float64), 1 / grid
    for j in range(0, blocks.shape[1], _CHUNK):
        x, axis = blocks[:, j : j + _CHUNK].float(), 1
        if x.shape[0] > x.shape[1]:  # vectorize along the longer axis
            x, axis = x.t().contiguous(), 0
        for i in range(len(grid)):
            errors[i] += _rounding(x * inverse[i].unsqueeze(axis), fmt).square_().sum(axis)
    return errors.mul_(grid.double().square())


def _rounding(x: Tensor, fmt: Format) -> Tensor:
    if fmt is INT8:
        return x.round().clamp_(-INT8.max, INT8.max).sub_(x)
    magic = x.view(torch.int32).bitwise_and(_EXPONENT).clamp_(min=_LEAST).add_(_TO_MAGIC).view(torch.float32)
    return (x + magic).sub_(magic).clamp_(-E4M3.max, E4M3.max).sub_(x)
