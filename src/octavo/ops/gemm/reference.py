"""The scaled GEMM in plain PyTorch, exact but for the order of its float32 sums.

The product of two E4M3 or E5M2 numbers has at most eight significant bits. float32 holds it exactly, so only the sums
are rounded. A scale that is constant along the reduction multiplies the result. Other scales multiply the operand
before the product.
"""

import torch
from torch import Tensor

from octavo.numerics.codec import widen
from octavo.numerics.granularity import Granularity


def scaled_mm_reference(
    a: Tensor, scale_a: Tensor, granularity_a: Granularity, b: Tensor, scale_b: Tensor, granularity_b: Granularity
) -> Tensor:
    """(a * scale_a) @ (b * scale_b)^T as float32 [M, N], from a [M, K] and b [N, K]."""
    scale_a, scale_b = scale_a.float(), scale_b.float()
    with torch.autocast(a.device.type, enabled=False):  # it would run this product in BF16
        y = _operand(a, scale_a, granularity_a) @ _operand(b, scale_b, granularity_b).t()  # [M,K] @ [N,K]^T
    if granularity_a.outer:
        y *= scale_a
    if granularity_b.outer and not bool((scale_b == 1).all()):  # they are ones if the scale was folded into a
        y *= scale_b.t()
    return y


def _operand(data: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    wide = widen(data)
    return wide if granularity.outer else wide.mul_(granularity.expand(scale, tuple(data.shape)))
