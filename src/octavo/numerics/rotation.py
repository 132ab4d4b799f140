"""Hadamard rotation: spreads an outlier over its neighbours before quantization.

H is the Walsh-Hadamard matrix divided by sqrt(n): orthogonal, symmetric, and its own inverse. Rotating both operands of
a GEMM along the reduction does not change the product,

    (x H)(w H)^T = x H H w^T = x w^T,

but an outlier in one channel of x becomes n values of 1/sqrt(n) its size. If n is not a power of two, H is
block-diagonal, with blocks of the largest power of two that divides n (for an odd n, there is no rotation).

Source: Ashkboos et al., "QuaRot" (arXiv:2404.00456); the fast transform is Fino and Algazi's (1976).
"""

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
