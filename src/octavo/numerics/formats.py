"""Number formats: sign, biased exponent, mantissa, and the codes of inf and NaN.

A code with exponent field e and mantissa field f of m bits stands for

    (-1)^s * (1 + f/2^m) * 2^(e - bias)        e > 0    normal
    (-1)^s * (    f/2^m) * 2^(1 - bias)        e = 0    subnormal

The families differ in the meaning of their last codes:

    ieee   all-ones exponents are inf and NaN                       (E5M2, BF16, FP16, FP32)
    fn     finite: only S.1111.111 is NaN, no inf                   (E4M3)
    fnuz   finite, unsigned zero: the code of -0 is the only NaN    (E4M3FNUZ, E5M2FNUZ: AMD MI300)
    e8m0   an unsigned power of two, no zero; 255 is NaN            (the scale of the MX formats)

INT8 is an integer of -127 to 127 in two's complement, with no inf and no NaN. Its codes have no fields, so `encode` and
`decode` (`octavo.numerics.codec`) do not take it.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433); Noune et al., "8-bit Numerical
Formats for Deep Neural Networks" (arXiv:2206.02915) for fnuz; OCP Microscaling Formats v1.0 for E8M0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Format:
    """One number format. `dtype` is the torch dtype with the same bits, `max` the largest finite number."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    family: str
    dtype: torch.dtype
    max: float = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.family == "int":
            object.__setattr__(self, "max", 127.0)  # the dataclass is frozen
            return
        exponent, mantissa = divmod(self.max_code, 1 << self.mantissa_bits)
        largest = (1 + mantissa / (1 << self.mantissa_bits)) * 2.0 ** (exponent - self.bias)
        object.__setattr__(self, "max", float(largest))

    @property
    def signed(self) -> bool:
        """Whether the format has a sign bit (all but E8M0)."""
        return self.family != "e8m0"

    @property
    def has_inf(self) -> bool:
        return self.family == "ieee"

    @property
    def max_code(self) -> int:
        """The code of the largest finite number. (Without the sign, codes have the order of their magnitudes.)"""
        last = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        reserved = {"ieee": 1 << self.mantissa_bits, "fn": 1, "fnuz": 0, "e8m0": 1}
        return last - reserved[self.family]

    @property
    def nan_code(self) -> int:
        """The code that is written for NaN: the quiet, positive one if there are several."""
        if self.family == "ieee":
            return self.inf_code | (1 << (self.mantissa_bits - 1))
        if self.family == "fnuz":
            return 1 << (self.bits - 1)
        return self.max_code + 1

    @property
    def inf_code(self) -> int:
        """The code of +inf, or of NaN if the format has no inf."""
        return self.max_code + 1 if self.has_inf else self.nan_code

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


E4M3 = Format("e4m3", 8, 4, 3, 7, "fn", torch.float8_e4m3fn)
E5M2 = Format("e5m2", 8, 5, 2, 15, "ieee", torch.float8_e5m2)
E4M3FNUZ = Format("e4m3fnuz", 8, 4, 3, 8, "fnuz", torch.float8_e4m3fnuz)
E5M2FNUZ = Format("e5m2fnuz", 8, 5, 2, 16, "fnuz", torch.float8_e5m2fnuz)
E8M0 = Format("e8m0", 8, 8, 0, 127, "e8m0", torch.float8_e8m0fnu)
BF16 = Format("bf16", 16, 8, 7, 127, "ieee", torch.bfloat16)
FP16 = Format("fp16", 16, 5, 10, 15, "ieee", torch.float16)
FP32 = Format("fp32", 32, 8, 23, 127, "ieee", torch.float32)
INT8 = Format("int8", 8, 0, 7, 0, "int", torch.int8)

FORMATS = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, BF16, FP16, FP32)}
FP8_FORMATS = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}
# The formats that a tensor can be quantized to: eight bits, with a sign and a zero.
EIGHT_BIT_FORMATS = {**FP8_FORMATS, INT8.name: INT8}


def get_format(name: str) -> Format:
    """The format called `name`. Raises ValueError, which lists the names, if there is none."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def eight_bit_format(name: str) -> Format:
    """The format called `name`, if tensors can be quantized to it. Raises ValueError, which lists the names, if not."""
    if name not in EIGHT_BIT_FORMATS:
        raise ValueError(f"tensors cannot be quantized to {name!r}: choose one of {', '.join(EIGHT_BIT_FORMATS)}")
    return EIGHT_BIT_FORMATS[name]


def format_of(dtype: torch.dtype) -> Format:
    """The format of the torch dtype `dtype`. Raises ValueError if there is none."""
    for f in FORMATS.values():
        if f.dtype == dtype:
            return f
    raise ValueError(f"no format has the dtype {dtype}: known are {', '.join(str(f.dtype) for f in FORMATS.values())}")
