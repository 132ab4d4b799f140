"""The weight-only GEMM in plain PyTorch, exact but for the order of its float32 sums.

The product of an E4M3 and a BF16 or FP16 number has at most 15 significant bits, which float32 holds exactly. A scale
that is constant along the reduction multiplies the sum. Other scales multiply the weight before the product.
"""

import torch
from torch import Tensor

from octavo.numerics.codec import widen
from octavo.numerics.granularity import Granularity


def weight_only_reference(x: Tensor, w: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    """x @ (w * scale)^T as float32 [M, N], from x [M, K] and w [N, K]."""
    wide, scale = widen(w), scale.float()
    if not granularity.outer:
        wide.mul_(granularity.expand(scale, tuple(w.shape)))
    with torch.autocast(x.device.type, enabled=False):  # it would run this product in BF16
        y = x.float() @ wide.t()  # [M,K] @ [N,K]^T
    return y * scale.t() if granularity.outer else y
