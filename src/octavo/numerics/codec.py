"""Conversion of numbers to codes and back, by arithmetic on sign, exponent and mantissa.

`encode` and `decode` define the conversion. `cast` is PyTorch's own conversion: it is fast, and tests hold it equal.

A magnitude a with floor(log2 a) = e lies on a grid with the spacing 2^(e - m). Below the smallest normal number the
spacing stays that of the smallest exponent. Let q be a in units of its spacing, rounded to an integer. Then

    code = ((e + bias - 1) << m) + q

holds for normal numbers (q >= 2^m adds the implied one) and for subnormal numbers (e + bias = 1). If q is rounded up to
2^(m+1), it carries into the exponent.

At the ends: a finite number beyond the format's max saturates to max. NaN stays NaN. inf stays inf if the format has
inf, and becomes NaN if it has none. inf never becomes the largest finite number.
"""

import torch
from torch import Tensor

from octavo.numerics.formats import E4M3, INT8, Format, format_of


def encode(x: Tensor, fmt: Format, noise: Tensor | None = None) -> Tensor:
    """The codes of `x` in `fmt`, rounded to nearest even, or stochastically if `noise` is given.

    Args:
        x: any shape, any floating dtype up to float64.
        noise: uniform in [0, 1), the shape of x. x is then rounded up with a probability equal to its distance from its
            lower neighbour in units of the spacing, so that E[decode(encode(x))] = x up to the format's max.

    Returns:
        int64 codes, the shape of x.
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
    no_number = x.isnan() if fmt.has_inf else ~x.isfinite()
    return torch.where(no_number, fmt.nan_code, code)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """The numbers of integer `codes` of `fmt`, as float32 of the same shape, which holds every format here exactly."""
    codes = codes.long() & ((1 << fmt.bits) - 1)
    m = fmt.mantissa_bits
    field = codes if not fmt.signed else codes & ((1 << (fmt.bits - 1)) - 1)
    exponent, mantissa = field >> m, field & ((1 << m) - 1)
    if fmt.signed:
        normal = exponent > 0
        significand = torch.where(normal, mantissa + (1 << m), mantissa)
        exponent = exponent.clamp(min=1)
    else:
        significand = torch.ones_like(mantissa)
    value = significand.double() * _power_of_two(exponent - fmt.bias - m)
    if fmt.has_inf:
        value = torch.where(field == fmt.inf_code, torch.inf, value)
        value = torch.where(field > fmt.inf_code, torch.nan, value)
    else:
        value = torch.where((codes if fmt.family == "fnuz" else field) == fmt.nan_code, torch.nan, value)
    negative = (codes >> (fmt.bits - 1)) == 1
    return torch.where(negative & fmt.signed, -value, value).float()


def cast(x: Tensor, fmt: Format, noise: Tensor | None = None) -> Tensor:
    """Cast float32 `x` to `fmt.dtype`, an eight-bit format. Equal to `encode` for finite numbers and NaN of FP8.

    Numbers beyond max are clamped first, since PyTorch's conversion of these differs by version, format and device. inf
    becomes max too: the caller checks for inf before (`octavo.numerics.scaling` gives such a block the scale NaN). An
    integer is rounded to nearest even, and NaN becomes 0.
    """
    x = x.clamp(-fmt.max, fmt.max)
    if fmt is INT8:
        return x.round().nan_to_num_(0).to(fmt.dtype)
    return x.to(fmt.dtype) if noise is None else encode(x, fmt, noise).to(torch.uint8).view(fmt.dtype)


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
    looks = data.device.type == "cpu" and not torch.compiler.is_compiling()  # on a GPU, reading a value waits
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
