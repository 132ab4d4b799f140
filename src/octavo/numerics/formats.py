"""Number formats: sign, biased exponent, mantissa, and the codes of inf and NaN.

A code with exponent field e and mantissa field f of m bits stands for

    (-1)^s * (1 + f/2^m) * 2^(e - bias)        e > 0    normal
    (-1)^s * (    f/2^m) * 2^(1 - bias)        e = 0    subnormal

The families differ in the meaning of their last codes:

    ieee   all-ones exponents are inf and NaN                       (E5M2, BF16, FP16, FP32)
    fn     finite: only S.1111.111 is NaN, no inf                   (E4M3)
    fnuz   finite, unsigned zero: the code of -0 is the only NaN    (E4M3FNUZ, E5M2FNUZ: AMD MI300)
    finite every code is a number                                   (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6)
    e8m0   an unsigned power of two, no zero; 255 is NaN            (the scale of the MX formats)

INT8 is an integer of -127 to 127 in two's complement, with no inf and no NaN. Its codes have no fields, so `encode` and
`decode` do not take it.

E2M1 has four bits. PyTorch computes nothing with these, so a tensor holds the numbers of E2M1 in E4M3, which has them
all, a byte each. `encode` gives their codes, of which MXFP4 and NVFP4 files store two in a byte.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433); Noune et al., "8-bit Numerical
Formats for Deep Neural Networks" (arXiv:2206.02915) for fnuz; OCP Microscaling Formats v1.0 for E8M0 and E2M1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """One number format. `dtype` is the torch dtype that holds it, of the same bits except for E2M1.

    Without the sign, codes have the order of their magnitudes.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    family: str
    dtype: torch.dtype
    max: float  # the largest finite number
    max_code: int  # its code
    inf_code: int  # of +inf, of NaN if the format has no inf, and of the largest number if it has neither
    nan_code: int  # written for NaN: the quiet, positive one if there are several, and 0 if there is none

    @property
    def signed(self) -> bool:
        """All formats have a sign bit but E8M0."""
        return self.family != "e8m0"

    @property
    def has_inf(self) -> bool:
        return self.family == "ieee"

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""
        return 2.0 ** (-self.bias if self.family == "e8m0" else 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def epsilon(self) -> float:
        """The spacing of the numbers between 1 and 2."""
        return 2.0**-self.mantissa_bits


E4M3 = Format("e4m3", 8, 4, 3, 7, "fn", torch.float8_e4m3fn, 448.0, 0x7E, 0x7F, 0x7F)
E5M2 = Format("e5m2", 8, 5, 2, 15, "ieee", torch.float8_e5m2, 57344.0, 0x7B, 0x7C, 0x7E)
E4M3FNUZ = Format("e4m3fnuz", 8, 4, 3, 8, "fnuz", torch.float8_e4m3fnuz, 240.0, 0x7F, 0x80, 0x80)
E5M2FNUZ = Format("e5m2fnuz", 8, 5, 2, 16, "fnuz", torch.float8_e5m2fnuz, 57344.0, 0x7F, 0x80, 0x80)
E2M1 = Format("e2m1", 4, 2, 1, 1, "finite", torch.float8_e4m3fn, 6.0, 0x7, 0x7, 0x0)
E8M0 = Format("e8m0", 8, 8, 0, 127, "e8m0", torch.float8_e8m0fnu, 2.0**127, 0xFE, 0xFF, 0xFF)
BF16 = Format("bf16", 16, 8, 7, 127, "ieee", torch.bfloat16, 2.0**128 - 2.0**120, 0x7F7F, 0x7F80, 0x7FC0)
FP16 = Format("fp16", 16, 5, 10, 15, "ieee", torch.float16, 65504.0, 0x7BFF, 0x7C00, 0x7E00)
FP32 = Format("fp32", 32, 8, 23, 127, "ieee", torch.float32, 2.0**128 - 2.0**104, 0x7F7FFFFF, 0x7F800000, 0x7FC00000)
INT8 = Format("int8", 8, 0, 7, 0, "int", torch.int8, 127.0, 0x7F, 0x7F, 0x00)

FORMATS = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1, E8M0, BF16, FP16, FP32)}
FP8_FORMATS = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}
# The formats that a tensor can be quantized to: eight or four bits, with a sign and a zero.
NARROW_FORMATS = {**FP8_FORMATS, E2M1.name: E2M1, INT8.name: INT8}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values() if f is not E2M1}


