"""Quantization of many matrices by row in plain PyTorch. The kernels must equal it, byte for byte."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.codec import cast as cast_to
from octavo.numerics.granularity import ROW
from octavo.numerics.scaling import scale_from_amax


def row_amaxes_reference(
    matrices: Sequence[Tensor], starts: Sequence[int], amax: Tensor, data: Tensor | None, cast: Cast
) -> None:
    for x, start in zip(matrices, starts, strict=True):
        if x.numel():
            amax[start : start + x.shape[0]] = ROW.amax(x.float()).abs().view(-1).nan_to_num(torch.inf, torch.inf)
    if data is not None:
        scale = scale_from_amax(amax, cast.fmt, power_of_two=cast.power_of_two)
        cast_rows_reference(matrices, starts, scale, data, cast)


def cast_rows_reference(
    matrices: Sequence[Tensor], starts: Sequence[int], scale: Tensor, data: Tensor, cast: Cast
) -> None:
    inv_scale = (1 / scale).view(-1, 1)
    for x, start in zip(matrices, starts, strict=True):
        rows = slice(start, start + x.shape[0])
        data[rows].view(torch.uint8).copy_(cast_to(x.float() * inv_scale[rows], cast.fmt).view(torch.uint8))
