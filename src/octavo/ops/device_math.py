"""Device functions of the Triton kernels: amax, scale and cast, each step rounded as the twins round it.

An amax is taken over the bits of |x| as integers: their order is that of the numbers, with inf and every NaN on top, so
that a block which holds one is known by its amax.
"""

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(2.0**-126)
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """The bits of the largest |x| along `axis`, int32."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)


@triton.jit
def ceil_power_of_two(x):
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scale_from_amax(bits, largest, POWER_OF_TWO: tl.constexpr):
    """The float32 scale that maps an amax, given by its bits, onto `largest`; NaN where it is not finite."""
    scale = tl.maximum(tl.div_rn(bits.to(tl.float32, bitcast=True), largest), SMALLEST_SCALE)
    if POWER_OF_TWO:
        scale = ceil_power_of_two(scale)
    nan = tl.full(bits.shape, NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(bits < INFINITY_BITS, scale, nan)


@triton.jit
def inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def store_scale(pointer, scale, mask, E8M0: tl.constexpr):
    """Store scales as float32, or a power of two as its exponent's byte."""
    if E8M0:
        tl.store(pointer, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask)
    else:
        tl.store(pointer, scale, mask)


@triton.jit
def add(x, y):
    """x + y, rounded by itself: never contracted with a product. (libdevice's add_rn would flush subnormals.)"""
    return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_neighbours(x):
    """[R, C] -> [R, C / 2], each column with the one to its right."""
    left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return add(left, right)


@triton.jit
def row_sum(x):
    """float64 sums of the rows of a float32 tile: neighbours added three times in float32, their sums in float64."""
    eighths = add_neighbours(add_neighbours(add_neighbours(x)))
    return tl.sum(eighths.to(tl.float64), 1)
