"""Matrices that are quantized together, and the two steps that do it."""

import torch
from torch import Tensor

from octavo.numerics import Cast
from octavo.numerics.scaling import scale_from_amax
from octavo.ops.launching import RowBatch
from octavo.ops.rows import cast_rows, row_amaxes

SIZES = (3, 0, 130, 1, 257)
PADDING = 2  # rows between the matrices, which nothing may write


def matrices(columns: int, dtype: torch.dtype) -> list[Tensor]:
    """With zero, tiny and non-finite rows."""
    generator = torch.Generator().manual_seed(columns)
    made = [torch.randn(rows, columns, generator=generator) * 10.0 ** (i - 2) for i, rows in enumerate(SIZES)]
    made[2][5], made[2][7] = 0, made[2][7] * 1e-6
    made[4][3, 0], made[4][9, -1], made[4][11, 0] = torch.nan, torch.inf, -torch.inf
    return [m.to(dtype) for m in made]


def starts() -> list[int]:
    return [sum(SIZES[:i]) + i * PADDING for i in range(len(SIZES))]


def quantized(parts: list[Tensor], cast: Cast, *, at_once: bool) -> tuple[Tensor, Tensor, Tensor]:
    """amax, data and scales of a batch whose floors are those of each matrix, in memory that starts as 7."""
    device, total = parts[0].device, sum(SIZES) + PADDING * len(SIZES)
    amax = torch.full((total,), 7.0, device=device)
    data = torch.full((total, parts[0].shape[1]), 7, dtype=torch.uint8, device=device).view(cast.fmt.dtype)
    batch = RowBatch(parts, starts())
    row_amaxes(batch, amax, data if at_once else None, cast)
    power_of_two, scale = cast.power_of_two, torch.ones_like(amax)
    for start, rows in zip(starts(), SIZES, strict=True):
        of = slice(start, start + rows)
        floor = cast.relative_floor
        scale[of] = scale_from_amax(amax[of], cast.fmt, power_of_two=power_of_two, relative_floor=floor)
    written = scale_from_amax(amax, cast.fmt, power_of_two=power_of_two) if at_once else None
    cast_rows(batch, scale, written, data, cast)
    return amax, data, scale
