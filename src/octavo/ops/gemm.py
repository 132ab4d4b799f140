"""The scaled GEMM: eight-bit operands, float32 sums.

The product of two E4M3 or E5M2 numbers has at most eight significant bits. float32 holds it exactly, so in the
reference only the sums are rounded. A scale that is constant along the reduction multiplies the result. Other scales
multiply the operand before the product.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.formats import format_of, widen
from octavo.numerics.qtensor import ROW, TENSOR, Granularity, QTensor, group
from octavo.ops.dispatch import MAX_SMALL_M, Backend, find_backend, returned_dtype
from octavo.ops.launching import Operands, has_kernels
from octavo.ops.library_gemms import ALIGNMENT, scaled_mm_cublaslt
from octavo.ops.registration import FLOATS, check_tensor, operation

_find_cached = lru_cache(maxsize=4096)(find_backend)
FOUR_BITS = group(16)  # the scales of NVFP4


def scaled_mm(
    a: QTensor,
    b: QTensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = False,
    emulate: bool = False,
) -> Tensor:
    """y [M, N] = (a.data * a.scale) @ (b.data * b.scale)^T + bias, then + residual.

    Args:
        a, b: [M, K] and [N, K], both contracted over their last axis.
        bias: [N], added before y is rounded to `out_dtype`, if the implementation can.
        residual: [M, N] of `out_dtype`, added after y is rounded. The sum is rounded again: the bits are those of
            y + residual.
        out_dtype: of y. Sums are float32.
        fast_accumulation: let the tensor core keep partial sums at its 14 bits. No effect on emulation, which is
            exact, and on block-scaled GEMMs, which add each block to a float32 sum.
        emulate: allow emulation in float32 on a GPU that has no kernel for these granularities.

    Raises:
        ValueError: shapes or dtypes that do not match.
        RuntimeError: the GPU has no kernel, and `emulate` is False.
    """
    return _scaled_mm(*operands_of(a, b), bias, residual, out_dtype, fast_accumulation, emulate)


def operands_of(a: QTensor, b: QTensor) -> tuple[Tensor, Tensor, Tensor, Tensor, str, str]:
    """The fields of `Operands` as operations take them."""
    return a.data, b.data, a.scale, b.scale, a.granularity.name, b.granularity.name


@operation(like=lambda y, u, b: None, mutates=("y",), repeats=lambda *_: False)
def add_product(y: Tensor, u: Tensor, b: Tensor) -> None:
    """y [M, N] += u [M, R] @ b [N, R]^T, in place and in one dtype: with a narrow u, y is read and written once.

    As an operation it stays in place in compiled code, where PyTorch's `addmm` would copy y.
    """
    y.addmm_(u, b.t())  # [M,R] @ [N,R]^T


# ---- Products whose rows depend on no other row, and not on how many rows there are.


def ordered_mm(
    a: QTensor | Tensor, b: QTensor | Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """y [M, N] = a @ b^T + bias in BF16, then + residual: each row has the same bits in a product of any M.

    The kernel adds along K in one order for every M, in the tensor core. The reference adds in float64, for E4M3
    exactly: products are multiples of 2^-18 below 2^18, and K is at most 2^17. a [M, K] and b [N, K] are both E4M3 with
    row scales, or both tensors in BF16. bias [N] and residual [M, N] are in BF16.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return _ordered_mm(a, b, None, None, bias, residual)
    return _ordered_mm(a.data, b.data, a.scale, b.scale, bias, residual)


