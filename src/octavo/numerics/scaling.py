"""From amax to scale: how far a block must shrink to fit its format.

    scale = amax / max(format)          x ≈ x_q * scale

Dynamic scaling takes the amax of the very tensor it scales. Delayed scaling takes it from the history of earlier
steps, so that one pass over the tensor is enough; what grew since then saturates. Rules over a history of L steps:
its max, the most recent entry, an exponential mean, or a percentile. `margin` leaves 2^margin of headroom, `interval`
holds a scale for so many steps.

Source of delayed scaling: Micikevicius et al. (arXiv:2209.05433) and Transformer Engine's user guide. Three choices of
ours:

- The only absolute floor is the smallest normal float32, 2^-126: it keeps 1/scale finite, gives all-zero blocks zero
  bytes and a scale that no other can fall below, and leaves gradients of 1e-10 their relative error.
- A block that holds inf or NaN gets the scale NaN: whatever is computed from it is NaN, never a plausible 448.
- A single huge outlier takes the whole range of its block: with e4m3, elements 2^-19 of it and smaller become zero.
  That is why finer blocks exist; a percentile rule instead lets the outlier saturate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.numerics.formats import Format

SMALLEST_SCALE = 2.0**-126
RULES = ("max", "most_recent", "ema", "percentile")


def scale_from_amax(amax: Tensor, fmt: Format, *, power_of_two: bool = False, relative_floor: float = 0.0) -> Tensor:
    """The float32 scale that maps `amax` onto the largest number of `fmt`; NaN where amax is not finite.

    Args:
        amax: float tensor, any shape.
        power_of_two: round the scale up to a power of two.
        relative_floor: no scale is less than this part of the largest one in the tensor.
    """
    largest = torch.full_like(amax, fmt.max, dtype=torch.float32)  # by a Python number a GPU would not divide exactly
    scale = (amax / largest).clamp(min=SMALLEST_SCALE)
    if relative_floor and scale.numel():
        scale = torch.maximum(scale, scale.nan_to_num(0, 0).amax() * relative_floor)
    if power_of_two:
        scale = ceil_power_of_two(scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def ceil_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is at least `x` (positive normal float32): the mantissa's bits carry over."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def split_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """m in [1, 2) (float32) and e (int32) with scale = m * 2^e, for positive normal float32 scales, from their bits."""
    bits = scale.view(torch.int32)
    return ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32), (bits >> 23) - 127


@dataclass(frozen=True)
class History:
    """Delayed scaling: which amax the next step's scale comes from.

    Args:
        length: steps remembered.
        rule: "max", "most_recent", "ema" (weights `beta`^age, newest first) or "percentile".
        percentile: of the remembered amax values, for that rule.
        beta: decay of the exponential mean.
        margin: amax is taken 2^margin larger than it was.
        interval: a scale is held for so many steps.
    """

    length: int = 1024
    rule: str = "max"
    percentile: float = 99.99
    beta: float = 0.9
    margin: float = 0.0
    interval: int = 1

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown history rule {self.rule!r}: choose one of {', '.join(RULES)}")
        if self.length < 1 or self.interval < 1:
            raise ValueError(f"length and interval must be at least 1, got {self.length} and {self.interval}")
        if not 0 < self.percentile <= 100 or not 0 <= self.beta < 1:
            raise ValueError(f"need 0 < percentile <= 100 and 0 <= beta < 1, got {self.percentile} and {self.beta}")

    def amax(self, recent: Tensor) -> Tensor:
        """The amax to scale by (0-dim float32) from the remembered ones, `recent` [n], newest first."""
        if self.rule == "max":
            chosen = recent.amax()
        elif self.rule == "most_recent":
            chosen = recent[0]
        elif self.rule == "ema":
            weight = self.beta ** torch.arange(recent.numel(), device=recent.device, dtype=torch.float32)
            chosen = (recent * weight).sum() / weight.sum()
        else:
            chosen = torch.quantile(recent, self.percentile / 100)
        return chosen.mul(2.0**self.margin)
