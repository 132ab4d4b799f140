"""Rows of tokens sorted by expert and back, fused with quantization.

A token t that is sent to `top_k` experts has the slots t * top_k, t * top_k + 1, ... Sorting the slots by expert gives
the rows of the experts' GEMMs. Each expert has one group of adjacent rows, and a group may be empty.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.qtensor import ROW, Cast, QTensor
from octavo.numerics.scaling import scale_mantissa
from octavo.ops.dispatch import COLUMNS
from octavo.ops.grouped_gemm import ALIGNMENT
from octavo.ops.launching import LEAST_WEIGHT, Factors, has_kernels, runs_fused
from octavo.ops.quantization import like_quantized, quantize_reference
from octavo.ops.registration import check_matrix, check_row_cast, check_tensor, operation
from octavo.ops.transposition import group_of_rows


def gather_quantize_reference(x: Tensor, cast: Cast, top_k: int, factors: Factors) -> tuple[Tensor, Tensor]:
    """Data and scale of the rows x[slot // top_k] times the factors."""
    column_scale, group, mantissa_of, weight, slot, _ = factors
    rows = x.float() if slot is None else x[slot // top_k].float()
    if column_scale is not None and group is not None:
        rows = rows * column_scale[group]
    row_scale = None if mantissa_of is None else scale_mantissa(mantissa_of)
    if row_scale is not None and weight is not None:
        row_scale = row_scale * nonzero(weight).view(-1, 1)[slot]
    return quantize_reference(rows, cast, None, row_scale, None)


def nonzero(weight: Tensor) -> Tensor:
    """The weights of slots, not nearer to zero than the least."""
    return torch.where(weight.abs() < LEAST_WEIGHT, LEAST_WEIGHT, weight)


def combine_reference(y: Tensor, row: Tensor, weight: Tensor | None) -> Tensor:
    """out [T, K]: the sum of weight[t, s] * y[row[t, s]] over the slots s, in float32 and in order, rounded once.

    y [M, K] is float32, bfloat16 or float16. row is int32 [T, top_k], -1 for a slot that adds nothing. weight is
    float32 [T, top_k], or None for ones.
    """
    total = torch.zeros(row.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    y = F.pad(y, (0, 0, 0, 1))  # the row -1 is zero
    for s in range(row.shape[1]):
        part = y[row[:, s]].float()
        total = total + (part if weight is None else part * weight[:, s, None])
    return total.to(y.dtype)


def gather_quantize(x: Tensor, cast: Cast, factors: Factors, *, top_k: int = 1) -> QTensor:
    """Gather rows and quantize each by its own scale, in one pass: data [M, K] and scale [M, 1].

    Args:
        x: [T, K], float32, bfloat16 or float16.
        cast: by row, rounded to nearest, without a relative floor.
        factors: multiplied into the rows first. A weight that is nearer to zero than 2^-24 counts as 2^-24:
            `activation_backward` divides by it. Row m of the result is row slot[m] // top_k of x; a slot of None
            gathers nothing: M = T.
        top_k: the slots of a row of x.
    """
    check_row_cast("gather_quantize", cast)
    data, scale = _gather_quantize(x, cast.spec, top_k, *factors)
    return QTensor(data, scale, cast.fmt, ROW)


def _check_gather(x: Tensor, cast: Cast, top_k: int, factors: Factors) -> None:
    column_scale, group, mantissa_of, weight, slot, _ = factors
    check_matrix("gather_quantize", x)
    m = x.shape[0] if slot is None else slot.shape[0]
    check_tensor("slot", slot, (m,), torch.int32)
    check_tensor("mantissa_of", mantissa_of, (m, 1), torch.float32)
    check_tensor("weight", weight, (m // top_k, top_k), torch.float32)
    if column_scale is not None:
        check_tensor("column_scale", column_scale, (column_scale.shape[0], x.shape[1]), torch.float32)
        if group is None:
            raise ValueError("column_scale needs group, the number of its line for each row")
    check_tensor("group", group, (m,), torch.int32)


def _check_combine(y: Tensor, row: Tensor, weight: Tensor | None) -> None:
    check_matrix("combine", y)
    if row.ndim != 2:
        raise ValueError(f"row must be int32 [T, top_k], got {row.dtype} {list(row.shape)}")
    check_tensor("row", row, tuple(row.shape), torch.int32)
    check_tensor("weight", weight, tuple(row.shape), torch.float32)


_gather_quantize = operation(
    check=_check_gather,
    like=lambda x, cast, _, on: like_quantized(x, ((x if on.slot is None else on.slot).shape[0], x.shape[1]), cast),
    runs=lambda x, cast, *rest: runs_fused(x, x.shape[1], cast.format),
)(gather_quantize_reference)
combine = operation(
    check=_check_combine,
    like=lambda y, row, weight: y.new_empty((row.shape[0], y.shape[1])),
    runs=lambda y, *rest: y.numel() > 0 and has_kernels(y.device),
)(combine_reference)


# ---- Where the tokens of each expert lie, as index tensors on the device. Nothing is read on the host.


class Rows(NamedTuple):
    """The rows that the experts of a layer compute."""

    slot: Tensor  # int32 [M], the slot of each row
    row: Tensor  # int32 [T, top_k], the row of each slot; -1 for a slot without an expert here
    offsets: Tensor  # int32 [E], where the group of each expert ends


def sort_by_expert(experts: Tensor, num_experts: int) -> Rows:
    """Sort slots by the numbers of their experts, `experts` int64 [T, top_k]. The tokens of an expert keep their order.

    A number of `num_experts` or more is an expert of another rank: its rows come after the last group.
    """
    flat = experts.reshape(-1).int()  # a GPU sorts a byte of the keys in a pass
    slot, row, offsets = _index_slots(*torch.sort(flat, stable=True), num_experts)
    return Rows(slot, row.view(experts.shape), offsets)


def index_slots_reference(experts: Tensor, order: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, row and offsets of `Rows`, row as [M], from the sorted experts [M] and the slots in this order."""
    each = torch.arange(experts.shape[0], device=experts.device, dtype=torch.int32)
    row = torch.empty_like(each).scatter_(0, order, torch.where(experts < num_experts, each, -1))
    numbers = torch.arange(num_experts, device=experts.device, dtype=torch.int32)
    return order.int(), row, torch.searchsorted(experts, numbers, right=True, out_int32=True)


class Groups(NamedTuple):
    """The groups of rows in a backward pass, and places for them in which each has a positive multiple of 128 rows."""

    expert: Tensor  # int32 [M], the expert of each row, the last one for rows beyond the last group
    aligned_offsets: Tensor  # int32 [E], where the larger groups end
    place: Tensor  # int32 [M'], the row that lies at each place, or -1
    token: Tensor | None  # int32 [M'], the token of that row, or -1


def aligned_groups(offsets: Tensor, rows: int, slot: Tensor | None = None, top_k: int = 1) -> Groups:
    """The groups of M = `rows` rows that end at `offsets`, int32 [E], with places as `grouped_mm_dw` takes them.

    M' depends on M and E only: M rounded up to a multiple of 16, and 128 for each group. With `slot`, int32 [M], row m
    is one of token slot[m] // top_k; without it there are no tokens.
    """
    places = -(-rows // ALIGNMENT) * ALIGNMENT + COLUMNS * offsets.shape[0]
    return Groups(*_index_groups(offsets, rows, places, slot, top_k))


def index_groups_reference(
    offsets: Tensor, rows: int, places: int, slot: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Groups`."""
    last = len(offsets) - 1
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    aligned = ((sizes + COLUMNS - 1) // COLUMNS).clamp(min=1) * COLUMNS
    ends = aligned.cumsum(0, dtype=torch.int32)
    group = group_of_rows(ends, places).clamp(max=last)
    within = torch.arange(places, device=offsets.device, dtype=torch.int32) - (ends - aligned)[group]
    place = torch.where(within < sizes[group], (offsets - sizes)[group] + within, -1)
    token = None if slot is None else F.pad(slot // top_k, (0, 1), value=-1)[place]
    return group_of_rows(offsets, rows).clamp(max=last), ends, place, token  # type: ignore[return-value]


_index_slots = operation(
    like=lambda experts, order, e: (torch.empty_like(experts), torch.empty_like(experts), experts.new_empty(e)),
    runs=lambda experts, *rest: has_kernels(experts.device, (8, 0)),
)(index_slots_reference)
_index_groups = operation(
    check=lambda offsets, *rest: check_tensor("offsets", offsets, (offsets.numel(),), torch.int32),
    like=lambda offsets, rows, places, slot, top_k: tuple(
        offsets.new_empty(size) for size in (rows, offsets.shape[0], places, 0 if slot is None else places)
    ),
    runs=lambda offsets, *rest: has_kernels(offsets.device, (8, 0)),
)(index_groups_reference)
