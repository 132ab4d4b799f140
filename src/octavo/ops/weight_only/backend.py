"""The choice of the implementation that a weight-only GEMM runs on.

    triton        the weight is widened inside our kernel, which reads one byte an element: a small M, from Ampere (8.0)
    dequantized   the weight is widened to a tensor of x's dtype, and PyTorch's product runs: a large M, every GPU
    emulated      the reference, in float32: a CPU

Every GPU has a path, because none of them computes with eight-bit operands.
"""

import torch

from octavo.numerics.granularity import Granularity
from octavo.ops.gemm import Backend
from octavo.ops.gpu_architecture import Place
from octavo.ops.triton_support import has_kernels

MAX_FASTER_M = 16  # up to it, each GEMM of Llama-3-8B was faster than BF16's on an H200 (docs/performance.md)
MAX_M = 256  # above it, widening the weight once costs less than the tensor cores lose in our kernel
LOWEST = (8, 0)  # Ampere: the first with BF16 on tensor cores, and the first that Triton supports
_HALVES = (torch.bfloat16, torch.float16)
_GROUPS = (None, 32, 64, 128)  # elements along K that share a scale; None for all


def find_weight_only_backend(device: Place, dtype: torch.dtype, granularity: Granularity, m: int) -> Backend:
    """The implementation that `device` has for an input [m, K] of `dtype` and a weight of this granularity."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return Backend("emulated", f"{device.type}: exact, in float32")
    if not has_kernels(device, LOWEST):
        return Backend("dequantized", "Triton kernels need an NVIDIA GPU from Ampere (8.0)")
    if dtype not in _HALVES:
        return Backend("dequantized", f"the kernel takes bfloat16 and float16, the input is {dtype}")
    if granularity.cols not in _GROUPS:
        return Backend("dequantized", f"the kernel takes no {granularity.name} scales")
    if m > MAX_M:
        return Backend("dequantized", f"more than {MAX_M} rows of x")
    return Backend("triton", "E4M3 weight, widened in the kernel")
