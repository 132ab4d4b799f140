"""Adding the statistics of a GEMM's operand to a buffer, in the steps that are sampled.

Rows are read, not the whole operand: one out of each of as many equal parts as there are rows to sample. Scales are all
read.

The numbers of a fused pass (the output of a norm, of an activation, and the gradient of its input) exist as bytes only.
Here they are computed again for the sampled rows, from the inputs of the pass.

Nothing here waits for the device. While a CUDA graph is captured, nothing is recorded: the graph would replay it in
each step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.cast import parse_cast
from octavo.observation.brief_samples import ROWS, BriefStore, Operand, combine, statistics
from octavo.observation.quantized_operand import QuantizedOperand
from octavo.observation.sampling import Sampling, is_recomputed, sampled_operation
from octavo.observation.statistics import (
    BRIEF_WIDTH,
    FIELD,
    WIDTH,
    Found,
    add_statistics,
    sampled_rows,
    tensor_statistics,
)


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
            "x"                 x [T, K]
            "norm", "center"    total [T, K], mean and rstd [T, 1], weight [K] and perhaps bias [K] of a norm
            "swiglu", "geglu", "gelu"               u [T, 2F] or [T, F], the input of the activation
            "w"                 the weights [N_i, K]
            "bytes"             nothing: the weights exist as bytes only
            "dy"                dy [T, N]
            "swiglu_gradient", and so on            dh [T, F] and u
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
        parts = _sampled(kind, source, sizes, quantized, Sampling.full)
        for i, part in enumerate(parts):
            add_statistics(stats[slot + i], part.full(column_scale))
    if Sampling.brief:
        store = BriefStore.of(stats)
        for i, part in enumerate(_sampled(kind, source, sizes, quantized, ROWS)):
            if store is not None:
                store.add(stats, slot + i, part.brief())
                continue
            row = stats[slot + i, WIDTH : WIDTH + BRIEF_WIDTH]
            row.copy_(combine(row[None], statistics([part.brief()]))[0])


@dataclass(frozen=True)
class _Part:
    """The sampled rows of one operand, x [R, K], or None where only bytes of it exist; its columns of a stacked dy."""

    x: Tensor | None
    quantized: QuantizedOperand | None
    columns: slice

    def full(self, column_scale: Tensor | None) -> Found:
        if self.x is None:
            assert self.quantized is not None
            return self.quantized.of_bytes()
        x, found = tensor_statistics(self.x.float())
        if self.quantized is not None:
            column = None if column_scale is None else column_scale[self.columns].t()
            found |= self.quantized.statistics(x, self.columns, column)
        return found

    def brief(self) -> Operand:
        if self.quantized is None:
            assert self.x is not None
            return Operand(self.x.contiguous())
        if self.x is None:
            return Operand(**self.quantized.brief_of_bytes())
        return Operand(self.x.contiguous(), **self.quantized.brief(self.columns))


def _sampled(
    kind: str, source: Sequence[Tensor], sizes: Sequence[int], quantized: QuantizedOperand | None, rows: int
) -> Iterator[_Part]:
    """The sampled rows of an operand; of stacked weights, and of the columns of dy that belong to them, one by one."""
    if kind not in ("w", "bytes"):
        index = sampled_rows(source[0].shape[0], rows, source[0].device)
        x = numbers_of_rows(kind, [t[index] if t.ndim == 2 else t for t in source])
        of_rows = None if quantized is None else replace(quantized, index=index)
        ends = list(accumulate(sizes or [x.shape[1]]))
        for start, end in zip([0, *ends], ends, strict=False):
            yield _Part(x[:, start:end], of_rows, slice(start, end))
        return
    start = 0
    for i, size in enumerate(sizes):
        part = None if quantized is None else quantized.cut(slice(start, start + size), rows)
        yield _Part(source[i][sampled_rows(size, rows, source[i].device)] if source else None, part, slice(None))
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
