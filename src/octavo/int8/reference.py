"""The INT8 GEMM in plain PyTorch. Every implementation must equal it, byte for byte.

    y[M,N] = float32(sum over k of a[M,K] * b[N,K]) * s_a[M] * s_b[N]

The sums are exact integers: float64 holds every integer up to 2^53. They are rounded to float32 once, and each of the
two products is rounded once.
"""

import torch
from torch import Tensor


def int8_mm_reference(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """y float32 [M, N] from a [M, K] and b [N, K], both int8, and their scales [M, 1] and [N, 1]."""
    with torch.autocast(a.device.type, enabled=False):
        sums = a.double() @ b.double().t()  # [M,K] @ [N,K]^T
    return sums.float() * scale_a * scale_b.t()
