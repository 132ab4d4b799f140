"""Brief samples of experts: the numbers that rules judge, for each expert of a layer by itself.

`ROWS` rows of each expert are read, spread over its group, and the scales of all its rows. An expert with fewer rows
has no numbers in this sample.
"""

from functools import lru_cache

import torch
from torch import Tensor

from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.observation.grouped_operand import GroupedOperand
from octavo.observation.statistics import BRIEF_MAXIMA, BRIEF_SUMS, sampled_rows

ROWS = 8
_NOT_ZERO = torch.finfo(torch.float32).tiny


def rows_of_experts(operand: GroupedOperand) -> tuple[Tensor, Tensor]:
    """`ROWS` rows of each expert, int64 [E * ROWS], and whether it has so many [E]. Those of a matrix may repeat."""
    sizes = operand.sizes.long()
    if operand.kind == "w":
        sizes = torch.full_like(sizes, operand.rows // operand.experts)
    part, place = _parts(sizes.device)
    begin, end = part * sizes[:, None] // ROWS, (part + 1) * sizes[:, None] // ROWS
    within = begin + (place * (end - begin)).long()
    first = sizes.cumsum(0) - sizes
    known = torch.ones_like(sizes, dtype=torch.bool) if operand.kind == "w" else sizes >= ROWS
    return (first[:, None] + within).clamp(max=operand.rows - 1).view(-1), known


def brief_statistics(operand: GroupedOperand, index: Tensor, known: Tensor) -> Tensor:
    """The `BRIEF_MAXIMA` and `BRIEF_SUMS` of each expert, float64 [E, fields]; those of no sample where not `known`.

    Args:
        index, known: of `rows_of_experts`.
    """
    rows, experts = operand.sample(index), operand.experts
    x, numbers = (t.view(experts, ROWS, -1) for t in (rows.x, rows.numbers))
    scale, bad = _of_scales(operand)
    over_rows = (1, 2)
    codes = numbers.count_nonzero(over_rows)
    zero = torch.zeros_like(codes)
    lost = zero if rows.least is None else codes - (numbers.abs() > rows.least.view(experts, ROWS, 1)).sum(over_rows)
    columns = {
        "amax": torch.linalg.vector_norm(x, torch.inf, over_rows),
        "all_amax": _amax_of_all_rows(operand, scale),
        "scale": scale,
        "minus_gap": torch.full_like(scale, -torch.inf),  # no scale was known before
        "elements": zero + x[0].numel(),
        "bad": (x - x).sum(over_rows) + bad,
        "x2": torch.linalg.vector_norm(x, 2, over_rows).double().square(),
        "x4": torch.linalg.vector_norm(x.square(), 2, over_rows).double().square(),
        "nonzero": x.count_nonzero(over_rows),
        "codes": codes if operand.source else torch.full_like(scale, torch.nan),
        "lost": lost,
        "saturated": zero,
        "quantized": zero + 1,
    }
    maxima = torch.stack([columns[name].double() for name in BRIEF_MAXIMA], 1)
    sums = torch.stack([columns[name].double() for name in BRIEF_SUMS], 1)
    seen = known.unsqueeze(1)
    return torch.cat([torch.where(seen, maxima, -torch.inf), torch.where(seen, sums, 0)], 1)


def _of_scales(operand: GroupedOperand) -> tuple[Tensor, Tensor]:
    """The largest scale [E] of the rows of each expert, and 0, or NaN where one is not finite."""
    scale = operand.scale.view(-1)
    if operand.kind == "w":
        each = scale.view(operand.experts, -1)
        return each.amax(1), (each - each).sum(1)
    nothing = torch.full((operand.experts + 1,), -torch.inf, device=scale.device)
    largest = nothing.scatter_reduce(0, operand.group, scale, "amax")
    bad = torch.zeros_like(nothing).index_add(0, operand.group, scale - scale)
    return largest[:-1], bad[:-1]


def _amax_of_all_rows(operand: GroupedOperand, scale: Tensor) -> Tensor:
    """The amax [E] of all rows, which the largest scale gives. Where that has other factors, only whether it is 0."""
    plain = operand.row_scale is None and operand.column_scale is None and operand.cast.scale == "fp32"
    amax = scale * operand.cast.fmt.max if plain else torch.full_like(scale, _NOT_ZERO)
    return torch.where(scale > SMALLEST_SCALE, amax, 0)


@lru_cache(maxsize=16)
def _parts(device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of the parts that a group is cut into, [ROWS], and the place of a row within each, 0 to 1."""
    places = sampled_rows(ROWS << 20, ROWS, device).double() / (1 << 20)
    part = torch.arange(ROWS, device=device)
    return part, places - part
