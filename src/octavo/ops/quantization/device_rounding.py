"""Device functions that round to an eight-bit dtype: to nearest, or stochastically with the bytes of the reference.

The noise n / 2^24 of an element is the hash of `octavo.numerics.rounding`. The result for a magnitude a is
a + n / 2^24 * spacing, rounded down to a number of the format.

To round down is to add a power of two whose last bit is worth one spacing (`grid_shift`), toward zero, and to subtract
it again. The noise is added toward zero too. A sum that is rounded toward zero never passes a number of the format, so
both sums lead to the number that exact sums would lead to.
"""

import triton
import triton.language as tl

from octavo.ops.device_math import grid_shift, to_data, with_sign


@triton.jit
def round_to_data(x, dtype: tl.constexpr, index, seed_ptr):
    """float32 `x`, divided by its scale, as numbers of `dtype`, an eight-bit one.

    Rounded to nearest without a seed (None). With one rounded stochastically, for E4M3 and E5M2: `index` (int64) is
    that of each element in the data. The conversion saturates.
    """
    if seed_ptr is not None:
        x = _stochastic(x, _noise(index, seed_ptr), dtype)
    return to_data(x, dtype)


@triton.jit
def _stochastic(x, noise, dtype: tl.constexpr):
    """float32 `x`, rounded to numbers of `dtype` by 2^8 * n (float32)."""
    magnitude = tl.abs(x)
    shift = grid_shift(magnitude, dtype)
    sum_of_both = _fma_toward_zero(noise, shift * 2.0**-55, magnitude)  # the spacing is shift * 2^-23
    return with_sign(_add_toward_zero(sum_of_both, shift) - shift, x)


@triton.jit
def _noise(index, seed_ptr):
    """2^8 * n as float32: the upper 24 bits of the hash of the seed (int64) and each index (int64)."""
    seed = tl.load(seed_ptr)
    seed = _mix(seed.to(tl.uint32) ^ _mix((seed >> 32).to(tl.uint32)))
    return (_mix(index.to(tl.uint32) ^ seed) & 0xFFFFFF00).to(tl.float32)


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _add_toward_zero(x, y):
    return tl.inline_asm_elementwise("add.rz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fma_toward_zero(x, y, z):
    """x * y + z, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=tl.float32, is_pure=True, pack=1
    )
