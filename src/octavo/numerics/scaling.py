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

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.numerics.formats import E2M1, E4M3, Format

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
    """The float32 scales that map `amax`, of any shape, onto the largest number of `fmt`; NaN where it is not finite.

    Args:
        power_of_two: round the scales up to powers of two.
        relative_floor: the smallest scale allowed, as a fraction of the largest in the tensor.
        largest_scale: the largest in the tensor, before rounding to a power of two, where `amax` is of a part of it.
    """
    largest = torch.full_like(amax, fmt.max, dtype=torch.float32)  # a GPU's division by a Python number is not exact
    divide = quotient if fmt is E2M1 else torch.div  # compiled code computes the scales of E2M1 too
    scale = divide(amax, largest).clamp(min=SMALLEST_SCALE)
    if relative_floor and scale.numel():
        largest_scale = scale.nan_to_num(0, 0, 0).amax() if largest_scale is None else largest_scale  # of the finite
        scale = torch.maximum(scale, largest_scale * relative_floor)
    if power_of_two:
        scale = ceil_power_of_two(scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def floor_scale(amax: Tensor, fmt: Format) -> Tensor:
    """The float32 scales of MX for `amax`, of any shape: 2^(floor(log2 amax) - floor(log2 max)), NaN where not finite.

    With E2M1, whose max is 6, the largest number of a block is divided to 4 to 8, and saturates above 6. Source: OCP
    Microscaling Formats v1.0, section 6.3.
    """
    power = (amax.float().view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = (power * 2.0 ** -math.floor(math.log2(fmt.max))).clamp(min=SMALLEST_SCALE)
    return torch.where(amax.isfinite(), scale, torch.nan)


def two_level_scale(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """The scales of NVFP4 for the `amax` of all blocks of a tensor: E4M3 numbers of its shape, and a float32 divisor.

    The scale of a block is its number over the divisor, 448 * 6 / (the amax of the tensor), which gives the largest
    block the largest number of E4M3. Bytes and divisor are those of compressed-tensors: it stores 0.125 for a block so
    small that its number would be 0, of which all elements become 0.
    """
    largest = amax.nan_to_num(0, 0, 0).amax() if amax.numel() else amax.new_zeros(())
    inverse = quotient(torch.ones_like(largest), largest.clamp(min=SMALLEST_SCALE))
    divisor = (inverse * (E4M3.max * fmt.max)).nan_to_num(posinf=1.0)
    number = torch.where(amax.isfinite(), quotient(amax, torch.full_like(amax, fmt.max)) * divisor, torch.nan)
    stored = number.clamp(max=E4M3.max).to(E4M3.dtype).float()
    return torch.where(stored == 0, 0.125, stored).to(E4M3.dtype), divisor


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
        margin: the amax is multiplied by 2^margin, -64 to 64. 1 leaves room for tensors that grow.
        interval: the number of steps for which a scale is held.

    Raises:
        ValueError: an unknown rule, or a number outside its range.
    """

    length: int = 1024
    rule: str = "max"
    percentile: float = 99.99
    beta: float = 0.9
    margin: float = 1.0
    interval: int = 1

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown history rule {self.rule!r}: choose one of {', '.join(RULES)}")
        if self.length < 1 or self.interval < 1 or self.length % 1 or self.interval % 1:
            raise ValueError(f"length and interval are integers, at least 1, got {self.length} and {self.interval}")
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


# ---- The random numbers of stochastic rounding, which every implementation can reproduce.
#
# The noise of element i is a hash of (seed, i). It has no state and no order, so any implementation, on a CPU or a GPU,
# gives the same bytes. The hash is a 32-bit xor-shift-multiply mix, applied once to the seed and once to the index, of
# which it takes the lower 32 bits. Its constants come from Wellons' search for low bias ("hash-prospector", lowbias32).


_MASK = 0xFFFFFFFF


def uniform_noise(shape: torch.Size | tuple[int, ...], seed: Tensor) -> Tensor:
    """float32 noise in [0, 1), in multiples of 2^-24: a function of `seed` (int64, 0-dim) and the element's index."""
    index = torch.arange(int(torch.Size(shape).numel()), device=seed.device)
    low, high = seed & _MASK, (seed >> 32) & _MASK
    bits = _mix((index & _MASK) ^ _mix(low ^ _mix(high)))
    return ((bits >> 8).float() * 2.0**-24).view(shape)


def new_seed(device: torch.device) -> Tensor:
    """A seed (int64, 0-dim) from torch's default generator, which torch.manual_seed and checkpoints set."""
    return torch.randint(2**62, (), device=device)


def _mix(h: Tensor) -> Tensor:
    """The 32-bit mix, on int64 tensors that hold values below 2^32."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


# ---- Hadamard rotation: spreads an outlier over its neighbours before quantization.
#
# H is the Walsh-Hadamard matrix divided by sqrt(n): orthogonal, symmetric, and its own inverse. Rotating both operands
# of a GEMM along the reduction does not change the product,
#
#     (x H)(w H)^T = x H H w^T = x w^T,
#
# but an outlier in one channel of x becomes n values of 1/sqrt(n) its size. If n is not a power of two, H is
# block-diagonal, with blocks of the largest power of two that divides n (for an odd n, there is no rotation).
#
# Source: Ashkboos et al., "QuaRot" (arXiv:2404.00456); the fast transform is Fino and Algazi's (1976).


def hadamard(x: Tensor) -> Tensor:
    """`x` rotated along its last dimension, same shape and dtype, in n log2 n additions; differentiable.

    Each addition rounds to the dtype of x. `octavo.ops.rotate` rounds once.
    """
    # A dimension of two for each bit of the position in a block. One shape serves all stages: views between them would
    # nest their indices in compiled code, which then takes minutes.
    y = x.reshape(-1, *[2] * (block_size(x.shape[-1]).bit_length() - 1))
    for bit in range(1, y.ndim):
        a, b = y.unbind(-bit)
        y = torch.stack((a + b, a - b), -bit)
    return y.mul(block_size(x.shape[-1]) ** -0.5).view(x.shape)


def block_size(n: int) -> int:
    """The size of a block of the rotation of n numbers: the largest power of two that divides n."""
    return max(n & -n, 1)


def scattered_signs(n: int, device: torch.device) -> Tensor:
    """+1 and -1 without a pattern, float32 [n], the same in each call: a bit of a hash of the index.

    A rotation puts the sum of a vector into one number. Where a product lives from that sum, its error would be that of
    one pair of numbers, instead of the mean over many. With these signs the sum spreads too, and in a product of two
    vectors with the same signs they cancel. The hash is a part of MurmurHash3.
    """
    h = torch.arange(n, dtype=torch.int64, device=device)
    for multiplier, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        h = ((h ^ (h >> shift)) * multiplier) & 0x7FFFFFFF  # 31 bits, so that no product overflows
    return ((h >> 16) & 1).float() * 2 - 1
