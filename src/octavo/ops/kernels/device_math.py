"""Device functions of the Triton kernels: amax, scale and sums, each step rounded as in the references.

An amax is the maximum of the bits of |x| as integers. They have the order of the numbers, with inf and every NaN above,
so the amax of a block also tells whether the block holds inf or NaN.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.launching import some_gpu_rounds_twice, starts_early

ROUNDS_TWICE = tl.constexpr(some_gpu_rounds_twice())
STARTS_EARLY = tl.constexpr(starts_early())
SMALLEST_SCALE = tl.constexpr(2.0**-126)
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def wait_for_inputs():
    """Wait until the kernel before has ended. A kernel that calls this, before it reads anything, is started while the
    one before it ends (`octavo.ops.launching.launch`), which hides the time of its launch."""
    if STARTS_EARLY:
        gdc_wait()


@triton.jit
def let_next_start():
    """Let the next kernel start, if it starts early, once all programs of this one have come here."""
    if STARTS_EARLY:
        gdc_launch_dependents()


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, as int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """The bits of the largest |x| along `axis`, as int32."""
    return tl.max(magnitude_bits(x), axis)


@triton.jit
def ceil_power_of_two(x):
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scale_from_amax(bits, largest, POWER_OF_TWO: tl.constexpr):
    """The float32 scale that maps an amax (given as bits) onto `largest`; NaN if the amax is not finite."""
    scale = tl.maximum(tl.div_rn(bits.to(tl.float32, bitcast=True), largest), SMALLEST_SCALE)
    if POWER_OF_TWO:
        scale = ceil_power_of_two(scale)
    nan = tl.full(bits.shape, NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(bits < INFINITY_BITS, scale, nan)


@triton.jit
def mantissa(scale):
    """m in [1, 2) of a positive normal scale, m * 2^e."""
    return ((scale.to(tl.int32, bitcast=True) & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def store_scale(scale_ptr, scale, mask, E8M0: tl.constexpr):
    """Store scales as float32, or with E8M0 as the byte of the exponent."""
    if E8M0:
        tl.store(scale_ptr, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask)
    else:
        tl.store(scale_ptr, scale, mask)


@triton.jit
def add(x, y):
    """x + y, never contracted with a product into one FMA. (libdevice's add_rn would flush subnormals.)"""
    return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_pairs(x):
    """[R, C] -> [R, C / 2]: the sum of each two adjacent columns."""
    left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return add(left, right)


@triton.jit
def row_sum(x):
    """float64 sums of the rows of a float32 tile: groups of 8 are added pairwise in float32, the groups in float64."""
    sums_of_8 = add_pairs(add_pairs(add_pairs(x)))
    return tl.sum(sums_of_8.to(tl.float64), 1)


@triton.jit
def column(x):
    """[R] -> [R, 1], to combine with a tile of R rows; for R = 1 a scalar.

    Triton 3.6 spreads a tile [1, 1] over a long row in each thread: the compilation of a norm took minutes.
    """
    return tl.sum(x, 0) if x.shape[0] == 1 else x[:, None]


@triton.jit
def round_to_integer(y):
    """y, of magnitude up to 2^22, rounded to nearest even; NaN becomes 0. 1.5 * 2^23 + y has no bits for a fraction."""
    shift = tl.full(y.shape, 12582912.0, tl.float32)
    return tl.where(y == y, add(add(y, shift), -shift), 0.0)


@triton.jit
def grid_shift(magnitude, dtype: tl.constexpr):
    """The power of two whose last bit, as float32, is worth the spacing of E4M3 or E5M2 at a magnitude.

    From 2^e to 2^(e+1) the spacing is 2^(e - m), m the bits of the mantissa. The subnormal numbers have the spacing of
    the smallest normal one.
    """
    MANTISSA_BITS: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
    SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if dtype == tl.float8e4nv else 2.0**-14
    power = tl.maximum(magnitude, SMALLEST_NORMAL).to(tl.int32, bitcast=True) & 0x7F800000
    return power.to(tl.float32, bitcast=True) * 2.0 ** (23 - MANTISSA_BITS)


@triton.jit
def with_sign(magnitude, x):
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_data(x, dtype: tl.constexpr):
    """float32 `x`, divided by its scale, as numbers of an eight-bit dtype, rounded to nearest even."""
    if dtype == tl.int8:
        x = round_to_integer(x)
    elif ROUNDS_TWICE:  # rounded here, so that the conversion is exact
        magnitude = tl.abs(x)
        shift = grid_shift(tl.minimum(magnitude, 65536.0), dtype)
        x = with_sign(add(add(magnitude, shift), -shift), x)
    return x.to(dtype)


@triton.jit
def to_stored(y, mask, scale_ptr, clipped_ptr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """float32 y [R, C] / scale as numbers of an eight-bit cache. The count of those beyond LIMIT is added."""
    y = y * inverse(tl.load(scale_ptr + tl.zeros((1,), tl.int32)))[:, None]
    lost = tl.sum(tl.sum((mask & ((tl.abs(y) <= LIMIT) == 0)).to(tl.int32), 1), 0)
    if lost > 0:
        tl.atomic_add(clipped_ptr, lost.to(tl.int64))
    nan = y != y
    y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    return to_data(tl.where(nan, float("nan"), y), dtype)


# ---- E4M3 and E8M0 widened.


# Four bytes s eeee mmm in a register become two registers of two numbers each. A byte moves into the upper half of its
# 16 bits (prmt), and its exponent and mantissa to the place that they have in the wider format. The result is the
# number times a power of two, subnormals included, and the last instruction takes this power out. The code of NaN, all
# ones, is the only one that carries into the next bit when one is added; then the exponent is filled up.
# They are one line each: Inductor writes kernels into a file, and a line break within a string ends it there.
_WIDEN_BF16 = tl.constexpr(
    "{ .reg .b32 b, m, t, two, zero; mov.b32 two, 0x7B807B80; mov.b32 zero, 0x80008000; "
    "prmt.b32 b, 0, $2, 0x5040; and.b32 m, b, 0x7F007F00; shr.b32 m, m, 4; add.u32 t, m, 0x00100010; "
    "and.b32 t, t, 0x08000800; mad.lo.u32 m, t, 15, m; lop3.b32 m, b, 0x80008000, m, 0xEA; "
    "fma.rn.bf16x2 $0, m, two, zero; "
    "prmt.b32 b, 0, $2, 0x7060; and.b32 m, b, 0x7F007F00; shr.b32 m, m, 4; add.u32 t, m, 0x00100010; "
    "and.b32 t, t, 0x08000800; mad.lo.u32 m, t, 15, m; lop3.b32 m, b, 0x80008000, m, 0xEA; "
    "fma.rn.bf16x2 $1, m, two, zero; }"
)
WIDEN_FP16 = tl.constexpr(
    "{ .reg .b32 b, m, t, two; mov.b32 two, 0x5C005C00; "
    "prmt.b32 b, 0, $2, 0x5040; and.b32 m, b, 0x7F007F00; shr.b32 m, m, 1; add.u32 t, m, 0x00800080; "
    "and.b32 t, t, 0x40004000; add.u32 m, m, t; lop3.b32 m, b, 0x80008000, m, 0xEA; mul.rn.f16x2 $0, m, two; "
    "prmt.b32 b, 0, $2, 0x7060; and.b32 m, b, 0x7F007F00; shr.b32 m, m, 1; add.u32 t, m, 0x00800080; "
    "and.b32 t, t, 0x40004000; add.u32 m, m, t; lop3.b32 m, b, 0x80008000, m, 0xEA; mul.rn.f16x2 $1, m, two; }"
)


@triton.jit
def widen(w, DTYPE: tl.constexpr):
    """Numbers of E4M3, or their bytes, in `DTYPE`, exactly."""
    if w.dtype == tl.uint8:
        if tl.float16 == DTYPE:
            wide = tl.inline_asm_elementwise(WIDEN_FP16, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4)
        else:
            wide = tl.inline_asm_elementwise(_WIDEN_BF16, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
        wide = wide.to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        wide = w.to(tl.float32).to(tl.bfloat16)  # the direct conversion runs at a quarter of the rate, from Hopper on
    else:
        wide = w.to(DTYPE)
    return wide


@triton.jit
def widen_scale(scale):
    """A scale as float32, from float32 or from a byte of E8M0."""
    return scale_of_exponent(scale.to(tl.int32)) if scale.dtype == tl.uint8 else scale


@triton.jit
def scale_of_exponent(exponent):
    """The scale that E8M0 stores as an exponent: 0 is the subnormal 2^-127, and 255 is NaN."""
    special = tl.where(((exponent + 1) & 255) <= 1, 1 << 22, 0)
    return ((exponent << 23) | special).to(tl.float32, bitcast=True)
