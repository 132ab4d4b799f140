"""The byte transpose in plain PyTorch.

Multiplying a row by a power of two moves the exponents of its bytes and nothing else; only what falls below the
smallest normal is rounded again (to nearest even), once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.numerics.codec import widen


def transpose(data: Tensor, shift: Tensor | None) -> Tensor:
    """The transpose of `data` [M, K], row m divided by 2^shift[m] first."""
    if shift is not None:
        factor = torch.exp2(-shift.clamp(max=100).float()).unsqueeze(1)  # 2^-100 of any number here is zero
        data = (widen(data) * factor).to(data.dtype)  # exact in float32, then rounded once
    return data.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(data.dtype)
