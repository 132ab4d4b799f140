"""Adding the statistics of an operand of a grouped GEMM to buffers, in the steps that are sampled.

As `octavo.observation.operands.observe`, for rows that belong to groups. A full sample has the statistics of all
sampled rows, and for each expert the sums from which its SQNR follows; at least `ROWS_OF_EXPERT` times as many rows as
experts are sampled. A brief sample has the numbers of each expert by itself (`octavo.observation.expert_samples`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.observation.brief_samples import combine
from octavo.observation.expert_samples import brief_statistics, rows_of_experts
from octavo.observation.grouped_operand import GroupedOperand
from octavo.observation.sampling import Sampling, is_recomputed, sampled_operation
from octavo.observation.statistics import (
    FIELD,
    Found,
    add_statistics,
    quantization_statistics,
    sampled_rows,
    scale_statistics,
    shift_statistics,
    tensor_statistics,
    without_columns,
)

ROWS_OF_EXPERT = 4


@sampled_operation("stats", "sums", "brief")
def observe_experts(
    stats: Tensor,
    sums: Tensor,
    brief: Tensor,
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
    """Add the statistics of an operand to `stats` [WIDTH + ...] and `sums`, or to `brief`, if this step is sampled.

    Args:
        sums: [E, 2], of the squares and of the squared errors of an expert's sampled rows; [E, 3] for x, whose first
            column counts all its rows.
        brief: [E, BRIEF_WIDTH], the numbers of a brief sample by expert.
        kind, source: as in `observe`. "w" has the matrices as one, [E * N, K]. "x" and "dy" have rows of tokens where
            `slot` is given.
        offsets: int32 [E], where each group of rows ends. Each expert has as many rows of w.
        data, scale, spec: of the quantized operand, by row.
        slot: int32 [M]: row m is that of the token slot[m] // top_k of the first source.
        factor: [M, 1], multiplied into the rows of the source.
        column_scale, row_scale, shift_scale: as in `observe`; column_scale [E, N], a line for each expert.
    """
    if not Sampling.active or (stats.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if is_recomputed(kind):
        stats[FIELD["recomputed"]] = 1
        return
    operand = GroupedOperand(
        kind, source, offsets, data, scale, parse_cast(spec), slot, factor, column_scale, row_scale, shift_scale
    )
    if Sampling.full:
        _add_full(stats, sums, operand)
    if Sampling.brief:
        brief.copy_(combine(brief, brief_statistics(operand, *rows_of_experts(operand))))


def _add_full(stats: Tensor, sums: Tensor, operand: GroupedOperand) -> None:
    index = sampled_rows(operand.rows, max(Sampling.full, ROWS_OF_EXPERT * operand.experts), stats.device)
    rows, cast, column_scale = operand.sample(index), operand.cast, operand.column_scale
    x, found = tensor_statistics(rows.x)
    unfolded = operand.unfolded
    found |= quantization_statistics(x, rows.numbers, rows.scales, cast.fmt) | scale_statistics(unfolded)
    if column_scale is not None:
        found = without_columns(found, column_scale)
    elif operand.row_scale is None:
        found |= _amax(found["scale"], cast)
    if rows.least is not None:
        found |= shift_statistics(rows.numbers, rows.least)
    if not operand.source:  # of bytes alone the errors are unknown
        found |= dict.fromkeys(("saturated", "flushed", "noise"), torch.full_like(found["x2"], torch.nan))
    add_statistics(stats, found)
    unknown = torch.full_like(x, torch.nan, dtype=torch.float64)
    error = (x - rows.numbers * rows.scales).double() if operand.source else unknown
    squares = torch.stack([x.double().square().sum(1), error.square().sum(1)], 1)
    sums[:, -2:].index_add_(0, rows.group, squares)
    if sums.shape[1] == 3:
        sums[:, 0] += operand.sizes


def _amax(scale: Tensor, cast: Cast) -> Found:
    """The amax of all rows, which the largest scale gives."""
    return {"all_amax": torch.where(scale > SMALLEST_SCALE, scale * cast.fmt.max, 0)}
