"""Checks of the numbers in tensors, on the device of the tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor


def is_finite(tensor: Tensor) -> Tensor:
    """Whether a tensor holds neither inf nor NaN: bool, of no dimension, on its device."""
    if tensor.dtype == torch.float8_e4m3fn:  # no inf in this format, and one NaN of either sign
        return (tensor.view(torch.uint8) & 0x7F).max() < 0x7F
    least, largest = torch.aminmax(tensor)  # several times as fast as `isfinite`, and without a copy
    return least.isfinite() & largest.isfinite()


def failing(checks: Mapping[str, Tensor]) -> list[str]:
    """The names of the checks that are False. The host waits once for the device, which has all of them."""
    results = torch.stack([*checks.values()]).tolist() if checks else []
    return [name for name, holds in zip(checks, results, strict=True) if not holds]
