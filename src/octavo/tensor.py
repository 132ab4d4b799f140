"""Quantization of a single tensor, for inspection, packing and tests."""

import math
from typing import Literal

import torch
from torch import Tensor

from octavo.numerics import Cast, QTensor
from octavo.numerics.qtensor import parse_granularity
from octavo.ops import quantize as quantize_matrix
from octavo.ops.registration import FLOATS


def quantize(
    x: Tensor,
    format: Literal["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1"] = "e4m3",
    granularity: str = "row",
    *,
    scale: Literal["fp32", "pow2", "e8m0", "e8m0_floor", "e4m3"] = "fp32",
    rounding: Literal["nearest", "stochastic"] = "nearest",
) -> QTensor:
    """Quantize a tensor: the result q is a QTensor with x ≈ q.data * q.scale.

        >>> q = octavo.quantize(torch.randn(256, 512), granularity="block:128x128")
        >>> q.data.dtype, q.scale.shape
        (torch.float8_e4m3fn, torch.Size([2, 4]))
        >>> x = q.dequantize()

    Args:
        x: float32, bfloat16 or float16, any rank above 0; all dimensions but the last count as rows.
        format: "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz" or "e2m1", whose numbers the data holds in E4M3.
        granularity: "tensor", "row", "group:G" or, for matrices, "block:RxC".
        scale: "fp32", "pow2" or "e8m0". MX is granularity="group:32" with scale="e8m0", for e2m1 "e8m0_floor".
            NVFP4 is e2m1 with granularity="group:16" and scale="e4m3".
        rounding: "nearest" or "stochastic" (its random numbers follow torch.manual_seed).

    Raises:
        TypeError: `x` is no tensor, or `granularity` no string.
        ValueError: an unknown name (the message lists the choices), or `x` is sparse, nested, of another dtype or on
            the meta device, or holds inf or NaN.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize takes a tensor, got {type(x).__name__}: pass torch.tensor(x), or q.dequantize()")
    if not isinstance(granularity, str):
        raise TypeError(f"granularity takes a name, such as 'row' or 'group:128', got {granularity!r}")
    if x.layout != torch.strided or x.is_nested or x.is_quantized or x.is_meta or x.dtype not in FLOATS:
        raise ValueError(
            f"quantize takes a dense tensor of float32, bfloat16 or float16, got {x.dtype} "
            f"({'nested' if x.is_nested else x.layout}, on {x.device}): convert it first"
        )
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
    matrix = quantize_matrix(x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1]), cast)
    data = matrix.data.view(x.shape)
    return QTensor(data, matrix.scale.view(cast.granularity.scale_shape(tuple(x.shape))), cast.fmt, cast.granularity)
