"""Operands of the backward GEMMs whose row scales lie along the reduction (the mathematics: `linear_function`).

Such a scale cannot leave the sum. It is folded into the other operand, and its own tensor then has the scale 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.formats import format_of
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.numerics.scaling import quotient, scale_mantissa
from octavo.ops import FoldedScales, quantize, requantize_transposed, transpose


def mantissa(s_x: Tensor) -> Tensor:
    """m [T, 1] of s_x = m * 2^e: the part of the scale of x that is folded into dy before dy is quantized."""
    return scale_mantissa(s_x)


def transposed(q: QTensor, after: Tensor | None = None) -> QTensor:
    """The bytes of `q` transposed, with its scales; row scales are folded into the other operand and become 1.

    `after` is that of `octavo.ops.transpose`.
    """
    data = transpose(q.data, None, after)
    return scale_folded(data) if q.granularity == ROW else QTensor(data, q.scale.t(), q.format, q.granularity)


def scale_folded(data: Tensor) -> QTensor:
    """Bytes whose scale was folded into the other operand: theirs is 1."""
    return QTensor(data, data.new_ones((data.shape[0], 1), dtype=torch.float32), format_of(data.dtype), ROW)


def weight_transposed(
    weights: Sequence[Tensor], data: Tensor | None, s_w: Tensor, cast: Cast, after: Tensor
) -> QTensor:
    """The bytes of the weights, stacked along N and transposed.

    Args:
        weights: one, or several with row scales.
        data: their bytes, where these were saved; None casts the weights again, by the scale `s_w`.
        after: a tensor of the backward pass, before which compiled code cannot compute the result.
    """
    # Quantizing again would give the same bytes. But torch.compile merges equal calls: it would quantize once, in the
    # forward pass, and keep the bytes until the backward pass.
    if data is not None:
        return transposed(QTensor(data, s_w, cast.fmt, cast.granularity), after)
    data = requantize_transposed(weights, s_w, cast, after)
    if cast.by_row:
        return scale_folded(data)
    return QTensor(data, s_w.t(), cast.fmt, cast.granularity)


def quantize_folded(dy: Tensor, s_w: Tensor | None, s_x: Tensor | None, cast: Cast) -> QTensor:
    """g = dy * s_w * m, quantized, where m is the mantissa of s_x; a factor that is None is 1."""
    return quantize(dy, cast, column_scale=None if s_w is None else s_w.t(), mantissa_of=s_x)


def dx_operand(g: QTensor, m: Tensor | None) -> QTensor:
    """g for dx, whose scale has no factor m: the scale of g divided by m."""
    return g if m is None else rescaled(g, quotient(g.scale, m))


def rescaled(q: QTensor, scale: Tensor) -> QTensor:
    """The bytes of `q` with another scale."""
    return QTensor(q.data, scale, q.format, q.granularity)


def dw_operand(g: QTensor, scales: FoldedScales) -> QTensor:
    """h [N, T] for dw, from row-scaled g [T, N]: the bytes of g transposed, and s_w taken out of the scale.

    The scale of g and the exponent of s_x lie along the reduction. Both are powers of two: they move the exponents of
    the bytes.
    """
    h = transpose(g.data, scales.shift)  # [N,T]
    scale = scales.dw if len(scales.dw) == len(h) else scales.dw.expand(len(h), 1).contiguous()
    return QTensor(h, scale, g.format, ROW)
