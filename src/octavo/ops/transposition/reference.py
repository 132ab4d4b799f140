"""The byte transpose in plain PyTorch.

Dividing a row by a power of two changes the exponents of its numbers only. A result below the smallest normal number is
rounded, once, to nearest even.
"""

import torch
from torch import Tensor

from octavo.numerics.codec import widen


def transpose_reference(data: Tensor, shift: Tensor | None) -> Tensor:
    """The transpose of `data` [M, K], row m divided by 2^shift[m] first."""
    if shift is not None:
        factor = torch.exp2(-shift.clamp(max=100).float()).unsqueeze(1)  # 2^-100 of any number here is zero
        data = (widen(data) * factor).to(data.dtype)  # exact in float32, then rounded once
    return data.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(data.dtype)
