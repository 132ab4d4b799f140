"""Adding the statistics of a GEMM's operand to a buffer, in the steps that are sampled.

Rows are read, not the whole operand: one out of each of as many equal parts as there are rows to sample. Scales are all
read.

The numbers of a fused pass (the output of a norm, of an activation, and the gradient of its input) exist as bytes only.
Here they are computed again for the sampled rows, from the inputs of the pass.

Nothing here waits for the device. While a CUDA graph is captured, nothing is recorded: the graph would replay it in
each step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from itertools import accumulate
from typing import Any, ClassVar, ParamSpec, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.qtensor import Cast, parse_cast
from octavo.numerics.scaling import SMALLEST_SCALE, scale_exponent
from octavo.observation.operand_statistics import (
    BRIEF_MAXIMA,
    BRIEF_SUMS,
    BRIEF_WIDTH,
    FIELD,
    ROWS,
    WIDTH,
    BriefStore,
    Found,
    Operand,
    Rows,
    add_statistics,
    combine,
    numbers_of,
    row_statistics,
    sampled_rows,
    scale_statistics,
    statistics,
    tensor_statistics,
)
from octavo.ops.permutation import group_of_rows, group_shifts
from octavo.ops.registration import OPERATIONS

# ---- The quantized form of an operand of which some rows are sampled: its errors, and the range of its scales.


@dataclass(frozen=True)
class QuantizedOperand:
    """The bytes and scales of an operand [M, K], of which the rows `index` are sampled.

    x ≈ numbers * scale / (row_scale * column_scale): the factors were multiplied into x before it was quantized, and
    are taken out of the scales.
    """

    data: Tensor
    scale: Tensor
    cast: Cast
    amax: Tensor | None = None  # [1, 1], where the scales were known before
    row_scale: Tensor | None = None  # [M, 1]
    shift_scale: Tensor | None = None  # [M, 1]: the exponents of c = 2^e * s_g take bytes from h
    index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def cut(self, rows: slice, count: int) -> Self:
        """One of several stacked weights, which have row scales: that of `rows`, of which `count` are sampled."""
        index = sampled_rows(rows.stop - rows.start, count, self.data.device)
        if self.data.shape[0] == rows.stop - rows.start:
            return replace(self, index=index)
        return replace(self, data=self.data[rows], scale=self.scale[rows], index=index)

    def rows(self, x: Tensor | None, columns: slice = slice(None), column_scale: Tensor | None = None) -> Rows:
        """The sampled rows x = operand[index, columns], with their numbers and scales."""
        scale = self._scale if column_scale is None else self._scale / column_scale
        return Rows(x, self.numbers(columns), scale, None if self.shift_scale is None else self._least)

    def of_scales(self, column_scale: Tensor | None = None) -> Found:
        """The range of the scales, the amax of all rows where it is known, and the gap to a scale known before."""
        found = self._of_scales
        if column_scale is not None:  # it was multiplied in before
            scale, smallest = found["scale"] / column_scale.amin(), found["minus_smallest_scale"] / column_scale.amax()
            found = found | {"scale": scale, "minus_smallest_scale": smallest}
        if self.amax is not None:
            expected = self.scale * self.cast.fmt.max
            return found | {"all_amax": self.amax.amax(), "minus_gap": torch.log2(self.amax / expected).amax()}
        if self.cast.scale == "fp32" and column_scale is None and self.row_scale is None:
            scale = found["scale"]
            return found | {"all_amax": torch.where(scale > SMALLEST_SCALE, scale * self.cast.fmt.max, 0)}
        return found

    def brief(self, x: Tensor | None, columns: slice) -> Operand:
        """The rows x = operand[index, columns] in a brief sample. The fate of bytes alone is unknown."""
        numbers = self.numbers(columns, torch.bfloat16)
        return Operand(
            self.numbers() * self._scale if x is None else x.contiguous(),
            None if x is None else numbers,
            self._largest_scale,
            self.cast.fmt.max,
            scaled_by_amax=self.amax is None and self.cast.scale == "fp32" and self.row_scale is None,
            known=self._known,
            shifted=None if self.shift_scale is None else numbers / self._least,
        )

    @cached_property
    def _largest_scale(self) -> Tensor:
        return self.scale.float().amax()

    @cached_property
    def _known(self) -> Tensor | None:
        """A copy: the history begins a new step before the numbers are computed."""
        return None if self.amax is None else self.amax.float().amax()

    def numbers(self, columns: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
        """Those of the bytes of the sampled rows."""
        return numbers_of(self.data.view(torch.uint8)[:, columns][self.index].view(self.data.dtype), dtype)

    @cached_property
    def unfolded(self) -> Tensor:
        """The scales without the factor of the rows."""
        return self.scale if self.row_scale is None else self.scale / self.row_scale

    @cached_property
    def _of_scales(self) -> Found:
        return scale_statistics(self.unfolded)

    @cached_property
    def _scale(self) -> Tensor:
        """That of the sampled rows, float32, which broadcasts against them."""
        scale, by = self.scale.float(), self.cast.granularity
        if by.rows is not None:
            scale = scale[self.index if by.rows == 1 else self.index // by.rows]
            if by.cols is not None:
                scale = scale.repeat_interleave(by.cols, 1)[:, : self.data.shape[1]]
        return scale if self.row_scale is None else scale / self.row_scale[self.index]

    @cached_property
    def _least(self) -> Tensor:
        """The numbers [R, 1] of g, in the sampled rows, up to which the shift for dw makes zero of numbers.

        The shift of a row is log2(the largest c / its c), where c = 2^e * s_g has the exponents of both scales.
        """
        assert self.shift_scale is not None
        bits = (self.scale.view(torch.int32), self.shift_scale.view(torch.int32))
        exponent = (bits[0] >> 23) + (bits[1] >> 23)  # of positive normal numbers
        shift = (exponent.amax() - exponent[self.index]).clamp(max=100).float()
        return torch.exp2(shift) * (self.cast.fmt.smallest_subnormal / 2)  # a tie rounds to zero


# ---- Operations that record statistics in the steps that are sampled, and the flag of the host that says when.
#
# In other steps such an operation returns at once. So a model is compiled once, with the operations in its graph, and a
# step that is not sampled costs a call of each.


P = ParamSpec("P")


class Sampling:
    """The samples that are taken now, by any watch of the process."""

    active = False
    full = 0  # rows of each operand in a full sample; 0: none
    brief = False
    _requests: ClassVar[dict[int, tuple[int, bool]]] = {}

    @classmethod
    def request(cls, watch: object, rows: int, *, brief: bool = False) -> None:
        """Record a full sample of `rows` rows of each operand, a brief one, or both, from now on; 0 and False: none."""
        cls._requests.pop(id(watch), None)
        if rows or brief:
            cls._requests[id(watch)] = rows, brief
        cls.full = max((rows for rows, _ in cls._requests.values()), default=0)
        cls.brief = any(brief for _, brief in cls._requests.values())
        cls.active = bool(cls._requests)


def is_recomputed(kind: str) -> bool:
    """True for an operand of a forward pass within a backward pass, as activation checkpointing runs it."""
    of_backward = kind == "dy" or kind.endswith("_gradient")
    return not of_backward and torch._C._current_graph_task_id() != -1


def sampled_operation(*mutated: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a function as the operation `octavo::` with its name, and return what calls it in sampled steps.

    A compiler, and the modes of checkpointing, get one operation, which they call in every step. It writes to the
    arguments `mutated`. A call takes 3 µs of the host's time; one made by `torch.library.custom_op` takes 48 µs.
    """

    def register(function: Callable[P, None]) -> Callable[P, None]:
        name, parameters = function.__name__, inspect.signature(function).parameters.values()
        defaults = [(parameter.name, parameter.default) for parameter in parameters]
        # Without defaults: an argument that equals its default would be left out of a compiler's graph.
        schema = re.sub(r"=[^,)]*", "", torch.library.infer_schema(function, mutates_args=mutated))
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"octavo::{name}", lambda *args: None)
        OPERATIONS[name] = function, lambda *args: False
        overload: Any = getattr(torch.ops.octavo, name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
                # All by position: Inductor lowers the operation without names.
                overload(*args, *[kwargs.get(name, default) for name, default in defaults[len(args) :]])
            elif Sampling.active:
                function(*args, **kwargs)

        return call

    return register


_LIBRARY: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]


