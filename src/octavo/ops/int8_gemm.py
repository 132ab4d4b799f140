"""The INT8 GEMM: both operands in int8 with a scale for each row, sums in int32.

    y[M,N] = float32(sum over k of a[M,K] * b[N,K]) * s_a[M] * s_b[N]

The sums are exact integers: float64 holds every integer up to 2^53. They are rounded to float32 once, and each of the
two products is rounded once. Every implementation equals the reference, byte for byte.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.numerics.qtensor import ROW, QTensor
from octavo.ops.dispatch import LOWEST_INT8
from octavo.ops.gemm import check_product, like_product, operands_of
from octavo.ops.launching import Operands, has_kernels
from octavo.ops.registration import operation

LONGEST_K = (2**31 - 1) // 127**2


def int8_mm(
    a: QTensor,
    b: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y [M, N] of `out_dtype`: (a.data * a.scale) @ (b.data * b.scale)^T + bias, then + residual, for int8 operands.

    a [M, K] and b [N, K] have a scale for each row, as `quantize` makes them by `Cast("int8", ROW)`. The exact sum is
    rounded to float32, multiplied by the scale of a and then by that of b, and bias [N] is added, each in float32. The
    residual [M, N] of `out_dtype` is added after y is rounded, and the sum is rounded again. K is at most 133,144: a
    sum of more products may exceed int32.
    """
    for name, q in (("a", a), ("b", b)):
        if q.format.name != "int8" or q.granularity != ROW or q.data.ndim != 2:
            raise ValueError(
                f"int8_mm takes matrices in int8 with a scale for each row, got {name} in {q.format.name} with "
                f"{q.granularity.name} scales, {list(q.shape)}: quantize it by Cast('int8')"
            )
    return _int8_mm(*operands_of(a, b), bias, residual, out_dtype)


def int8_mm_reference(
    operands: Operands, bias: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    a, b, scale_a, scale_b, _, _ = operands
    with torch.autocast(a.device.type, enabled=False):
        sums = a.double() @ b.double().t()  # [M,K] @ [N,K]^T
    y = sums.float() * scale_a * scale_b.t()
    y = (y if bias is None else y + bias).to(out_dtype)
    return y if residual is None else y + residual


def _check(operands: Operands, *rest: Any) -> None:
    check_product(operands, *rest)
    if (k := operands.a.shape[1]) > LONGEST_K:
        raise ValueError(f"int8_mm sums in int32, which holds K up to {LONGEST_K:,}, got K = {k:,}")


def _runs(operands: Operands, *_: Any) -> bool:
    return has_kernels(operands.a.device, LOWEST_INT8)


def _inlines(operands: Operands, *_: Any) -> bool:
    if not _runs(operands):
        return False
    from octavo.ops.kernels import int8_gemm as kernel

    return not kernel.uses_cublas(operands.a.shape[0], operands.b.shape[0], operands.a.shape[1])


_int8_mm = operation(check=_check, like=like_product, runs=_runs, inlines=_inlines)(int8_mm_reference)
