"""Hadamard rotation: spread an outlier over its neighbours before quantizing.

H is the Walsh-Hadamard matrix over sqrt(n): orthogonal, symmetric, its own inverse. Both operands of a GEMM rotated
along the reduction leave the product as it was,

    (x H)(w H)^T = x H H w^T = x w^T,

while an outlier in one channel of x becomes n values of 1/sqrt(n) its size. A size n that is no power of two takes the
block-diagonal matrix of the largest power of two that divides it (an odd n: no rotation).

Source: Ashkboos et al., "QuaRot" (arXiv:2404.00456); the fast transform is Fino and Algazi's (1976).
"""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """`x` rotated along its last dimension, same shape and dtype, in n log2 n additions; differentiable."""
    n = x.shape[-1]
    size = max(n & -n, 1)  # the largest power of two that divides n
    y = x.reshape(-1, size)
    half = 1
    while half < size:
        a, b = y.view(-1, size // (2 * half), 2, half).unbind(2)
        y = torch.stack((a + b, a - b), dim=2).view(-1, size)
        half *= 2
    return y.mul(size**-0.5).view(x.shape)
