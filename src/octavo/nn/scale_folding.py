"""The backward GEMMs of row-scaled tensors, each quantized once (the mathematics: `octavo.nn.linear_function`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.nn.delayed import ScaleHistory
from octavo.numerics.cast import Cast
from octavo.numerics.formats import format_of
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.numerics.scaling import split_scale
from octavo.ops import quantize, requantize_transposed, scaled_mm, transpose
from octavo.recipe import Gemm, Recipe


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call needs beside its tensors: the recipe, the dtype of y and of unquantized GEMMs, delayed scales."""

    recipe: Recipe
    dtype: torch.dtype
    emulate: bool
    x_history: ScaleHistory | None = None
    w_history: ScaleHistory | None = None
    dy_history: ScaleHistory | None = None

    def mm(self, gemm: Gemm, a: QTensor, b: QTensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a @ b^T, as this GEMM of the recipe asks for it."""
        return scaled_mm(
            a, b, bias=bias, out_dtype=out_dtype, fast_accumulation=gemm.fast_accumulation, emulate=self.emulate
        )


def mantissa(s_x: Tensor) -> Tensor:
    """m [T, 1] of s_x = m * 2^e: the part of x's scale that is folded into dy before dy is quantized."""
    return split_scale(s_x)[0]


def transposed(q: QTensor) -> QTensor:
    """The bytes of `q` transposed, with its scale; a row scale, now on the reduction, was folded already: it is 1."""
    data = transpose(q.data)
    return folded_operand(data) if q.granularity == ROW else QTensor(data, q.scale.t(), q.format, q.granularity)


def folded_operand(data: Tensor) -> QTensor:
    """Bytes whose scale lay along the reduction and was folded into the other operand: theirs is 1."""
    return QTensor(data, torch.ones_like(data[:, :1], dtype=torch.float32), format_of(data.dtype), ROW)


def weight_transposed(weights: Sequence[Tensor], kept: Tensor | None, s_w: Tensor, cast: Cast) -> QTensor:
    """The bytes of the weights, stacked along N and transposed: of those that were kept, or cast again by their scale.

    Only weights scaled by row stack. Quantizing again would give the same bytes, but torch.compile sees that both calls
    are equal, makes one of them, and keeps its bytes for backward.
    """
    if kept is not None:
        return transposed(QTensor(kept, s_w, cast.fmt, cast.granularity))
    data = requantize_transposed(weights, s_w, cast)
    if cast.granularity == ROW:
        return folded_operand(data)
    return QTensor(data, s_w.t(), cast.fmt, cast.granularity)


def folded_dy(dy: Tensor, s_w: Tensor | None, m: Tensor | None, cast: Cast) -> QTensor:
    """g = dy * s_w * m, quantized; a factor that is None is 1."""
    return quantize(dy, cast, column_scale=None if s_w is None else s_w.t(), row_scale=m)


def folded_dx(g: QTensor, m: Tensor | None, w_t: QTensor, plan: Plan) -> Tensor:
    """dx from g = dy * s_w * m, quantized, and the bytes of w, transposed: m comes off again with the scale."""
    if m is not None:
        g = replace(g, scale=g.scale / m)
    return plan.mm(plan.recipe.dx, g, w_t, plan.dtype)  # [T,N] @ [K,N]^T


def folded_dw(g: QTensor, x_t: QTensor, s_x: Tensor, s_w: Tensor | None, dtype: torch.dtype, plan: Plan) -> Tensor:
    """dw from row-scaled g and the bytes of x, transposed: what their scales s_g and s_x [T, 1] leave on the reduction,
    powers of two, moves the exponents of g."""
    exponent = (split_scale(s_x)[1] + split_scale(g.scale)[1]).view(-1)  # [T] of c
    largest = exponent.amax()
    h = transpose(g.data, largest - exponent)  # [N,T]
    c_max = torch.exp2(largest.float())
    scale = c_max / s_w if s_w is not None else c_max.expand(h.shape[0], 1).contiguous()
    h_q = QTensor(h, scale, g.format, ROW)
    return plan.mm(plan.recipe.dw, h_q, x_t, dtype)  # [N,T] @ [K,T]^T
