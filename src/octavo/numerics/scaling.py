"""Scales from amax values: a block is divided by its scale to fit the range of the format.

    scale = amax / max(format)          x ≈ x_q * scale

Dynamic scaling takes the amax of the tensor that it scales. Delayed scaling takes it from a history of earlier steps.
One pass over the tensor is then enough, and numbers that have grown beyond that amax saturate. The rule over a history
of L steps is its max, the most recent entry, an exponential mean, or a percentile. `margin` leaves 2^margin of
headroom, and `interval` is the number of steps for which a scale is held.

Source of delayed scaling: Micikevicius et al. (arXiv:2209.05433) and Transformer Engine's user guide.

Three properties of the scales here:

- The only absolute floor is the smallest normal float32, 2^-126. It keeps 1/scale finite, and gradients of 1e-10 keep
  their relative error. All-zero blocks get this smallest scale, and zero bytes.
- A block that holds inf or NaN gets the scale NaN. All that is computed from it is then NaN, and not a plausible 448.
- A single huge outlier takes the whole range of its block: with e4m3, elements of 2^-19 of it and smaller become zero.
  Finer blocks limit the loss; a percentile rule lets the outlier saturate instead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.numerics.formats import Format

SMALLEST_SCALE = 2.0**-126
RULES = ("max", "most_recent", "ema", "percentile")


def scale_from_amax(
    amax: Tensor,
    fmt: Format,
    *,
    power_of_two: bool = False,
    relative_floor: float = 0.0,
    largest_scale: Tensor | None = None,
) -> Tensor:
    """The float32 scales that map `amax` onto the largest number of `fmt`; NaN for an amax that is not finite.

    Args:
        amax: float tensor, any shape.
        power_of_two: round the scales up to powers of two.
        relative_floor: the smallest scale allowed, as a fraction of the largest in the tensor.
        largest_scale: the largest in the tensor, before rounding to a power of two, where `amax` is of a part of it.
    """
    largest = torch.full_like(amax, fmt.max, dtype=torch.float32)  # a GPU's division by a Python number is not exact
    scale = (amax / largest).clamp(min=SMALLEST_SCALE)
    if relative_floor and scale.numel():
        largest_scale = _largest_finite(scale) if largest_scale is None else largest_scale
        scale = torch.maximum(scale, largest_scale * relative_floor)
    if power_of_two:
        scale = ceil_power_of_two(scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def _largest_finite(scale: Tensor) -> Tensor:
    return scale.nan_to_num(0, 0, 0).amax()


def ceil_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is at least `x`, positive normal float32: the mantissa carries over."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def scale_mantissa(scale: Tensor) -> Tensor:
    """m in [1, 2), float32, of scale = m * 2^e, for positive normal float32 scales, from their bits."""
    return ((scale.view(torch.int32) & 0x7FFFFF) | 0x3F800000).view(torch.float32)


def scale_exponent(scale: Tensor) -> Tensor:
    """e, int32, of scale = m * 2^e, for positive normal float32 scales, from their bits."""
    return (scale.view(torch.int32) >> 23) - 127


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b of float32 numbers, rounded once. Inductor's float32 division on a GPU is not exactly rounded."""
    return (a.double() / b.double()).float()  # the second rounding changes nothing: 53 bits are at least 2 * 24 + 2


@dataclass(frozen=True)
class History:
    """Delayed scaling: how the amax for the next step's scale is chosen from those of earlier steps.

    Args:
        length: the number of steps in the history.
        rule: "max", "most_recent", "ema" (an exponential mean with weights `beta`^age) or "percentile".
        percentile: of the amax values, 0 to 100, for that rule.
        beta: the decay of the exponential mean, 0 to 1.
        margin: the amax is multiplied by 2^margin, -64 to 64.
        interval: the number of steps for which a scale is held.

    Raises:
        ValueError: an unknown rule, or a number outside its range.
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
        if not -64 <= self.margin <= 64:
            raise ValueError(f"margin is a power of two from -64 to 64, got {self.margin}")

    def amax(self, recent: Tensor, count: Tensor | int) -> Tensor:
        """The amax for the next scale, float32 [...], from each history of `recent` [..., length], newest first.

        Args:
            count: the entries that are there, at least 1: a number, or [..., 1] integers. The others are 0.
        """
        age = torch.arange(recent.shape[-1], device=recent.device)
        if self.rule == "max":
            chosen = recent.amax(-1)
        elif self.rule == "most_recent":
            chosen = recent[..., 0]
        elif self.rule == "ema":
            weight = torch.where(age < count, self.beta ** age.float(), 0.0)
            chosen = (recent * weight).sum(-1) / weight.sum(-1)
        else:
            chosen = torch.nanquantile(torch.where(age < count, recent, torch.nan), self.percentile / 100, -1)
        return chosen.mul(2.0**self.margin)
