"""Adding the statistics of an operand of a grouped GEMM to buffers, in the steps that are sampled.

As `octavo.ops.observation.observe`, for rows that belong to groups: the statistics of all sampled rows, and for each
expert the sums from which its SQNR follows. There are at least `ROWS_OF_EXPERT` times as many sampled rows as experts.
A brief sample leaves experts out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.scaling import SMALLEST_SCALE, scale_exponent
from octavo.ops.observation import numbers_of_rows
from octavo.ops.permutation import group_of_rows, group_shifts
from octavo.ops.sampling import Sampling, is_recomputed, sampled_operation
from octavo.ops.statistics import (
    FIELD,
    Found,
    add_statistics,
    numbers_of,
    quantization_statistics,
    sampled_rows,
    scale_statistics,
    shift_statistics,
    tensor_statistics,
    without_columns,
)

ROWS_OF_EXPERT = 4


@sampled_operation("stats", "sums")
def observe_experts(
    stats: Tensor,
    sums: Tensor,
    kind: str,
    source: Sequence[Tensor],
    offsets: Tensor,
    data: Tensor,
    scale: Tensor,
    spec: str,
    slot: Tensor | None = None,
    factor: Tensor | None = None,
    column_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    shift_scale: Tensor | None = None,
) -> None:
    """Add the statistics of an operand to `stats` [WIDTH + ...] and `sums`, if this step has a full sample.

    Args:
        sums: [E, 2], of the squares and of the squared errors of an expert's sampled rows; [E, 3] for x, whose first
            column counts all its rows.
        kind, source: as in `observe`. "w" has the matrices as one, [E * N, K]. "x" and "dy" have rows of tokens where
            `slot` is given.
        offsets: int32 [E], where each group of rows ends. Each expert has as many rows of w.
        data, scale, spec: of the quantized operand, by row.
        slot: int32 [M]: row m is that of the token slot[m] // top_k of the first source.
        factor: [M, 1], multiplied into the rows of the source.
        column_scale, row_scale, shift_scale: as in `observe`; column_scale [E, N], a line for each expert.
    """
    if not Sampling.full or (stats.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if is_recomputed(kind):
        stats[FIELD["recomputed"]] = 1
        return
    experts, rows, cast = len(offsets), len(data), parse_cast(spec)
    index = sampled_rows(rows, max(Sampling.full, ROWS_OF_EXPERT * experts), stats.device)
    groups = _groups(kind, offsets, rows)
    inside, group = (groups[index] < experts).unsqueeze(1), groups[index].clamp(max=experts - 1)
    numbers = numbers_of(data.view(torch.uint8)[index].view(data.dtype), torch.float32)
    numbers = torch.where(inside, numbers, 0)  # a row of no expert has any bytes
    unfolded = scale if row_scale is None else scale / row_scale
    scales = unfolded[index] if column_scale is None else unfolded[index] / column_scale[group]
    x, found = tensor_statistics(torch.where(inside, _rows(kind, source, index, slot, factor, numbers * scales), 0))
    found |= quantization_statistics(x, numbers, scales, cast.fmt) | scale_statistics(unfolded)
    if column_scale is not None:
        found = without_columns(found, column_scale)
    elif row_scale is None:
        found |= _amax(found["scale"], cast)
    if shift_scale is not None:
        exponent = (scale_exponent(shift_scale) + scale_exponent(scale)).view(-1)
        shift = group_shifts(exponent, groups, experts)[1][index].clamp(max=100).float().unsqueeze(1)
        found |= shift_statistics(numbers, torch.exp2(shift) * (cast.fmt.smallest_subnormal / 2))  # a tie rounds to 0
    if not source:  # of bytes alone the errors are unknown
        found |= dict.fromkeys(("saturated", "flushed", "noise"), torch.full_like(found["x2"], torch.nan))
    add_statistics(stats, found)
    error = (x - numbers * scales).double() if source else torch.full_like(x, torch.nan, dtype=torch.float64)
    squares = torch.stack([x.double().square().sum(1), error.square().sum(1)], 1)
    sums[:, -2:].index_add_(0, group, squares)
    if sums.shape[1] == 3:
        sums[:, 0] += offsets.diff(prepend=offsets.new_zeros(1))


def _groups(kind: str, offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row; their number for a row of none."""
    if kind == "w":
        return torch.arange(rows, device=offsets.device) // (rows // len(offsets))
    return group_of_rows(offsets, rows).long()


def _rows(
    kind: str, source: Sequence[Tensor], index: Tensor, slot: Tensor | None, factor: Tensor | None, otherwise: Tensor
) -> Tensor:
    """The sampled rows in high precision; `otherwise` where there is no source."""
    if not source:
        return otherwise
    first, *rest = source
    token = index if slot is None else slot[index] // (len(slot) // len(first))
    rows = numbers_of_rows("x" if kind == "w" else kind, [first[token], *(t[index] for t in rest)])
    return rows if factor is None else rows * factor[index]


def _amax(scale: Tensor, cast: Cast) -> Found:
    """The amax of all rows, which the largest scale gives."""
    return {"all_amax": torch.where(scale > SMALLEST_SCALE, scale * cast.fmt.max, 0)}
