"""The byte transpose in plain PyTorch.

Multiplying a row by a power of two moves the exponents of its bytes and nothing else; only what falls below the
smallest normal is rounded again (to nearest even), once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.numerics.codec import cast, widen
from octavo.numerics.formats import format_of


def transpose(data: Tensor, shift: Tensor | None) -> Tensor:
    """The transpose of `data` [M, K], row m divided by 2^shift[m] first."""
    if shift is not None:
        factor = torch.exp2(-shift.clamp(max=126).float()).unsqueeze(1)  # 2^-126 of 57,344 is zero in any format
        data = cast(widen(data) * factor, format_of(data.dtype))
    return data.view(torch.uint8).t().contiguous().view(data.dtype)
