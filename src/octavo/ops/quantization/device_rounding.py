"""Device functions that round to an eight-bit dtype: to nearest, or stochastically with the bytes of the reference.

The noise n / 2^24 of an element is the hash of `octavo.numerics.rounding`. A number of magnitude a, 2^e <= a < 2^(e+1),
lies on a grid of the spacing 2^(e - m), m the bits of the mantissa; the subnormal numbers have the grid of the smallest
normal one. The code is that of a + n / 2^24 * spacing, rounded down to the grid.

To round down is to add 2^(e - m + 23), whose last bit is worth one spacing, toward zero, and to subtract it again. The
noise is added toward zero too. A sum that is rounded toward zero never passes a number of the grid, so both sums lead
to the number of the grid that exact sums would lead to.
"""

import triton
import triton.language as tl

from octavo.ops.device_math import to_data as to_nearest


@triton.jit
def to_data(x, dtype: tl.constexpr, index, seed_ptr):
    """float32 `x`, divided by its scale, as numbers of `dtype`, an eight-bit one.

    Rounded to nearest without a seed (None). With one rounded stochastically, for E4M3 and E5M2: `index` (int64) is
    that of each element in the data. The conversion saturates.
    """
    if seed_ptr is not None:
        x = _stochastic(x, _noise(index, seed_ptr), dtype)
    return to_nearest(x, dtype)


@triton.jit
def _stochastic(x, noise, dtype: tl.constexpr):
    """float32 `x`, rounded to numbers of `dtype` by 2^8 * n (float32)."""
    MANTISSA_BITS: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
    SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if dtype == tl.float8e4nv else 2.0**-14
    magnitude = tl.abs(x)
    normal = tl.maximum(magnitude, SMALLEST_NORMAL)
    power = (normal.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^e
    sum_of_both = _fma_toward_zero(noise, power * 2.0 ** (-32 - MANTISSA_BITS), magnitude)
    shift = power * 2.0 ** (23 - MANTISSA_BITS)
    rounded = _add_toward_zero(sum_of_both, shift) - shift
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


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
