"""Requantization in plain PyTorch: the same scale gives the same bytes as before, here transposed.

Forward contracts x and w along their columns, backward along their rows, so backward needs the bytes transposed. Saving
the forward bytes for it costs one byte an element. If the unquantized tensor is saved anyway (a weight, the input of a
norm), casting it again while transposing needs no memory, and reads one byte an element more.
"""

import torch
from torch import Tensor

from octavo.numerics.codec import cast as cast_to
from octavo.numerics.formats import Format
from octavo.numerics.granularity import Granularity


def requantize_reference(tensors: list[Tensor], scale: Tensor, fmt: Format) -> Tensor:
    """[sum of M_i, K] from matrices [M_i, K] and the row scales of the stacked matrix."""
    return cast_to(torch.cat([x.float() for x in tensors]) * (1 / scale), fmt)


def requantize_transposed_reference(
    tensors: list[Tensor], scale: Tensor, fmt: Format, granularity: Granularity
) -> Tensor:
    """[K, sum of M_i] from matrices [M_i, K] and the scales of the stacked matrix."""
    x = torch.cat([x.float() for x in tensors])
    return _bytes_transposed(x, granularity.expand(scale, tuple(x.shape)), fmt)


def requantize_norm_reference(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, fmt: Format
) -> Tensor:
    """[K, M] from x [M, K], the statistics of its norm [M, 1] and the row scales [M, 1] of the norm's output."""
    centered = x.float() if mean is None else x.float() - mean
    normed = centered * rstd * weight.float()
    return _bytes_transposed(normed if bias is None else normed + bias.float(), scale, fmt)


def _bytes_transposed(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    data = cast_to(x * (1 / scale), fmt)
    return data.view(torch.uint8).t().contiguous().view(fmt.dtype)