# ---- Adding the statistics of a GEMM's operand to a buffer, in the steps that are sampled.


@sampled_operation("stats")
def observe(
    stats: Tensor,
    slot: int,
    kind: str,
    source: Sequence[Tensor],
    sizes: Sequence[int],
    data: Tensor | None = None,
    scale: Tensor | None = None,
    spec: str = "",
    amax: Tensor | None = None,
    column_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    shift_scale: Tensor | None = None,
) -> None:
    """Add the statistics of an operand to `stats` [slots, WIDTH + BRIEF_WIDTH], if this step is sampled.

    In a recomputation (activation checkpointing) the operands of the forward pass are not added again. That it ran is
    recorded.

    Args:
        slot: the first row of `stats` to add to; each of stacked layers has the next one.
        kind: of the operand, and with it what `source` holds:
            "x", "dy"           x [T, K]; dy [T, N]
            "norm", "center"    total [T, K], mean and rstd [T, 1], weight [K] and perhaps bias [K] of a norm
            "swiglu", "geglu", "gelu"               u [T, 2F] or [T, F], the input of the activation
            "swiglu_gradient", and so on            dh [T, F] and u
            "w", "bytes"        the weights [N_i, K]; nothing, where the weights exist as bytes only
        sizes: N_i of the stacked layers: rows of w, columns of dy; empty for x, which they share.
        data, scale, spec: of the quantized operand, and the `Cast.spec` of its cast; None where the GEMM reads the
            operand in high precision.
        amax: [1, 1], the amax that came where the scale was known before; None where the scale is that of the amax.
        column_scale, row_scale: [N, 1] and [T, 1], folded into dy before it was quantized.
        shift_scale: the scale [T, 1] of x, by whose exponent the bytes of dy are shifted for dw.
    """
    if not Sampling.active or (stats.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if is_recomputed(kind):
        stats[slot, FIELD["recomputed"]] = 1
        return
    quantized = None
    if data is not None and scale is not None:
        quantized = QuantizedOperand(data, scale, parse_cast(spec), amax, row_scale, shift_scale)
    if Sampling.full:
        for i, part in enumerate(_sampled(kind, source, sizes, quantized, Sampling.full)):
            add_statistics(stats[slot + i], _full(*part, column_scale))
    if Sampling.brief:
        store = BriefStore.of(stats)
        for i, part in enumerate(_sampled(kind, source, sizes, quantized, ROWS)):
            if store is not None:
                store.add(stats, slot + i, _brief(*part))
                continue
            row = stats[slot + i, WIDTH : WIDTH + BRIEF_WIDTH]
            row.copy_(combine(row[None], statistics([_brief(*part)]))[0])


Part = tuple[Tensor | None, QuantizedOperand | None, slice]


def _full(x: Tensor | None, q: QuantizedOperand | None, columns: slice, column_scale: Tensor | None) -> Found:
    if q is None:
        assert x is not None
        return tensor_statistics(x.float())[1]
    column = None if column_scale is None else column_scale[columns].t()
    return row_statistics(q.rows(x, columns, column), q.of_scales(column), q.cast.fmt)[1]


def _brief(x: Tensor | None, q: QuantizedOperand | None, columns: slice) -> Operand:
    if q is None:
        assert x is not None
        return Operand(x.contiguous())
    return q.brief(x, columns)


def _sampled(
    kind: str, source: Sequence[Tensor], sizes: Sequence[int], quantized: QuantizedOperand | None, rows: int
) -> Iterator[Part]:
    """The sampled rows [R, K] of an operand, None where only bytes exist; its quantized form; its columns of dy.

    Stacked weights, and the columns of dy that belong to them, come one by one.
    """
    if kind not in ("w", "bytes"):
        index = sampled_rows(source[0].shape[0], rows, source[0].device)
        x = numbers_of_rows(kind, [t[index] if t.ndim == 2 else t for t in source])
        of_rows = None if quantized is None else replace(quantized, index=index)
        ends = list(accumulate(sizes or [x.shape[1]]))
        for start, end in zip([0, *ends], ends, strict=False):
            yield x[:, start:end], of_rows, slice(start, end)
        return
    start = 0
    for i, size in enumerate(sizes):
        part = None if quantized is None else quantized.cut(slice(start, start + size), rows)
        yield source[i][sampled_rows(size, rows, source[i].device)] if source else None, part, slice(None)
        start += size


def numbers_of_rows(kind: str, source: Sequence[Tensor]) -> Tensor:
    """The sampled rows of an operand, from those of its source; float32 if they are computed."""
    if kind in ("x", "dy"):
        return source[0]
    first, *rest = (t.float() for t in source)
    if kind in ("norm", "center"):
        mean, rstd, weight, *bias = rest
        normed = (first - mean if kind == "center" else first) * rstd * weight
        return normed + bias[0] if bias else normed
    if kind == "gelu":
        return F.gelu(first)
    if kind == "geglu":
        up, gate = first.chunk(2, 1)
        return up * F.gelu(gate)
    if kind == "swiglu":
        gate, up = first.chunk(2, 1)
        return F.silu(gate) * up
    u = rest[0]
    if kind == "gelu_gradient":
        gradient: Tensor = torch.ops.aten.gelu_backward(first, u)
        return gradient
    if kind == "geglu_gradient":
        up, gate = u.chunk(2, 1)
        return torch.cat([first * F.gelu(gate), torch.ops.aten.gelu_backward(first * up, gate)], 1)
    gate, up = u.chunk(2, 1)
    return torch.cat([torch.ops.aten.silu_backward(first * up, gate), first * F.silu(gate)], 1)


# ---- The same for an operand of a grouped GEMM, whose rows belong to groups.
#
# A full sample has the statistics of all sampled rows, and for each expert the sums from which its SQNR follows. A
# brief sample has the numbers of each expert by itself.


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
    q = QuantizedOperand(data, scale, parse_cast(spec), None, row_scale, shift_scale)
    operand = GroupedOperand(kind, source, offsets, q, slot, factor, column_scale)
    if Sampling.full:
        _add_full(stats, sums, operand)
    if Sampling.brief:
        brief.copy_(combine(brief, brief_statistics(operand, *rows_of_experts(operand))))


def _add_full(stats: Tensor, sums: Tensor, operand: GroupedOperand) -> None:
    index, q = sampled_rows(operand.rows, max(Sampling.full, ROWS_OF_EXPERT * operand.experts), stats.device), operand.q
    rows, group = operand.sample(index)
    x, found = row_statistics(rows, q.of_scales(operand.column_scale), q.cast.fmt)
    add_statistics(stats, found)
    unknown = torch.full_like(x, torch.nan, dtype=torch.float64)
    error = unknown if rows.x is None else (x - rows.numbers * rows.scales).double()
    squares = torch.stack([x.double().square().sum(1), error.square().sum(1)], 1)
    sums[:, -2:].index_add_(0, group, squares)
    if sums.shape[1] == 3:
        sums[:, 0] += operand.sizes


# In a brief sample so many rows of each expert are read, spread over its group, and the scales of all its rows. An
# expert with fewer rows has no numbers in this sample.
EXPERT_ROWS = 8
_NOT_ZERO = torch.finfo(torch.float32).tiny


def rows_of_experts(operand: GroupedOperand) -> tuple[Tensor, Tensor]:
    """`EXPERT_ROWS` rows of each expert, int64 [E * EXPERT_ROWS], and whether it has so many [E].

    Rows of a matrix may repeat.
    """
    sizes = operand.sizes.long()
    if operand.kind == "w":
        sizes = torch.full_like(sizes, operand.rows // operand.experts)
    part, place = _parts(sizes.device)
    begin, end = part * sizes[:, None] // EXPERT_ROWS, (part + 1) * sizes[:, None] // EXPERT_ROWS
    within = begin + (place * (end - begin)).long()
    first = sizes.cumsum(0) - sizes
    known = torch.ones_like(sizes, dtype=torch.bool) if operand.kind == "w" else sizes >= EXPERT_ROWS
    return (first[:, None] + within).clamp(max=operand.rows - 1).view(-1), known


def brief_statistics(operand: GroupedOperand, index: Tensor, known: Tensor) -> Tensor:
    """The `BRIEF_FIELD` of each expert, float64 [E, fields]; those of no sample where not `known`.

    `index` and `known` are those of `rows_of_experts`.
    """
    (rows, _), experts = operand.sample(index), operand.experts
    x = rows.numbers * rows.scales if rows.x is None else rows.x
    x, numbers = (t.view(experts, EXPERT_ROWS, -1) for t in (x, rows.numbers))
    scale, bad = _of_scales(operand)
    over_rows = (1, 2)
    codes = numbers.count_nonzero(over_rows)
    zero = torch.zeros_like(codes)
    lost = zero
    if rows.least is not None:
        lost = codes - (numbers.abs() > rows.least.view(experts, EXPERT_ROWS, 1)).sum(over_rows)
    columns = {
        "amax": torch.linalg.vector_norm(x, torch.inf, over_rows),
        "all_amax": _amax_of_all_rows(operand, scale),
        "scale": scale,
        "minus_gap": torch.full_like(scale, -torch.inf),  # no scale was known before
        "elements": zero + x[0].numel(),
        "nonfinite": (x - x).sum(over_rows) + bad,
        "x2": torch.linalg.vector_norm(x, 2, over_rows).double().square(),
        "x4": torch.linalg.vector_norm(x.square(), 2, over_rows).double().square(),
        "nonzero": x.count_nonzero(over_rows),
        "codes": codes if operand.source else torch.full_like(scale, torch.nan),
        "lost": lost,
        "saturated": zero,
        "scales": zero + 1,
    }
    maxima = torch.stack([columns[name].double() for name in BRIEF_MAXIMA], 1)
    sums = torch.stack([columns[name].double() for name in BRIEF_SUMS], 1)
    seen = known.unsqueeze(1)
    return torch.cat([torch.where(seen, maxima, -torch.inf), torch.where(seen, sums, 0)], 1)


def _of_scales(operand: GroupedOperand) -> tuple[Tensor, Tensor]:
    """The largest scale [E] of the rows of each expert, and 0, or NaN where one is not finite."""
    scale = operand.q.scale.view(-1)
    if operand.kind == "w":
        each = scale.view(operand.experts, -1)
        return each.amax(1), (each - each).sum(1)
    nothing = torch.full((operand.experts + 1,), -torch.inf, device=scale.device)
    largest = nothing.scatter_reduce(0, operand.group, scale, "amax")
    bad = torch.zeros_like(nothing).index_add(0, operand.group, scale - scale)
    return largest[:-1], bad[:-1]


def _amax_of_all_rows(operand: GroupedOperand, scale: Tensor) -> Tensor:
    """The amax [E] of all rows, which the largest scale gives. Where that has other factors, only whether it is 0."""
    q = operand.q
    plain = q.row_scale is None and operand.column_scale is None and q.cast.scale == "fp32"
    amax = scale * q.cast.fmt.max if plain else torch.full_like(scale, _NOT_ZERO)
    return torch.where(scale > SMALLEST_SCALE, amax, 0)


@lru_cache(maxsize=16)
def _parts(device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of the parts that a group is cut into, [EXPERT_ROWS], and the place of a row within each, 0 to 1."""
    places = sampled_rows(EXPERT_ROWS << 20, EXPERT_ROWS, device).double() / (1 << 20)
    part = torch.arange(EXPERT_ROWS, device=device)
    return part, places - part


# ---- An operand of a grouped GEMM, of which rows are sampled: their numbers before and after quantization.


@dataclass(frozen=True)
class GroupedOperand:
    """An operand; the fields are the arguments of `observe_experts`."""

    kind: str
    source: Sequence[Tensor]
    offsets: Tensor
    q: QuantizedOperand
    slot: Tensor | None = None
    factor: Tensor | None = None
    column_scale: Tensor | None = None

    @property
    def experts(self) -> int:
        return len(self.offsets)

    @property
    def rows(self) -> int:
        return len(self.q.data)

    @cached_property
    def sizes(self) -> Tensor:
        """The rows [E] of x and dy that each expert has."""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1))

    @cached_property
    def group(self) -> Tensor:
        """int64 [M]: the expert of each row; E for a row of none."""
        if self.kind == "w":
            return torch.arange(self.rows, device=self.offsets.device) // (self.rows // self.experts)
        return group_of_rows(self.offsets, self.rows).long()

    def sample(self, index: Tensor) -> tuple[Rows, Tensor]:
        """The rows `index`, int64 [R], float32, and the expert of each. Rows of no expert are zero."""
        inside, group = (self.group[index] < self.experts).unsqueeze(1), self.group[index].clamp(max=self.experts - 1)
        numbers = torch.where(inside, replace(self.q, index=index).numbers(), 0)  # a row of no expert has any bytes
        unfolded = self.q.unfolded[index]
        scales = unfolded if self.column_scale is None else unfolded / self.column_scale[group]
        x = torch.where(inside, self._wide(index), 0).float() if self.source else None
        return Rows(x, numbers, scales, self._least(index)), group

    def _wide(self, index: Tensor) -> Tensor:
        first, *rest = self.source
        token = index if self.slot is None else self.slot[index] // (len(self.slot) // len(first))
        rows = numbers_of_rows("x" if self.kind == "w" else self.kind, [first[token], *(t[index] for t in rest)])
        return rows if self.factor is None else rows * self.factor[index]

    def _least(self, index: Tensor) -> Tensor | None:
        if self.q.shift_scale is None:
            return None
        exponent = (scale_exponent(self.q.shift_scale) + scale_exponent(self.q.scale)).view(-1)
        shift = group_shifts(exponent, self.group, self.experts)[1][index].clamp(max=100).float().unsqueeze(1)
        return torch.exp2(shift) * (self.q.cast.fmt.smallest_subnormal / 2)  # a tie rounds to 0
