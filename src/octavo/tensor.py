"""Quantize one tensor, by hand: for looking at it, packing it, testing with it."""

from __future__ import annotations

import math

from torch import Tensor

from octavo.numerics import Cast, QTensor
from octavo.numerics.granularity import parse_granularity
from octavo.ops import quantize as quantize_matrix


def quantize(
    x: Tensor, format: str = "e4m3", granularity: str = "row", *, scale: str = "fp32", rounding: str = "nearest"
) -> QTensor:
    """`x` as a QTensor: x ≈ q.data * q.scale.

    Args:
        x: float32, bfloat16 or float16, any rank; leading dimensions count as rows.
        format: "e4m3", "e5m2", "e4m3fnuz" or "e5m2fnuz".
        granularity: "tensor", "row", "group:G" or "block:RxC" (the latter for matrices).
        scale: "fp32", "pow2" or "e8m0"; MX is granularity="group:32", scale="e8m0".
        rounding: "nearest" or "stochastic" (the draw follows torch.manual_seed).

    Raises:
        ValueError: an unknown word (the message has the choices), or a value of `x` that is inf or NaN.
    """
    cast = Cast(format, parse_granularity(granularity), scale, rounding)
    bad = ~x.isfinite()
    if bad.any():
        first = bad.nonzero()[0].tolist()
        raise ValueError(
            f"quantize needs finite numbers: {int(bad.sum())} of {x.numel()} are not, "
            f"the first, {x[tuple(first)]}, at {first}"
        )
    if x.ndim != 2 and cast.granularity.rows not in (None, 1):
        raise ValueError(f"{granularity} blocks need a matrix, got shape {list(x.shape)}: reshape it to two dimensions")
    if x.ndim == 0:
        raise ValueError("quantize needs at least one dimension, got a scalar: pass x.view(1)")
    matrix = quantize_matrix(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), cast)
    data = matrix.data.view(x.shape)
    return QTensor(data, matrix.scale.view(cast.granularity.scale_shape(tuple(x.shape))), cast.fmt, cast.granularity)
