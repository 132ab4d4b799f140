"""Adding the statistics of a GEMM's operand to a buffer, in the steps that are sampled.

In other steps the operation returns at once: it looks at a flag of the host. So a model is compiled once, with the
operations in its graph, and a step that is not sampled costs a call of each. Rows are read, not the whole operand:
`rows` of them, one out of each of as many equal parts. Scales are all read.

The numbers of a fused pass (the output of a norm, of an activation, and the gradient of its input) exist as bytes only.
Here they are computed again for the sampled rows, from the inputs of the pass.

Nothing here waits for the device. While a CUDA graph is captured, nothing is recorded: the graph would replay it in
each step.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.cast import parse_cast
from octavo.ops.inductor import OPERATIONS
from octavo.ops.quantized_operand import QuantizedOperand
from octavo.ops.statistics import FIELD, Found, add_statistics, brief_statistics, tensor_statistics

_GOLDEN = (math.sqrt(5) - 1) / 2


class Sampling:
    """Whether operands are recorded now, by any watch of the process, and how many rows of each."""

    rows = 0  # 0: not now
    brief = False  # only the numbers that rules judge
    _requests: ClassVar[dict[int, tuple[int, bool]]] = {}

    @classmethod
    def request(cls, watch: object, rows: int, *, brief: bool = False) -> None:
        """Record `rows` rows of each operand from now on; 0 withdraws the request of this watch."""
        cls._requests.pop(id(watch), None)
        if rows:
            cls._requests[id(watch)] = rows, brief
        cls.rows = max((rows for rows, _ in cls._requests.values()), default=0)
        cls.brief = all(brief for _, brief in cls._requests.values())


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
    """Add the statistics of an operand to `stats` [slots, WIDTH], if this step is sampled.

    In a recomputation (activation checkpointing) the operands of the forward pass are not added again. That it ran is
    recorded.

    Args:
        slot: the first row of `stats` to add to; each of stacked layers has the next one.
        kind: of the operand, and with it what `source` holds:
            "x"                 x [T, K]
            "norm", "center"    total [T, K], mean and rstd [T, 1], weight [K] and perhaps bias [K] of a norm
            "swiglu", "gelu"    u [T, 2F] or [T, F], the input of the activation
            "w"                 the weights [N_i, K]
            "bytes"             nothing: the weights exist as bytes only
            "dy"                dy [T, N]
            "swiglu_gradient", "gelu_gradient"      dh [T, F] and u
        sizes: N_i of the stacked layers: rows of w, columns of dy; empty for x, which they share.
        data, scale, spec: of the quantized operand, and the `Cast.spec` of its cast; None where the GEMM reads the
            operand in high precision.
        amax: [1, 1], the amax that came where the scale was known before; None where the scale is that of the amax.
        column_scale, row_scale: [N, 1] and [T, 1], folded into dy before it was quantized.
        shift_scale: the scale [T, 1] of x, by whose exponent the bytes of dy are shifted for dw.
    """
    args = stats, slot, kind, list(source), list(sizes), data, scale, spec, amax, column_scale, row_scale, shift_scale
    if torch.compiler.is_compiling():
        torch.ops.octavo.observe.default(*args)
    elif Sampling.rows:
        _observe(*args)


def _observe(
    stats: Tensor,
    slot: int,
    kind: str,
    source: list[Tensor],
    sizes: list[int],
    data: Tensor | None,
    scale: Tensor | None,
    spec: str,
    amax: Tensor | None,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    shift_scale: Tensor | None,
) -> None:
    if not Sampling.rows:
        return
    if stats.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    backward = kind == "dy" or kind.endswith("_gradient")
    if not backward and torch._C._current_graph_task_id() != -1:  # in a backward pass: a recomputation
        stats[slot, FIELD["recomputed"]] = 1
        return
    quantized = None
    index = sampled_rows(source[0].shape[0] if source else 1, Sampling.rows, stats.device)
    if data is not None and scale is not None:
        folds = row_scale, shift_scale
        quantized = QuantizedOperand(data, scale, parse_cast(spec), index, amax, *folds, Sampling.brief)
    if kind in ("w", "bytes"):
        _add_weights(stats[slot:], source, sizes, quantized)
        return
    x = _numbers(kind, [t[index] if t.ndim == 2 else t for t in source])
    start = 0
    for i, size in enumerate(sizes or [x.shape[1]]):
        columns = slice(start, start := start + size)
        part, found = _of_tensor(x[:, columns], moments=not backward)
        if quantized is not None:
            column = None if column_scale is None else column_scale[columns].t()
            found |= quantized.statistics(part, found, columns, column)
        add_statistics(stats[slot + i], found)


def _add_weights(stats: Tensor, source: list[Tensor], sizes: list[int], quantized: QuantizedOperand | None) -> None:
    """Add the statistics of the weights [N_i, K], of which `quantized` has all rows."""
    start = 0
    for i, size in enumerate(sizes):
        index = sampled_rows(size, Sampling.rows, stats.device)
        part = None if quantized is None else quantized.cut(slice(start, start + size), index)
        if not source:
            assert part is not None
            found = part.of_bytes()
        else:
            x, found = _of_tensor(source[i][index].float(), moments=True)
            if part is not None:
                found |= part.statistics(x, found)
        add_statistics(stats[i], found)
        start += size


def _of_tensor(x: Tensor, *, moments: bool) -> tuple[Tensor, Found]:
    """The statistics of x, and x, where they are full without inf and NaN. The moments of dy have no rule."""
    return (x, brief_statistics(x, moments=moments)) if Sampling.brief else tensor_statistics(x)


def _numbers(kind: str, source: list[Tensor]) -> Tensor:
    """The sampled rows of an operand, float32, from those of its source."""
    first, *rest = (t.float() for t in source)
    if kind in ("x", "dy"):
        return first
    if kind in ("norm", "center"):
        mean, rstd, weight, *bias = rest
        normed = (first - mean if kind == "center" else first) * rstd * weight
        return normed + bias[0] if bias else normed
    if kind == "gelu":
        return F.gelu(first)
    if kind == "swiglu":
        gate, up = first.chunk(2, 1)
        return F.silu(gate) * up
    u = rest[0]
    if kind == "gelu_gradient":
        gradient: Tensor = torch.ops.aten.gelu_backward(first, u)
        return gradient
    gate, up = u.chunk(2, 1)
    return torch.cat([torch.ops.aten.silu_backward(first * up, gate), first * F.silu(gate)], 1)


@lru_cache(maxsize=256)
def sampled_rows(count: int, rows: int, device: torch.device) -> Tensor:
    """The indices of `rows` rows of `count`, int64: one out of each of `rows` equal parts, or all if there are fewer.

    The place within each part is that of the golden ratio's multiples. With a fixed stride every sampled token could
    have the same position in its sequence, such as the first, whose activations differ from all others.
    """
    rows = min(rows, count)
    ends = torch.arange(rows + 1, device=device) * count // rows
    place = (torch.arange(rows, dtype=torch.float64, device=device) * _GOLDEN).frac()
    return ends[:-1] + (place * ends.diff()).long()


def _register() -> None:
    """Register the operation `octavo::observe`, which compiled code calls in every step.

    Not by `torch.library.custom_op`: a call of such an operation takes 48 µs of the host's time, and one of this 3 µs.
    """
    schema = torch.library.infer_schema(_observe, mutates_args=("stats",))
    _LIBRARY.define(f"observe{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl("observe", _observe, "CompositeExplicitAutograd")
    torch.library.register_fake("octavo::observe", lambda *args: None)
    OPERATIONS["observe"] = _observe, lambda *args: False


_LIBRARY: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_register()
