"""Where the tokens of each expert lie, as index tensors on the device. Nothing is read on the host.

A token t that is sent to `top_k` experts has the slots t * top_k, t * top_k + 1, ... Sorting the slots by expert gives
the rows of the experts' GEMMs. Each expert has one group of adjacent rows, and a group may be empty.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.grouped_gemm import ALIGNMENT


class Rows(NamedTuple):
    """The rows that the experts of a layer compute.

    Attributes:
        slot: int32 [M], the slot of each row.
        row: int32 [T, top_k], the row of each slot; -1 for a slot without an expert here.
        offsets: int32 [E], where the group of each expert ends.
    """

    slot: Tensor
    row: Tensor
    offsets: Tensor


def sort_by_expert(experts: Tensor, num_experts: int) -> Rows:
    """Sort slots by expert. The tokens of an expert keep their order.

    Args:
        experts: int64 [T, top_k], the number of the expert of each slot, from 0 to num_experts - 1. A larger number is
            an expert of another rank: its rows come after the last group.
    """
    flat = experts.reshape(-1)
    sorted_experts, slot = torch.sort(flat, stable=True)
    row = torch.empty_like(slot).scatter_(0, slot, torch.arange(len(flat), device=flat.device))
    ends = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    offsets = torch.searchsorted(sorted_experts, ends, right=True, out_int32=True)
    row = torch.where(flat < num_experts, row, -1)
    return Rows(slot.to(torch.int32), row.to(torch.int32).view(experts.shape), offsets)


def group_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """int32 [rows]: the number of the group of each row; E, the number of groups, for rows beyond the last group."""
    # Inductor of PyTorch 2.11 cannot search in a slice, or searches in the tensor that it is cut from, and removes a
    # clone. The clamp changes nothing, and its result is a tensor of its own.
    offsets = offsets.clamp(min=0)
    every = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    return torch.searchsorted(offsets, every, right=True, out_int32=True)


def group_shifts(exponent: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The largest exponent of each group, int32 [E], and how far below it the exponent of each row is, int32 [M].

    Args:
        exponent: int32 [M].
        group: [M], the group of each row, from 0 to E; E for rows of none.
        groups: E.
    """
    lowest = torch.full((groups + 1,), -(2**30), dtype=torch.int32, device=exponent.device)
    largest = lowest.scatter_reduce(0, group.long(), exponent, "amax")
    return largest[:groups], largest[group] - exponent


def aligned_groups(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Places for the groups in which each has a positive multiple of 16 rows, as `grouped_mm_dw` takes them.

    Args:
        offsets: int32 [E], where each group ends.
        rows: the number of rows, M.

    Returns:
        The offsets of the larger groups, int32 [E], and the row that lies at each place, int32 [M']: -1 for a place
        without one. M' depends on M and E only: M rounded up to a multiple of 16, and 16 for each group.
    """
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    aligned = ((sizes + ALIGNMENT - 1) // ALIGNMENT).clamp(min=1) * ALIGNMENT
    ends = aligned.cumsum(0, dtype=torch.int32)
    places = -(-rows // ALIGNMENT) * ALIGNMENT + ALIGNMENT * len(offsets)
    group = group_of_rows(ends, places).clamp(max=len(offsets) - 1)
    within = torch.arange(places, device=offsets.device, dtype=torch.int32) - (ends - aligned)[group]
    row = (offsets - sizes)[group] + within
    return ends, torch.where(within < sizes[group], row, -1).to(torch.int32)
