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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.cast import Cast, parse_cast
from octavo.numerics.scaling import SMALLEST_SCALE, split_scale
from octavo.ops.inductor import OPERATIONS
from octavo.ops.statistics import (
    FIELD,
    Found,
    add_statistics,
    numbers_of,
    quantization_statistics,
    sampled_scale,
    scale_statistics,
    shift_statistics,
    tensor_statistics,
)

_GOLDEN = (math.sqrt(5) - 1) / 2


class Sampling:
    """Whether operands are recorded now, by any watch of the process, and how many rows of each."""

    rows = 0  # 0: not now
    _requests: ClassVar[dict[int, int]] = {}

    @classmethod
    def request(cls, watch: object, rows: int) -> None:
        """Record `rows` rows of each operand from now on; 0 withdraws the request of this watch."""
        cls._requests.pop(id(watch), None)
        if rows:
            cls._requests[id(watch)] = rows
        cls.rows = max(cls._requests.values(), default=0)


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
    quantized = None if data is None or scale is None else _Quantized(data, scale, parse_cast(spec), amax)
    if kind in ("w", "bytes"):
        _add_weights(stats[slot:], source, sizes, quantized)
        return
    index = sampled_rows(source[0].shape[0], Sampling.rows, stats.device)
    x = _numbers(kind, [t[index] if t.ndim == 2 else t for t in source])
    start = 0
    for i, size in enumerate(sizes or [x.shape[1]]):
        columns = slice(start, start := start + size)
        finite, found = tensor_statistics(x[:, columns])
        if quantized is not None:
            factors = None if column_scale is None else column_scale[columns].t(), row_scale
            found |= quantized.statistics(finite, index, columns, *factors, shift_scale)
        add_statistics(stats[slot + i], found)


@dataclass(frozen=True)
class _Quantized:
    """The bytes and scales of an operand [M, K], and its amax [1, 1] where the scales were known before."""

    data: Tensor
    scale: Tensor
    cast: Cast
    amax: Tensor | None

    def cut(self, rows: slice) -> Self:
        """Those of the rows of one of several stacked weights, which have row scales."""
        return (
            self
            if self.data.shape[0] == rows.stop - rows.start
            else replace(self, data=self.data[rows], scale=self.scale[rows])
        )

    def statistics(
        self,
        x: Tensor,
        index: Tensor,
        columns: slice = slice(None),
        column_scale: Tensor | None = None,
        row_scale: Tensor | None = None,
        shift_scale: Tensor | None = None,
    ) -> Found:
        """The errors of the sampled rows x = operand[index, columns], and the range of the scales.

        Args:
            column_scale, row_scale: [1, K'] and [M, 1], multiplied into the operand before it was quantized. They are
                taken out of the scales: x ≈ numbers * scale / (row_scale * column_scale).
            shift_scale: [M, 1]: the exponents of c = 2^e * s_g take bytes from h (`scale_folding.dw_operand`).
        """
        numbers = self._numbers(index, columns)
        scale = sampled_scale(self.scale, index, self.cast.granularity, x.shape[1])
        all_scales = self.scale
        if row_scale is not None:
            scale, all_scales = scale / row_scale[index], self.scale / row_scale
        if column_scale is not None:
            scale = scale / column_scale
        found = quantization_statistics(x, numbers, scale, self.cast.fmt) | scale_statistics(all_scales, column_scale)
        if shift_scale is not None:
            exponent = split_scale(shift_scale)[1] + split_scale(self.scale)[1]
            found |= shift_statistics(numbers, exponent.amax() - exponent[index], self.cast.fmt)
        return found | self._of_amax(found["scale"], folded=column_scale is not None or row_scale is not None)

    def of_bytes(self, index: Tensor) -> Found:
        """The statistics of a tensor of which there are only bytes: its errors are unknown."""
        scale = sampled_scale(self.scale, index, self.cast.granularity, self.data.shape[1])
        x, scales = self._numbers(index, slice(None)) * scale, scale_statistics(self.scale, None)
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=x.device)
        errors = dict.fromkeys(("saturated", "flushed", "noise"), unknown)
        return tensor_statistics(x)[1] | errors | scales | self._of_amax(scales["scale"], folded=False)

    def _numbers(self, index: Tensor, columns: slice) -> Tensor:
        return numbers_of(self.data.view(torch.uint8)[:, columns][index].view(self.data.dtype))

    def _of_amax(self, scale: Tensor, *, folded: bool) -> Found:
        """The amax of all rows, where the quantization found it, and the gap between a scale known before and it."""
        if self.amax is not None:
            expected = self.scale * self.cast.fmt.max
            return {"all_amax": self.amax.amax(), "minus_gap": torch.log2(self.amax / expected).amax()}
        if self.cast.scale == "fp32" and not folded:
            return {"all_amax": torch.where(scale > SMALLEST_SCALE, scale * self.cast.fmt.max, 0)}
        return {}


def _add_weights(stats: Tensor, source: list[Tensor], sizes: list[int], quantized: _Quantized | None) -> None:
    """Add the statistics of the weights [N_i, K], of which `quantized` has all rows."""
    start = 0
    for i, size in enumerate(sizes):
        index = sampled_rows(size, Sampling.rows, stats.device)
        rows = slice(start, start + size)
        part = None if quantized is None else quantized.cut(rows)
        if not source:
            assert part is not None
            found = part.of_bytes(index)
        else:
            x, found = tensor_statistics(source[i][index].float())
            if part is not None:
                found |= part.statistics(x, index)
        add_statistics(stats[i], found)
        start += size


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
