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
    """`x` rotated along its last dimension, same shape and dtype, in n log2 n additions; differentiable.

    Each addition rounds to the dtype of x. `octavo.ops.rotate` rounds once.
    """
    y = _by_bits(x)
    for bit in range(1, y.ndim):
        y = _butterflies(y, -bit)
    return y.mul(block_size(x.shape[-1]) ** -0.5).view(x.shape)


def block_size(n: int) -> int:
    """The size of a block of the rotation of n numbers: the largest power of two that divides n."""
    return max(n & -n, 1)


def scattered_signs(n: int, device: torch.device) -> Tensor:
    """+1 and -1 without a pattern, float32 [n], the same in each call: a bit of a hash of the index.

    A rotation puts the sum of a vector into one number. Where a product lives from that sum, its error would be that of
    one pair of numbers, instead of the mean over many. With these signs the sum spreads too, and in a product of two
    vectors with the same signs they cancel. The hash is a part of MurmurHash3.
    """
    h = torch.arange(n, dtype=torch.int64, device=device)
    for multiplier, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        h = ((h ^ (h >> shift)) * multiplier) & 0x7FFFFFFF  # 31 bits, so that no product overflows
    return ((h >> 16) & 1).float() * 2 - 1


def _by_bits(x: Tensor) -> Tensor:
    """`x` with a dimension of two for each bit of the position in a block.

    One shape serves all stages: views between them would nest their indices in compiled code, which then takes minutes.
    """
    return x.reshape(-1, *[2] * (block_size(x.shape[-1]).bit_length() - 1))


def _butterflies(y: Tensor, dim: int) -> Tensor:
    """(a + b, a - b) for all pairs a, b along a dimension of two."""
    a, b = y.unbind(dim)
    return torch.stack((a + b, a - b), dim)