def ordered_mm_reference(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    wide_a, wide_b = ((widen(x) if x.element_size() == 1 else x).double() for x in (a, b))
    y = (wide_a @ wide_b.t()).float()  # [M,K] @ [N,K]^T
    if scale_a is not None and scale_b is not None:
        y = y * scale_a * scale_b.t()
    y = (y if bias is None else y + bias.float()).bfloat16()
    return y if residual is None else y + residual


def _check_ordered(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> None:
    dtype = torch.bfloat16 if scale_a is None else torch.float8_e4m3fn
    m, n = a.shape[0], b.shape[0]
    for name, x, scale, shape in (("a", a, scale_a, (m, b.shape[-1])), ("b", b, scale_b, (n, a.shape[-1]))):
        check_tensor(name, x, shape, dtype)
        check_tensor(f"scale_{name}", scale, (shape[0], 1), torch.float32)
    check_tensor("bias", bias, (n,), torch.bfloat16)
    check_tensor("residual", residual, (m, n), torch.bfloat16)


_ordered_mm = operation(
    check=_check_ordered,
    like=lambda a, b, *rest: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16),
    runs=lambda a, *rest: has_kernels(a.device),
)(ordered_mm_reference)


def scaled_mm_reference(operands: Operands) -> Tensor:
    """(a * scale_a) @ (b * scale_b)^T as float32 [M, N]."""
    a, b, scale_a, scale_b, by_a, by_b = operands
    scale_a, scale_b = scale_a.float(), scale_b.float()
    with torch.autocast(a.device.type, enabled=False):  # it would run this product in BF16
        y = wide_operand(a, scale_a, by_a) @ wide_operand(b, scale_b, by_b).t()  # [M,K] @ [N,K]^T
    if by_a.outer:
        y *= scale_a
    if by_b.outer and not bool((scale_b == 1).all()):  # they are ones if the scale was folded into a
        y *= scale_b.t()
    return y


def wide_operand(data: Tensor, scale: Tensor, by: Granularity) -> Tensor:
    """The numbers of an operand [M, K] as float32, multiplied by scales that vary along K."""
    wide = widen(data)
    return wide if by.outer else wide.mul_(by.expand(scale.float(), tuple(data.shape)))


def check_product(
    operands: Operands, bias: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype, *_: Any
) -> None:
    """Raise ValueError unless these are the operands of a product, and tensors that are added to it."""
    a, b = operands.a.shape, operands.b.shape
    if len(a) != 2 or len(b) != 2 or a[1] != b[1]:
        raise ValueError(f"need a [M, K] and b [N, K] with the same K, got {list(a)} and {list(b)}")
    check_tensor("bias", bias, (b[0],), *FLOATS)
    check_tensor("residual", residual, (a[0], b[0]), out_dtype)


def like_product(
    operands: Operands, bias: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype, *_: Any
) -> Tensor:
    return operands.a.new_empty((operands.a.shape[0], operands.b.shape[0]), dtype=out_dtype)


def _backend(operands: Operands) -> Backend:  # chosen within the operation, so that torch.compile does not trace it
    a, b, scale_a, scale_b, by_a, by_b = operands
    formats, size = (format_of(a.dtype).name, format_of(b.dtype).name), (a.shape[0], b.shape[0])
    e8m0 = scale_a.dtype == torch.float8_e8m0fnu, scale_b.dtype == torch.float8_e8m0fnu
    return _find_cached(a.device, by_a, by_b, formats, size, e8m0=e8m0)


def _inlines(operands: Operands, *rest: Any) -> bool:
    """True if Inductor may inline the GEMM: not emulation, and of those with scales along K only our kernel's launches.
    The fake implementation of cuBLASLt's in torch 2.11 refuses the scales that the GEMMs need."""
    backend, by_row = _backend(operands).name, operands.by_a.outer
    if backend == "triton" and not by_row:
        return operands.scale_a.dtype == torch.float32 and operands.a.shape[1] % ALIGNMENT == 0
    return backend not in ("emulated", "none") and bool(by_row)


@operation(
    check=check_product, like=like_product, inlines=_inlines,
    repeats=lambda a, *rest: a.shape[0] <= MAX_SMALL_M or rest[3] not in (ROW.name, TENSOR.name),
)  # fmt: skip
def _scaled_mm(
    operands: Operands, bias: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype, fast: bool, emulate: bool
) -> Tensor:
    found = _backend(operands)
    backend = found.name
    if backend == "none" and emulate and operands.by_a == FOUR_BITS and has_kernels(operands.a.device):
        backend = "dequantized"  # NVFP4: float32 would take ten times as long
    if backend == "none" and not emulate:
        raise RuntimeError(
            f"no FP8 GEMM here: {found.reason}. Choose another recipe (`octavo doctor` lists what runs), "
            "or pass emulate=True to compute it slowly in float32"
        )
    if backend == "triton":
        from octavo.ops.kernels import block_scaled_gemm, gemm

        added = None if residual is None else residual.contiguous()
        if not operands.by_a.outer:
            return block_scaled_gemm.scaled_mm(operands, bias, out_dtype, added)
        return gemm.scaled_mm(operands, bias, out_dtype, fast, added)
    if backend in ("emulated", "none"):
        y = scaled_mm_reference(operands)
        y = (y if bias is None else y.add_(bias)).to(out_dtype)
    elif backend == "dequantized":
        from octavo.ops.kernels import block_scaled_gemm

        y = block_scaled_gemm.dequantized_mm(operands, bias, out_dtype)
    else:
        dtype = returned_dtype(backend, operands.by_a, out_dtype)
        y = scaled_mm_cublaslt(operands, bias, dtype, fast).to(out_dtype)
    return y if residual is None else y + residual
