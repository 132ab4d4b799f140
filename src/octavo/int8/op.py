"""The INT8 GEMM: checks, the registered operation, and the choice between the kernel and the reference."""

from typing import Any

import torch
from torch import Tensor

from octavo.int8.backend import LOWEST
from octavo.int8.reference import int8_mm_reference
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops.checks import FLOATS, check_tensor
from octavo.ops.inductor import operation, register_lowerings
from octavo.ops.triton_support import has_kernels

LONGEST_K = (2**31 - 1) // 127**2


def int8_mm(
    a: QTensor,
    b: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y = (a.data * a.scale) @ (b.data * b.scale)^T + bias, then + residual, for operands in int8.

    The sum of the integer products is exact. It is rounded to float32, multiplied by the scale of a and then by that of
    b, and the bias is added, each in float32.

    Args:
        a, b: [M, K] and [N, K] in int8, with a scale for each row, as `quantize` makes them by `Cast("int8", ROW)`.
        bias: [N], added before y is rounded to `out_dtype`.
        residual: [M, N] of `out_dtype`, added after y is rounded. The sum is rounded again.
        out_dtype: of y.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        ValueError: operands that are not in int8 by row, shapes or dtypes that do not match, or a K above 133,144, for
            which a sum may exceed int32.
    """
    for name, q in (("a", a), ("b", b)):
        if q.format.name != "int8" or q.granularity != ROW or q.data.ndim != 2:
            raise ValueError(
                f"int8_mm takes matrices in int8 with a scale for each row, got {name} in {q.format.name} with "
                f"{q.granularity.name} scales, {list(q.shape)}: quantize it by Cast('int8')"
            )
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(f"need a [M, K] and b [N, K] with the same K, got {list(a.shape)} and {list(b.shape)}")
    if a.data.shape[1] > LONGEST_K:
        raise ValueError(f"int8_mm sums in int32, which holds K up to {LONGEST_K:,}, got K = {a.data.shape[1]:,}")
    m, n = a.data.shape[0], b.data.shape[0]
    if bias is not None:
        check_tensor("bias", bias, (n,), *FLOATS)
    if residual is not None:
        check_tensor("residual", residual, (m, n), out_dtype)
    y: Tensor = _int8_mm(a.data, a.scale, b.data, b.scale, bias, residual, out_dtype)
    return y


def _is_launches(a: Tensor, scale_a: Tensor, b: Tensor, *_: Any) -> bool:
    """Whether the operation only launches kernels of ours. Inductor inlines it then."""
    if not has_kernels(a.device, LOWEST):
        return False
    from octavo.int8 import kernel

    return not kernel.uses_cublas(a.shape[0], b.shape[0], a.shape[1])


@operation("int8_mm", _is_launches)
def _int8_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if has_kernels(a.device, LOWEST):
        from octavo.int8 import kernel

        added = None if residual is None else residual.contiguous()
        return kernel.int8_mm(a, scale_a, b, scale_b, bias, added, out_dtype)
    y = int8_mm_reference(a, scale_a, b, scale_b)
    y = (y if bias is None else y + bias).to(out_dtype)
    return y if residual is None else y + residual


@_int8_mm.register_fake
def _(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Any, residual: Any, out_dtype: torch.dtype
) -> Tensor:
    register_lowerings()
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