def get_format(name: str) -> Format:
    """The format called `name`. Raises ValueError, which lists the names, if there is none."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def narrow_format(name: str) -> Format:
    """The format called `name`, if tensors can be quantized to it. Raises ValueError, which lists the names, if not."""
    if name not in NARROW_FORMATS:
        raise ValueError(f"tensors cannot be quantized to {name!r}: choose one of {', '.join(NARROW_FORMATS)}")
    return NARROW_FORMATS[name]


def format_of(dtype: torch.dtype) -> Format:
    """The format of the torch dtype `dtype`, E4M3 for that of E2M1 too. Raises ValueError if there is none."""
    if dtype not in _BY_DTYPE:
        raise ValueError(f"no format has the dtype {dtype}: known are {', '.join(map(str, _BY_DTYPE))}")
    return _BY_DTYPE[dtype]


# ---- Conversion of numbers to codes and back, by arithmetic on sign, exponent and mantissa.
#
# `encode` and `decode` define the conversion. `cast` is PyTorch's own conversion: it is fast, and tests hold it equal.
#
# A magnitude a with floor(log2 a) = e lies on a grid with the spacing 2^(e - m). Below the smallest normal number the
# spacing stays that of the smallest exponent. Let q be a in units of its spacing, rounded to an integer. Then
#
#     code = ((e + bias - 1) << m) + q
#
# holds for normal numbers (q >= 2^m adds the implied one) and for subnormal numbers (e + bias = 1). If q is rounded up
# to 2^(m+1), it carries into the exponent.
#
# At the ends: a finite number beyond the format's max saturates to max. NaN stays NaN. inf stays inf if the format has
# inf, and becomes NaN if it has none. inf becomes the largest number in E2M1 alone, which has neither, and NaN zero.


def encode(x: Tensor, fmt: Format, noise: Tensor | None = None) -> Tensor:
    """The codes of `x`, any floating dtype, in `fmt`: int64 of the same shape, rounded to nearest even.

    With `noise`, uniform in [0, 1), the probability to round x up is the distance from its lower neighbour in units
    of the spacing. So E[decode(encode(x))] = x up to the format's max.
    """
    x = x.double()
    if not fmt.signed:
        return _encode_power_of_two(x, fmt)
    magnitude, m = x.abs(), fmt.mantissa_bits
    exponent = torch.where(magnitude > 0, torch.frexp(magnitude).exponent.long() - 1, -fmt.bias)  # floor(log2)
    exponent = exponent.clamp(min=1 - fmt.bias)  # below the smallest normal, the subnormals' grid
    count = magnitude * _power_of_two(m - exponent)
    rounded = count.round() if noise is None else (count + noise).floor()
    code = ((exponent + fmt.bias - 1) << m) + rounded.nan_to_num(0, 0, 0).long()
    code = code.clamp(max=fmt.max_code)
    code = torch.where(x.isinf(), fmt.inf_code, code)
    sign = x.signbit()
    if fmt.family == "fnuz":
        sign &= code != 0
    code = torch.where(sign, code | (1 << (fmt.bits - 1)), code)
    no_number = x.isnan() if fmt.has_inf or fmt.family == "finite" else ~x.isfinite()
    return torch.where(no_number, fmt.nan_code, code)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """The numbers of integer `codes` of `fmt`, as float32 of the same shape, which holds every format here exactly."""
    codes = codes.long() & ((1 << fmt.bits) - 1)
    m = fmt.mantissa_bits
    field = codes if not fmt.signed else codes & ((1 << (fmt.bits - 1)) - 1)
    exponent, mantissa = field >> m, field & ((1 << m) - 1)
    if fmt.signed:
        significand = torch.where(exponent > 0, mantissa + (1 << m), mantissa)
        exponent = exponent.clamp(min=1)
    else:
        significand = torch.ones_like(mantissa)
    value = significand.double() * _power_of_two(exponent - fmt.bias - m)
    if fmt.has_inf:
        value = torch.where(field == fmt.inf_code, torch.inf, value)
        value = torch.where(field > fmt.inf_code, torch.nan, value)
    elif fmt.family != "finite":
        value = torch.where((codes if fmt.family == "fnuz" else field) == fmt.nan_code, torch.nan, value)
    negative = (codes >> (fmt.bits - 1)) == 1
    return torch.where(negative & fmt.signed, -value, value).float()


def cast(x: Tensor, fmt: Format, noise: Tensor | None = None) -> Tensor:
    """Cast float32 `x` to a narrow format, in `fmt.dtype`. Equal to `encode` for finite numbers, and for NaN of FP8.

    Numbers beyond max are clamped first, since PyTorch's conversion of these differs by version, format and device. inf
    becomes max too: the caller checks for inf before (`octavo.numerics.scaling` gives such a block the scale NaN). An
    integer is rounded to nearest even, and NaN becomes 0.
    """
    x = x.clamp(-fmt.max, fmt.max)
    if fmt is INT8:
        return x.round().nan_to_num_(0).to(fmt.dtype)
    if fmt is E2M1:
        return torch.where(x.isnan(), x, _round_to_e2m1(x, noise)).to(fmt.dtype)
    return x.to(fmt.dtype) if noise is None else encode(x, fmt, noise).to(torch.uint8).view(fmt.dtype)


def _round_to_e2m1(x: Tensor, noise: Tensor | None) -> Tensor:
    """The E2M1 number of each float32 number of -6 to 6: the nearest, ties to even; with `noise` as `encode` rounds."""
    magnitude = x.abs()
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    count = magnitude * torch.where(magnitude < 2, 2.0, torch.where(magnitude < 4, 1.0, 0.5))  # no division: exact
    whole = count.round() if noise is None else (count.double() + noise).floor().float()
    return (whole * spacing).copysign(x)


def widen(data: Tensor) -> Tensor:
    """An eight-bit tensor as float32, exactly.

    E5M2 is the upper byte of a float16. The exponent and mantissa of E4M3, shifted by one bit, are a float16 number of
    2^-8 times the value, subnormals included; only NaN is set afterwards. FNUZ formats use a table of 256 values.
    """
    if data.dtype == torch.int8:
        return data.float()
    if data.dtype == torch.float8_e5m2:
        return (data.view(torch.int8).to(torch.int16) << 8).view(torch.float16).float()
    if data.dtype != torch.float8_e4m3fn:
        return decode(torch.arange(256, device=data.device), format_of(data.dtype))[data.view(torch.uint8).int()]
    bits = data.view(torch.int8).to(torch.int16)  # sign extension
    half = bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)  # s0eeeemm m0000000
    wide, code = half.float().mul_(256), data.view(torch.uint8) & 0x7F
    # On a GPU, reading a value waits, and a traced tensor has none.
    looks = data.device.type == "cpu" and type(data) is Tensor and not torch.compiler.is_compiling()
    if not looks or (code.numel() and int(code.amax()) == E4M3.nan_code):
        wide.masked_fill_(code == E4M3.nan_code, torch.nan)
    return wide


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, from its bits, for exponents in [-1022, 1023]."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _encode_power_of_two(x: Tensor, fmt: Format) -> Tensor:
    """The E8M0 code of the nearest power of two (1.5 * 2^n rounds up). Numbers that are not positive become NaN."""
    fraction, exponent = torch.frexp(x)
    code = (exponent.long() - 1 + fmt.bias + (fraction >= 0.75)).clamp(0, fmt.max_code)
    return torch.where((x > 0) & x.isfinite(), code, fmt.nan_code)


# A cache of keys and values stores these dtypes with a scale: the largest number, and the largest that rounds to it.
LARGEST = {torch.float8_e4m3fn: E4M3.max, torch.int8: 127.0}
ROUNDS_TO_LARGEST = {torch.float8_e4m3fn: 464.0, torch.int8: 127.5}
