"""From numbers to codes and back, by arithmetic on sign, exponent and mantissa.

`encode` and `decode` are the definition; `cast` is torch's own conversion, fast, and tested equal to it.

A magnitude a with floor(log2 a) = e lies on a grid of spacing 2^(e - m); below the smallest normal the spacing
stays that of the lowest binade. Counting a in units of its spacing, rounding the count q, and writing

    code = ((e + bias - 1) << m) + q

serves normals (q >= 2^m supplies the implied one) and subnormals (e + bias = 1) alike, and a q that rounds up to
2^(m+1) carries into the exponent by itself.

The contract at the ends: a finite number beyond the format's max saturates to max; NaN stays NaN; inf stays inf where
the format has one and is NaN where it has none. Never does inf turn silently into 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.numerics.formats import E4M3, Format, format_of


def encode(x: Tensor, fmt: Format, noise: Tensor | None = None) -> Tensor:
    """Codes of `x` in `fmt`, rounded to nearest even, or stochastically where `noise` is given.

    Args:
        x: any shape, any floating dtype up to float64.
        noise: uniform in [0, 1), the shape of x; x then rounds up with the probability of its distance from the lower
            neighbour, so that E[decode(encode(x))] = x up to the format's max.

    Returns:
        int64 codes, the shape of x.
    """
    x = x.double()
    if not fmt.signed:
        return _encode_power_of_two(x, fmt)
    magnitude, m = x.abs(), fmt.mantissa_bits
    exponent = torch.where(magnitude > 0, torch.frexp(magnitude).exponent.long() - 1, -fmt.bias)  # floor(log2)
    exponent = exponent.clamp(min=1 - fmt.bias)  # below the smallest normal: the grid of the subnormals
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
    """The numbers that integer `codes` of `fmt` stand for, as float32 of the same shape (every format here fits)."""
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
    """`x` (float32) as a tensor of `fmt.dtype`, an eight-bit format: equal to `encode` for numbers and NaN.

    Saturates explicitly, since what torch's own conversion does beyond max differs by version, format and device. inf
    saturates too: whoever casts looks for it first (the scale of a non-finite block is NaN, `octavo.numerics.scaling`).
    """
    x = x.clamp(-fmt.max, fmt.max)
    return x.to(fmt.dtype) if noise is None else encode(x, fmt, noise).to(torch.uint8).view(fmt.dtype)


def widen(data: Tensor) -> Tensor:
    """An eight-bit tensor as float32, exactly, by moving its bits to their place in a float16.

    E5M2 is the upper byte of a float16. E4M3's exponent and mantissa, one place lower, make a float16 of 2^-8 the
    value, subnormals included; only NaN must be put back. The FNUZ formats look their 256 values up.
    """
    if data.dtype == torch.float8_e5m2:
        return (data.view(torch.int8).to(torch.int16) << 8).view(torch.float16).float()
    if data.dtype != torch.float8_e4m3fn:
        return decode(torch.arange(256, device=data.device), format_of(data.dtype))[data.view(torch.uint8).int()]
    bits = data.view(torch.int8).to(torch.int16)  # the sign, repeated down to the exponent
    half = bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)  # s0eeeemm m0000000
    wide, code = half.float().mul_(256), data.view(torch.uint8) & 0x7F
    looks = data.device.type == "cpu" and not torch.compiler.is_compiling()  # elsewhere looking at data is a long wait
    if not looks or (code.numel() and int(code.amax()) == E4M3.nan_code):
        wide.masked_fill_(code == E4M3.nan_code, torch.nan)
    return wide


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, assembled from its bits; exponents in [-1022, 1023]."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _encode_power_of_two(x: Tensor, fmt: Format) -> Tensor:
    """E8M0: the nearest power of two, 1.5 of one going up; what is not a positive number is NaN."""
    fraction, exponent = torch.frexp(x)
    code = (exponent.long() - 1 + fmt.bias + (fraction >= 0.75)).clamp(0, fmt.max_code)
    return torch.where((x > 0) & x.isfinite(), code, fmt.nan_code)
