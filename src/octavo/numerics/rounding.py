"""The random numbers of stochastic rounding, which every implementation can reproduce.

The noise of element i is a hash of (seed, i). It has no state and no order, so any implementation, on a CPU or a GPU,
gives the same bytes. The hash is a 32-bit xor-shift-multiply mix, applied once to the seed and once to the index, of
which it takes the lower 32 bits. Its constants come from Wellons' search for low bias ("hash-prospector", lowbias32).
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def uniform_noise(shape: torch.Size | tuple[int, ...], seed: Tensor) -> Tensor:
    """float32 noise in [0, 1), in multiples of 2^-24: a function of `seed` (int64, 0-dim) and the element's index."""
    count = int(torch.Size(shape).numel())
    index = torch.arange(count, device=seed.device)
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
