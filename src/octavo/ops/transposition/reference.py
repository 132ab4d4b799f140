"""The byte transpose in plain PyTorch.

Dividing a row by a power of two changes the exponents of its numbers only. A result below the smallest normal number is
rounded, once, to nearest even.
"""

import torch
from torch import Tensor

from octavo.numerics.codec import widen


def transpose_reference(data: Tensor, shift: Tensor | None, place: Tensor | None = None) -> Tensor:
    """The transpose of `data` [M, K], row m divided by 2^shift[m] first; with `place`, of its rows at their places."""
    if shift is not None:
        factor = torch.exp2(-shift.clamp(max=100).float()).unsqueeze(1)  # 2^-100 of any number here is zero
        data = (widen(data) * factor).to(data.dtype)  # exact in float32, then rounded once
    if place is not None:
        rows = data.view(torch.uint8)[place.clamp(min=0)] if len(data) else data.new_zeros(len(place), data.shape[1])
        data = torch.where(place[:, None] < 0, 0, rows.view(torch.uint8)).view(data.dtype)
    return data.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(data.dtype)
