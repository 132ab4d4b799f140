"""The scaled GEMM: checks, the registered operation, and the choice between implementations."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.formats import format_of
from octavo.numerics.granularity import Granularity, parse_granularity
from octavo.numerics.qtensor import QTensor
from octavo.ops.checks import check_tensor, eager_check
from octavo.ops.gemm.backend import Backend, find_backend, returned_dtype
from octavo.ops.gemm.cublaslt import ALIGNMENT, scaled_mm_cublaslt
from octavo.ops.gemm.reference import scaled_mm_reference
from octavo.ops.inductor import operation, register_lowerings

_find_cached = lru_cache(maxsize=4096)(find_backend)


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
    """y = (a.data * a.scale) @ (b.data * b.scale)^T + bias, then + residual.

    Args:
        a, b: [M, K] and [N, K], both contracted over their last axis.
        bias: [N], added before y is rounded to `out_dtype`, if the implementation can.
        residual: [M, N] of `out_dtype`, added after y is rounded. The sum is rounded again: the bits are those of
            y + residual.
        out_dtype: of y. Sums are float32.
        fast_accumulation: let the tensor core keep partial sums at its 14 bits. No effect on emulation, which is
            exact, and on block-scaled GEMMs, which add each block to a float32 sum.
        emulate: allow emulation in float32 on a GPU that has no kernel for these granularities.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        ValueError: the shapes do not match, or the residual has another dtype.
        RuntimeError: the GPU has no kernel, and `emulate` is False.
    """
    _check(a.data, b.data, out_dtype, residual)
    scales = (a.granularity.name, a.scale, b.granularity.name, b.scale)
    y: Tensor = _scaled_mm(a.data, b.data, out_dtype, *scales, bias, residual, fast_accumulation, emulate)
    return y


@eager_check
def _check(a: Tensor, b: Tensor, out_dtype: torch.dtype, residual: Tensor | None) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"need a [M, K] and b [N, K] with the same K, got {list(a.shape)} and {list(b.shape)}")
    check_tensor("residual", residual, (a.shape[0], b.shape[0]), out_dtype)


def _backend(
    a: Tensor, scale_a: Tensor, by_a: Granularity, b: Tensor, scale_b: Tensor, by_b: Granularity
) -> Backend:  # chosen within the operation, so that torch.compile does not trace the choice
    formats, size = (format_of(a.dtype).name, format_of(b.dtype).name), (a.shape[0], b.shape[0])
    e8m0 = scale_a.dtype == torch.float8_e8m0fnu, scale_b.dtype == torch.float8_e8m0fnu
    return _find_cached(a.device, by_a, by_b, formats, size, e8m0=e8m0)


def _inlines(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    granularity_a: str,
    scale_a: Tensor,
    granularity_b: str,
    scale_b: Tensor,
    *rest: Any,
) -> bool:
    """Whether Inductor may inline the GEMM: not emulation, and of those with scales along K only our kernel's launches.

    The fake implementation of cuBLASLt's in torch 2.11 refuses the scales that the GEMMs need.
    """
    by_a, by_b = parse_granularity(granularity_a), parse_granularity(granularity_b)
    backend = _backend(a, scale_a, by_a, b, scale_b, by_b).name
    if backend == "triton" and not by_a.outer:
        return scale_a.dtype == torch.float32 and a.shape[1] % ALIGNMENT == 0
    return backend not in ("emulated", "none") and by_a.outer


@operation("scaled_mm", _inlines)
def _scaled_mm(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    granularity_a: str,
    scale_a: Tensor,
    granularity_b: str,
    scale_b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    fast_accumulation: bool,
    emulate: bool,
) -> Tensor:
    by_a, by_b = parse_granularity(granularity_a), parse_granularity(granularity_b)
    found = _backend(a, scale_a, by_a, b, scale_b, by_b)
    backend = found.name
    if backend == "none" and not emulate:
        raise RuntimeError(
            f"no FP8 GEMM here: {found.reason}. Choose another recipe (`octavo doctor` lists what runs), "
            "or pass emulate=True to compute it slowly in float32"
        )
    if backend == "triton":
        from octavo.ops.gemm import block_scaled_kernel, kernel

        added = None if residual is None else residual.contiguous()
        if not by_a.outer:
            return block_scaled_kernel.scaled_mm(a, scale_a, by_a, b, scale_b, by_b, bias, out_dtype, added)
        return kernel.scaled_mm(a, scale_a, b, scale_b, bias, out_dtype, fast_accumulation, residual=added)
    if backend in ("emulated", "none"):
        y = scaled_mm_reference(a, scale_a, by_a, b, scale_b, by_b)
        y = (y if bias is None else y.add_(bias)).to(out_dtype)
    elif backend == "dequantized":
        from octavo.ops.gemm import block_scaled_kernel

        y = block_scaled_kernel.dequantized_mm(a, scale_a, by_a, b, scale_b, by_b, bias, out_dtype)
    else:
        dtype = returned_dtype(backend, by_a, out_dtype)
        y = scaled_mm_cublaslt(a, scale_a, by_a, b, scale_b, by_b, bias, dtype, fast_accumulation).to(out_dtype)
    return y if residual is None else y + residual


@_scaled_mm.register_fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype, *rest: Any) -> Tensor:
    register_lowerings()  # a graph with operations of ours is being traced: each has a GEMM
    *_, residual, _fast_accumulation, _emulate = rest
    _check(a, b, out_dtype, residual)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
