"""Sampling a GEMM's operand, in the steps that have a sample.

Rows are read, not the whole operand: one out of each of as many equal parts as there are rows to sample. Scales are all
read. The rows are copied, and their statistics computed at the end of the step
(`octavo.observation.operand_statistics`).

The numbers of a fused pass (the output of a norm, of an activation, and the gradient of its input) exist as bytes only.
Here they are computed again for the sampled rows, from the inputs of the pass.

Nothing here waits for the device. While a CUDA graph is captured, nothing is recorded: the graph would replay it in
each step.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from itertools import accumulate
from typing import Any, ClassVar, ParamSpec

import torch
from torch import Tensor

from octavo.numerics.formats import widen
from octavo.numerics.qtensor import Cast, parse_cast
from octavo.numerics.scaling import SMALLEST_SCALE, scale_mantissa
from octavo.observation.operand_statistics import (
    FIELD,
    HEAD,
    Found,
    Rows,
    Store,
    add_statistics,
    clear,
    constant,
    sampled_rows,
)
from octavo.ops.activation import activated, activation_gradient
from octavo.ops.registration import OPERATIONS, define
from octavo.ops.transposition import fold_scales, group_of_rows

# ---- Operations that record statistics in the steps that are sampled, and the flag of the host that says when.
#
# In other steps such an operation returns at once. So a model is compiled once, with the operations in its graph, and a
# step that is not sampled costs a call of each.


P = ParamSpec("P")
BRIEF = -1


class Sampling:
    """The sample that is taken now, for any watch of the process."""

    active = False
    full = 0  # rows of each operand in a full sample; 0: the sample is brief
    _requests: ClassVar[dict[int, int]] = {}

    @classmethod
    def request(cls, watch: object, rows: int) -> None:
        """Take a full sample of `rows` rows of each operand, or a brief one (`BRIEF`), from now on; 0: none."""
        cls._requests.pop(id(watch), None)
        if rows:
            cls._requests[id(watch)] = rows
        cls.full = max(0, *cls._requests.values()) if cls._requests else 0
        cls.active = bool(cls._requests)


def sampled_operation(*mutated: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a function as the operation `octavo::` with its name, and return what calls it in sampled steps. A
    compiler, and the modes of checkpointing, get one operation, which they call in every step. It writes to the
    arguments `mutated`. A call takes 3 µs of the host's time; one made by `torch.library.custom_op` takes 48 µs."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        name, parameters = function.__name__, inspect.signature(function).parameters.values()
        defaults = [(parameter.name, parameter.default) for parameter in parameters]
        # Without defaults: an argument that equals its default would be left out of a compiler's graph.
        schema = re.sub(r"=[^,)]*", "", torch.library.infer_schema(function, mutates_args=mutated))
        overload = define(name + schema, function)
        torch.library.register_fake(overload, lambda *args: None)
        OPERATIONS[name] = function, lambda *args: False

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
                # All by position: Inductor lowers the operation without names.
                overload(*args, *[kwargs.get(name, default) for name, default in defaults[len(args) :]])
            elif Sampling.active:
                function(*args, **kwargs)

        return call

    return register


# ---- The quantized form of an operand of which some rows are sampled: its errors, and the range of its scales.


@dataclass(frozen=True)
class Quantized:
    """The bytes and scales of an operand [M, K], of which the rows `index` are sampled. x ≈ numbers * scale /
    (m * column_scale): the factors were multiplied into x before it was quantized, and are taken out of the scales.
    The operand of a grouped GEMM has the parts of E experts, with as many sampled rows each, of which w has
    equal ones; otherwise E is 1."""

    data: Tensor
    scale: Tensor
    cast: Cast
    full: bool  # the sample
    index: Tensor  # int64 [E * R]
    amax: Tensor | None = None  # [1, 1], where the scales were known before
    column_scale: Tensor | None = None  # [E, K]
    shift_scale: Tensor | None = None  # m * 2^e [M, 1]: the exponents of c = 2^e * s_g take bytes from h
    sizes: Tensor | None = None  # int64 [E], the rows of each expert
    group: Tensor | None = None  # int64 [M], the expert of each row of x or dy; E for none

    def rows(self, x: Tensor | None, columns: slice = slice(None)) -> Rows:
        """The sampled rows x = operand[index, columns], None where only bytes exist, copied with all that they need. Of
        an expert it is known at least whether it is zero, though its sampled rows may be."""
        codes = self.data.view(torch.uint8)[:, columns][self.index].view(self.data.dtype)
        numbers = self._blocks((codes if codes.is_cuda else widen(codes)).to(torch.bfloat16))  # exact
        scales: Any = None
        if self.full or x is None or self.amax is not None:
            scales = self._blocks(self._row_scales)
            scales = scales if self.column_scale is None else scales / self.column_scale[:, None, columns]
        scale, more = self._of_scales
        if self.column_scale is not None and not self._has_stored_scale:  # it was multiplied in before
            factor = self.column_scale[:, columns]
            scale = scale / factor.amin(1)
            if self.full:
                more = more | {"minus_smallest_scale": more["minus_smallest_scale"] / factor.amax(1)}
        smallest: float | None = -torch.inf if self.sizes is None else torch.finfo(torch.float32).tiny
        if self.cast.scale == "fp32" and self.shift_scale is None and self.column_scale is None:
            smallest = None
        shift = None if self._shift is None else self._blocks(self._shift)
        rows = numbers * scales if x is None else self._blocks(x).contiguous()
        of_x = None if x is None else numbers
        return Rows(rows, self.full, self.cast, of_x, scales, shift, scale, self._known, smallest, more)

    def _blocks(self, rows: Tensor) -> Tensor:
        """[E * R, ...] as [E, R, ...]; what all rows have alike, [1, ...], as [1, 1, ...]."""
        return rows[None] if self.sizes is None else rows.view(len(self.sizes), -1, rows.shape[1])

    @cached_property
    def _mantissa(self) -> Tensor | None:
        """m [M, 1] of the shift scales."""
        return None if self.shift_scale is None else scale_mantissa(self.shift_scale)

    @cached_property
    def _known(self) -> Tensor | None:
        """A copy: the history begins a new step before the numbers are computed."""
        return None if self.amax is None else self.amax.float().amax().view(1)

    @property
    def _has_stored_scale(self) -> bool:
        """True if the scale is the stored one, with the factors: in a brief sample, without experts."""
        return not self.full and self.sizes is None

    @cached_property
    def _of_scales(self) -> tuple[Tensor, Found]:
        """The largest scale [E], and other fields of all scales; without the factors of the rows."""
        scale, count = self.scale.float(), self.scale.numel()
        if self._has_stored_scale:
            return scale.amax().view(1), {}
        scale = scale if self._mantissa is None else scale / self._mantissa
        # of the scales of each expert, of which a row may have several, and several rows one
        sizes = constant(count, scale.device, 1) if self.sizes is None else self.sizes * (count / len(self.data))
        found = {"scales": sizes, "bad_scales": self._of_experts(scale.isnan().float(), "sum")}
        if self.full:  # the smallest of the blocks that are not all zero; NaN compares as false
            smallest = torch.where(scale > SMALLEST_SCALE, -scale, -torch.inf)
            found["minus_smallest_scale"] = self._of_experts(smallest, "amax")
        return self._of_experts(scale.nan_to_num(-torch.inf), "amax"), found

    def _of_experts(self, values: Tensor, reduction: str) -> Tensor:
        """A number of all scales of each expert: [E]."""
        experts, reduce = 1 if self.sizes is None else len(self.sizes), getattr(torch, reduction)
        if self.group is None:
            return reduce(values.reshape(experts, -1), 1)
        nothing = values.new_full((experts + 1,), -torch.inf if reduction == "amax" else 0)
        return nothing.scatter_reduce(0, self.group, reduce(values, 1), reduction)[:-1]  # of a row with several scales

    @cached_property
    def _row_scales(self) -> Tensor:
        """Those of the sampled rows, which broadcast against them."""
        scale, by = self.scale.float(), self.cast.granularity
        if by.rows is not None:
            # The block of so many rows that holds each sampled row; no block lies in two matrices.
            n = len(self.data) // (1 if self.sizes is None else len(self.sizes))  # rows of a matrix
            within = self.index // n * -(-n // by.rows) + self.index % n // by.rows
            scale = scale[self.index if by.rows == 1 else within]
            if by.cols is not None:
                scale = scale.repeat_interleave(by.cols, 1)[:, : self.data.shape[1]]
        return scale.clone() if self._mantissa is None else scale / self._mantissa[self.index]

    @cached_property
    def _shift(self) -> Tensor | None:
        """The powers of two, int32 [R, 1], by which the shift for dw makes the numbers of the sampled rows smaller.
        That of a row is log2(the largest c of its group / its c), where c = 2^e * s_g has the exponents of both
        scales."""
        if self.shift_scale is None:
            return None
        offsets = None if self.sizes is None else self.sizes.cumsum(0).int()
        return fold_scales(self.shift_scale, self.scale, None, offsets).shift[self.index].unsqueeze(1)


# ---- The operands of a GEMM of one layer, or of several layers that are stacked.


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
    shift_scale: Tensor | None = None,
) -> None:
    """Add the statistics of an operand to `stats` [slots, WIDTH], from row `slot` on, if this step is sampled. In a
    recomputation (activation checkpointing) the operands of the forward pass are not added again; that it ran is noted.

    The kind of the operand says what `source` holds:

        "x", "dy"           x [T, K]; dy [T, N]
        "norm", "center"    total [T, K], mean and rstd [T, 1], weight [K] and perhaps bias [K] of a norm
        "swiglu", "geglu", "gelu"               u [T, 2F] or [T, F], the input of the activation
        "swiglu_gradient", and so on            dh [T, F] and u
        "w", "bytes"        the weights [N_i, K]; nothing, where the weights exist as bytes only

    Stacked layers have a row each, and `sizes` N_i: rows of w, columns of dy; none of x, which they share. `spec` is
    the `Cast.spec` of the quantized operand, `amax` [1, 1] what came where its scale was known before. `column_scale`
    [N, 1] and the mantissas of `shift_scale` [T, 1], of x, were folded into dy; by the exponents of `shift_scale` the
    bytes of dy are shifted for dw.
    """
    if not _is_sampled(stats, slot, kind):
        return
    q, full = None, bool(Sampling.full)
    if data is not None and scale is not None:
        column_scale = None if column_scale is None else column_scale.t()
        q = Quantized(data, scale, parse_cast(spec), full, _NO_ROWS, amax, column_scale, shift_scale)
    store = Store.of(stats)
    for row, (x, of_rows, columns) in enumerate(_parts(kind, source, sizes, q), slot):
        rows = Rows(x.contiguous()[None], full) if of_rows is None else of_rows.rows(x, columns)
        if store is None:
            add_statistics(stats[row : row + 1], rows.statistics())
        else:
            store.add(stats, row, rows)


def _is_sampled(stats: Tensor, slot: int, kind: str) -> bool:
    """True if an operand should be recorded. That it was computed again is noted in its row of statistics."""
    if not Sampling.active or (stats.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    of_backward = kind == "dy" or kind.endswith("_gradient")
    if of_backward or torch._C._current_graph_task_id() == -1:
        return True
    stats[slot, FIELD["recomputed"]] = 1  # a forward pass within a backward pass, as activation checkpointing runs it
    return False


ROWS = 16  # of an operand, in a brief sample
_NO_ROWS = torch.empty(0, dtype=torch.int64)


def _parts(
    kind: str, source: Sequence[Tensor], sizes: Sequence[int], q: Quantized | None
) -> Iterator[tuple[Any, Quantized | None, slice]]:
    """The sampled rows [R, K] of an operand, None where only bytes exist; its quantized form; its columns of dy.
    Stacked weights, and the columns of dy that belong to them, come one by one."""
    rows = Sampling.full or ROWS
    if kind not in ("w", "bytes"):
        index = sampled_rows(source[0].shape[0], rows, source[0].device)
        x = numbers_of_rows(kind, [t[index] if t.ndim == 2 else t for t in source])
        of_rows = None if q is None else replace(q, index=index)
        ends = list(accumulate(sizes or [x.shape[1]]))
        for start, end in zip([0, *ends], ends, strict=False):
            yield x[:, start:end], of_rows, slice(start, end)
        return
    start = 0
    for i, size in enumerate(sizes):
        of_rows = None
        if q is not None:
            part = slice(start, start + size)
            whole = q.data.shape[0] == size  # stacked weights have row scales
            data, scale = (q.data, q.scale) if whole else (q.data[part], q.scale[part])
            of_rows = replace(q, data=data, scale=scale, index=sampled_rows(size, rows, data.device))
        yield source[i][sampled_rows(size, rows, source[i].device)] if source else None, of_rows, slice(None)
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
    if kind.endswith("_gradient"):
        return activation_gradient(first, rest[0], kind.removesuffix("_gradient"))[0]
    return activated(first, kind)


# ---- The operands of a grouped GEMM, whose rows belong to experts.
#
# The same rows serve both kinds of samples: of each expert as many, spread over its group or its matrix, and the scales
# of all its rows. An expert with fewer than EXPERT_ROWS rows of tokens has no numbers of rows in this sample.


EXPERT_ROWS = 8  # of each expert at least


@sampled_operation("stats", "table")
def observe_experts(
    stats: Tensor,
    table: Tensor,
    kind: str,
    source: Sequence[Tensor],
    offsets: Tensor,
    data: Tensor,
    scale: Tensor,
    spec: str,
    slot: Tensor | None = None,
    factor: Tensor | None = None,
    column_scale: Tensor | None = None,
    shift_scale: Tensor | None = None,
) -> None:
    """Add the statistics of each expert to `table` [E, HEAD], and the histogram of all to `stats` [1, WIDTH].

    The arguments are those of `observe`. "w" has the matrices as one, [E * N, K], and `column_scale` is [E, N]. Each
    group of rows ends at its number in `offsets`, int32 [E]. With `slot`, int32 [M], row m of "x" and "dy" is the token
    slot[m] // top_k of the first source. `factor` [M, 1] is multiplied into the rows of the source.
    """
    if not _is_sampled(stats, 0, kind):
        return
    m, experts = len(data), len(offsets)
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).long()
    group = None if kind == "w" else group_of_rows(offsets, m).long()
    if kind == "w":
        sizes = torch.full_like(sizes, m // experts)
    index = rows_of_experts(sizes, m, max(EXPERT_ROWS, Sampling.full // experts))
    x = None
    if source:
        first, *rest = source
        token = index if slot is None else slot[index] // (len(slot) // len(first))
        x = numbers_of_rows("x" if kind == "w" else kind, [first[token], *(t[index] for t in rest)])
        x = x if factor is None else x * factor[index]
    full = bool(Sampling.full)
    q = Quantized(data, scale, parse_cast(spec), full, index, None, column_scale, shift_scale, sizes, group)
    found = q.rows(x).statistics()
    # An expert with few rows has the numbers of its scales alone.
    known, of_rows = (sizes >= EXPERT_ROWS).unsqueeze(1), clear(torch.empty_like(found))
    for name in ("all_amax", "scale", "minus_smallest_scale", "scales", "bad_scales"):
        of_rows[:, FIELD[name]] = found[:, FIELD[name]]
    found = torch.where(known, found, of_rows)
    add_statistics(table, found[:, :HEAD])
    if q.full:
        stats[0, HEAD:] += found[:, HEAD:].sum(0)


def rows_of_experts(sizes: Tensor, m: int, count: int) -> Tensor:
    """`count` rows of each expert, int64 [E * count], of m rows in groups of `sizes`. Rows of a small group repeat."""
    part, place = _places(count, sizes.device)
    begin, end = part * sizes[:, None] // count, (part + 1) * sizes[:, None] // count
    first = sizes.cumsum(0) - sizes
    return (first[:, None] + begin + (place * (end - begin)).long()).clamp(max=m - 1).view(-1)


@lru_cache(maxsize=16)
def _places(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of the parts that a group is cut into, [count], and the place of a row within each, 0 to 1."""
    places = sampled_rows(count << 20, count, device).double() / (1 << 20)
    part = torch.arange(count, device=device)
    return part, places - part
