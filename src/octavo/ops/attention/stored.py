"""The numbers that a cache of keys and values stores, and their conversion from and to float32.

A stored number is x * (1 / scale), rounded to nearest even and saturated. INT8 is symmetric, -127 to 127.
"""

import torch
from torch import Tensor

from octavo.numerics.codec import cast, widen
from octavo.numerics.formats import E4M3

LARGEST = {torch.float8_e4m3fn: E4M3.max, torch.int8: 127.0}  # the largest stored number, of dtypes with a scale
ROUNDS_TO_LARGEST = {torch.float8_e4m3fn: 464.0, torch.int8: 127.5}  # larger numbers are counted as saturated


def limits_of(dtype: torch.dtype) -> tuple[float, float]:
    """The largest number stored in `dtype`, and the largest that rounds to it; zeros for a dtype without a scale."""
    return LARGEST.get(dtype, 0.0), ROUNDS_TO_LARGEST.get(dtype, 0.0)


def to_stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert x [B, G, T, D] to the dtype of a cache.

    NaN stays NaN in E4M3. INT8 has no NaN: it becomes 0.

    Args:
        scale: [G], one for each head of keys; None for a dtype without scales.

    Returns:
        The stored numbers, and how many of them saturated or were NaN (int64, no dimension).
    """
    if scale is None:
        return x.to(dtype), torch.zeros((), dtype=torch.int64, device=x.device)
    y = x.float() * (1 / scale).view(-1, 1, 1)
    lost = (~(y.abs() <= ROUNDS_TO_LARGEST[dtype])).sum()
    if dtype == torch.int8:
        return y.nan_to_num(0, torch.inf, -torch.inf).clamp(-LARGEST[dtype], LARGEST[dtype]).round().to(dtype), lost
    return cast(y, E4M3), lost


def from_stored(data: Tensor) -> Tensor:
    """The stored numbers as float32, not yet multiplied by their scale."""
    return widen(data) if data.dtype == torch.float8_e4m3fn else data.float()


def widened(data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored keys or values [B, G, S, D], multiplied by their scale [G], as numbers of `dtype`."""
    return data.to(dtype) if scale is None else data.float().mul_(scale.view(-1, 1, 1)).to(dtype)
