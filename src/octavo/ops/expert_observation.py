"""Adding the statistics of an operand of a grouped GEMM to buffers, in the steps that are sampled.

As `octavo.ops.observation`, for rows that belong to groups: the statistics of all sampled rows, and for each expert the
sums from which its SQNR follows. Sampled are at least `ROWS_OF_EXPERT` times as many rows as there are experts. A
brief sample leaves experts out.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.scaling import SMALLEST_SCALE, scale_exponent
from octavo.ops.inductor import OPERATIONS
from octavo.ops.observation import Sampling, numbers_of_rows
from octavo.ops.permutation import group_of_rows
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


def observe_experts(
    stats: Tensor,
    sums: Tensor,
    kind: str,
    source: list[Tensor],
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
        kind, source: as in `octavo.ops.observe`. "w" has the matrices as one, [E * N, K]. "x" and "dy" have rows of
            tokens where `slot` is given.
        offsets: int32 [E], where each group of rows ends. Each expert has as many rows of w.
        data, scale, spec: of the quantized operand, by row.
        slot: int32 [M]: row m is that of the token slot[m] // top_k of the first source.
        factor: [M, 1], multiplied into the rows of the source.
        column_scale, row_scale, shift_scale: as in `octavo.ops.observe`; column_scale [E, N], a line for each expert.
    """
    factors = slot, factor, column_scale, row_scale, shift_scale
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # as in `octavo.ops.observe`
        torch.ops.octavo.observe_experts.default(stats, sums, kind, source, offsets, data, scale, spec, *factors)
    elif Sampling.full:
        _observe_experts(stats, sums, kind, source, offsets, data, scale, spec, *factors)


def _observe_experts(
    stats: Tensor,
    sums: Tensor,
    kind: str,
    source: list[Tensor],
    offsets: Tensor,
    data: Tensor,
    scale: Tensor,
    spec: str,
    slot: Tensor | None,
    factor: Tensor | None,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    shift_scale: Tensor | None,
) -> None:
    if not Sampling.full or (stats.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    backward = kind == "dy" or kind.endswith("_gradient")
    if not backward and torch._C._current_graph_task_id() != -1:  # in a backward pass: a recomputation
        stats[FIELD["recomputed"]] = 1
        return
    experts, rows, cast = len(offsets), len(data), parse_cast(spec)
    index = sampled_rows(rows, max(Sampling.full, ROWS_OF_EXPERT * experts), stats.device)
    groups = _groups(kind, offsets, rows)
    group = groups[index].clamp(max=experts - 1)
    inside = (groups[index] < experts).unsqueeze(1)  # a row of no expert has any bytes
    numbers = torch.where(inside, numbers_of(data.view(torch.uint8)[index].view(data.dtype), torch.float32), 0)
    wanted = scale[index] if row_scale is None else scale[index] / row_scale[index]
    wanted = wanted if column_scale is None else wanted / column_scale[group]
    x, found = tensor_statistics(torch.where(inside, _rows(kind, source, index, slot, factor, numbers * wanted), 0))
    found |= quantization_statistics(x, numbers, wanted, cast.fmt)
    of_scales = scale_statistics(scale if row_scale is None else scale / row_scale)
    found |= of_scales if column_scale is None else without_columns(of_scales, column_scale)
    if shift_scale is not None:
        shift = _shift(groups, scale, shift_scale, experts)[index].clamp(max=100).float()
        found |= shift_statistics(
            numbers, torch.exp2(shift) * (cast.fmt.smallest_subnormal / 2)
        )  # a tie rounds to zero
    if column_scale is None and row_scale is None:
        found |= _amax(found["scale"], cast)
    if not source:  # of bytes alone the errors are unknown
        found |= dict.fromkeys(("saturated", "flushed", "noise"), torch.full_like(found["x2"], torch.nan))
    add_statistics(stats, found)
    error = (x - numbers * wanted).double() if source else torch.full_like(x, torch.nan, dtype=torch.float64)
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
    kind: str, source: list[Tensor], index: Tensor, slot: Tensor | None, factor: Tensor | None, otherwise: Tensor
) -> Tensor:
    """The sampled rows in high precision; `otherwise` where there is no source."""
    if not source:
        return otherwise
    first, *rest = source
    token = index if slot is None else slot[index] // (len(slot) // len(first))
    rows = numbers_of_rows("x" if kind == "w" else kind, [first[token], *(t[index] for t in rest)])
    return rows if factor is None else rows * factor[index]


def _shift(groups: Tensor, scale: Tensor, shift_scale: Tensor, experts: int) -> Tensor:
    """[M, 1]: by how many exponents the bytes of a row are shifted for dw (`octavo.nn.grouped_function`)."""
    exponent = scale_exponent(shift_scale) + scale_exponent(scale)
    lowest = torch.full((experts + 1,), -(2**30), dtype=exponent.dtype, device=exponent.device)
    largest = lowest.scatter_reduce(0, groups, exponent.view(-1), "amax")
    shift: Tensor = largest[groups].unsqueeze(1) - exponent
    return shift


def _amax(scale: Tensor, cast: Cast) -> Found:
    """The amax of all rows, which the largest scale gives."""
    return {"all_amax": torch.where(scale > SMALLEST_SCALE, scale * cast.fmt.max, 0)}


def _register() -> None:
    """Register the operation `octavo::observe_experts`, as `octavo::observe`."""
    schema = torch.library.infer_schema(_observe_experts, mutates_args=("stats", "sums"))
    _LIBRARY.define(f"observe_experts{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl("observe_experts", _observe_experts, "CompositeExplicitAutograd")
    torch.library.register_fake("octavo::observe_experts", lambda *args: None)
    OPERATIONS["observe_experts"] = _observe_experts, lambda *args: False


_LIBRARY: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_register()
