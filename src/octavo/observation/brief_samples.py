"""Brief samples: the numbers that rules judge, for all operands of a step at once.

A GPU takes longer to launch an operation on some rows than to run it. So an operand only has its rows copied when it is
observed. At the end of the step, operations on lists of tensors find the numbers of all of them.

The moments are those about zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from octavo.numerics.scaling import SMALLEST_SCALE
from octavo.observation.statistics import BRIEF_MAXIMA, BRIEF_SUMS, ROUNDING

ROWS = 16
_MOST_BYTES = 1 << 25  # of rows that wait for the end of the step


@dataclass(frozen=True)
class Operand:
    """The sampled rows of an operand, copied.

    Args:
        x: [R, K].
        numbers: those of its bytes, [R, K]; None where the operand is not quantized, or only its bytes are known.
        scale: the largest, 0-dim float32; None where the operand is not quantized.
        largest: the largest number of the format.
        scaled_by_amax: whether the scale of the operand, all its rows included, gives its amax.
        known: of a scale that was known before, the amax that came, 0-dim.
        shifted: numbers / the largest that the shift for dw makes zero.
    """

    x: Tensor
    numbers: Tensor | None = None
    scale: Tensor | None = None
    largest: float = 0.0
    scaled_by_amax: bool = False
    known: Tensor | None = None
    shifted: Tensor | None = None


class BriefStore:
    """The operands of a step that belong to the rows of some buffers of statistics.

    Args:
        buffers: float64 [n_i, fields].
    """

    _of_buffer: ClassVar[dict[int, BriefStore]] = {}

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._first, self._rows = {}, 0
        for buffer in buffers:
            self._first[buffer.data_ptr()] = self._rows
            self._of_buffer[buffer.data_ptr()] = self
            self._rows += len(buffer)
        self.clear()

    @classmethod
    def of(cls, buffer: Tensor) -> BriefStore | None:
        """The store of a buffer; None for a copy of one, which a compiler may pass in its place."""
        return cls._of_buffer.get(buffer.data_ptr())

    def clear(self) -> None:
        """Forget the step."""
        self._places: list[int] = []
        self._waiting: list[Operand] = []
        self._tables: list[Tensor] = []
        self._bytes = 0

    def close(self) -> None:
        """Forget the buffers."""
        for address in self._first:
            self._of_buffer.pop(address, None)
        self.clear()

    def add(self, buffer: Tensor, slot: int, operand: Operand) -> None:
        self._places.append(self._first[buffer.data_ptr()] + slot)
        self._waiting.append(operand)
        self._bytes += sum(t.nbytes for t in (operand.x, operand.numbers, operand.shifted) if t is not None)
        if self._bytes > _MOST_BYTES:
            self._settle()

    def add_to(self, table: Tensor) -> Tensor:
        """`table` [rows of the buffers, fields] with the numbers of the step added."""
        self._settle()
        if not self._tables:
            return table
        nothing = clear(torch.empty_like(table[:1]))
        found = torch.cat([*self._tables, nothing])[_indices(tuple(self._places), self._rows, table.device)]
        return combine(table, combine_all(found))

    def _settle(self) -> None:
        if self._waiting:
            self._tables.append(statistics(self._waiting))
        self._waiting, self._bytes = [], 0


def combine_all(found: Tensor) -> Tensor:
    """The statistics [n, fields] of [n, parts, fields]."""
    k = len(BRIEF_MAXIMA)
    return torch.cat([found[:, :, :k].amax(1), found[:, :, k:].sum(1)], 1)


def combine(a: Tensor, b: Tensor) -> Tensor:
    """The statistics of both, [n, fields]."""
    return combine_all(torch.stack([a, b], 1))


def clear(table: Tensor) -> Tensor:
    """Make `table` [n, fields] that of no sample, in place."""
    table.zero_()
    table[:, : len(BRIEF_MAXIMA)] = -torch.inf
    return table


def statistics(operands: Sequence[Operand]) -> Tensor:
    """The `BRIEF_MAXIMA` and `BRIEF_SUMS` of operands, float64 [n, fields]."""
    device = operands[0].x.device
    nan, zero, low = _numbers((math.nan, 0.0, -math.inf), device)
    xs = [each.x for each in operands]
    scale = torch.stack([low if each.scale is None else each.scale for each in operands])
    known = torch.stack([low if each.known is None else each.known for each in operands])
    expected = scale * _numbers(tuple(each.largest for each in operands), device)
    is_amax = _holds((each.scaled_by_amax for each in operands), device)
    is_shifted = _holds((each.shifted is not None for each in operands), device)
    over = [
        None if each.known is None else each.x.float() / (limit * ROUNDING)
        for each, limit in zip(operands, expected, strict=True)
    ]
    norm, codes = _norms(xs, 2), _of_some(_counts, [each.numbers for each in operands], nan)
    left = _of_some(_counts_above_one, [each.shifted for each in operands], zero)
    columns = {
        "amax": _norms(xs, math.inf),
        "all_amax": torch.where(is_amax, torch.where(scale > SMALLEST_SCALE, expected, zero), known),
        "scale": scale,
        "minus_gap": torch.where(known == low, low, torch.log2(known / expected)),
        "elements": _numbers(tuple(float(x.numel()) for x in xs), device),
        "bad": norm - norm + torch.where(scale == low, zero, scale - scale),
        "x2": norm.double().square(),
        "x4": _norms(_each(lambda some: torch._foreach_mul(some, some), xs), 2).double().square(),
        "nonzero": _counts(xs),
        "codes": codes,
        "lost": torch.where(is_shifted, codes - left, zero),
        "saturated": _of_some(_counts_above_one, over, zero),
        "quantized": torch.where(scale == low, zero, zero + 1),
    }
    return torch.stack([columns[name].double() for name in (*BRIEF_MAXIMA, *BRIEF_SUMS)], 1)


def _norms(tensors: Sequence[Tensor], order: float) -> Tensor:
    return torch.stack(_each(lambda some: torch._foreach_norm(some, order, dtype=torch.float32), tensors))


def _counts(tensors: Sequence[Tensor]) -> Tensor:
    """The number of elements of each tensor that are not zero."""
    return _norms(_each(torch._foreach_sign, tensors), 1)


def _counts_above_one(tensors: Sequence[Tensor]) -> Tensor:
    """The number of elements of each tensor whose magnitude is above one."""
    above = _each(lambda some: torch._foreach_clamp_min(torch._foreach_sub(torch._foreach_abs(some), 1), 0), tensors)
    return _counts(above)


def _each(function: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What an operation on lists gives for each tensor: one call for each dtype, for which such operations are fast."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        of_dtype = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        found |= zip(of_dtype, function([tensors[i] for i in of_dtype]), strict=True)
    return [found[i] for i in range(len(tensors))]


def _of_some(
    function: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor | None], default: Tensor
) -> Tensor:
    """`function` of the tensors that there are, and `default` in the other places."""
    given = [t for t in tensors if t is not None]
    values = iter(function(given)) if given else iter(())
    return torch.stack([default if t is None else next(values) for t in tensors])


def _holds(flags: Iterable[bool], device: torch.device) -> Tensor:
    return _numbers(tuple(map(float, flags)), device) > 0


@lru_cache(maxsize=256)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Float32 [n]. Equal ones are copied to the device once."""
    return torch.tensor(values, device=device)


@lru_cache(maxsize=16)
def _indices(places: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """For each row the positions in `places` that name it, int64 [rows, most of a row]; filled up with their number."""
    found: list[list[int]] = [[] for _ in range(rows)]
    for i, place in enumerate(places):
        found[place].append(i)
    most = max(map(len, found))
    return torch.tensor([each + [len(places)] * (most - len(each)) for each in found], device=device)
