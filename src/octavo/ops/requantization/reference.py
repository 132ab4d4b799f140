"""Casting again, in plain PyTorch: the same bytes as the first time, since the scale is the same, but transposed.

Backward contracts along the rows of x and of w, whose forward bytes lie along their columns. To keep those bytes until
then costs a byte an element; where the tensor that they came from is kept anyway (a weight, what a norm read), casting
it again in the pass that transposes costs no more than one more byte read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.numerics.codec import cast as cast_to
from octavo.numerics.formats import Format
from octavo.numerics.granularity import Granularity


def recast_transposed(tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity) -> Tensor:
    """[K, sum of M_i] from matrices [M_i, K] and the scales of the stacked matrix that they were quantized by."""
    x = torch.cat([x.float() for x in tensors])
    return _bytes_transposed(x, granularity.expand(scale, tuple(x.shape)), fmt)


def recast_norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: Format
) -> Tensor:
    """[K, M] from x [M, K], the statistics of its norm [M, 1] and the row scales [M, 1] of the norm's output."""
    centered = x.float() if mean is None else x.float() - mean
    normed = centered * rstd * weight.float()
    return _bytes_transposed(normed if bias is None else normed + bias.float(), scale, fmt)


def _bytes_transposed(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    data = cast_to(x * (1 / scale), fmt)
    return data.view(torch.uint8).t().contiguous().view(fmt.dtype)
