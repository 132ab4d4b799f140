"""encode and decode against ml_dtypes over every code and every BF16 input, and exact arithmetic where that differs."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from codec_oracle import ALL_BF16, EIGHT_BITS, FP8, ML_DTYPES, all_values, code_of, log_uniform, same

from octavo.numerics.codec import decode, encode
from octavo.numerics.formats import FORMATS


def nearest_code(x: float, values: np.ndarray) -> int:
    """Exactly: the code of the non-negative finite `values` (ascending) nearest to x, ties to the even code."""
    after = int(np.searchsorted(values, x))
    candidates = [c for c in (after - 1, after) if 0 <= c < len(values)]
    return min(candidates, key=lambda c: (abs(Fraction(x) - Fraction(float(values[c]))), c % 2))


@pytest.mark.parametrize("name", [*EIGHT_BITS, "bf16", "fp16"])
def test_every_code_decodes_as_in_ml_dtypes(name):
    codes = torch.arange(1 << FORMATS[name].bits)
    assert same(decode(codes, FORMATS[name]), all_values(name))


def test_fp32_decodes_to_itself():
    torch.manual_seed(0)
    codes = torch.cat(
        [torch.randint(1 << 32, (100_000,)), torch.tensor([0, 1, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000])]
    )
    expected = codes.numpy().astype(np.uint32).view(np.float32)
    assert same(decode(codes, FORMATS["fp32"]), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_encode_undoes_decode(name):
    fmt = FORMATS[name]
    torch.manual_seed(0)
    codes = torch.arange(1 << fmt.bits) if fmt.bits <= 16 else torch.randint(1 << 32, (200_000,))
    values = decode(codes, fmt)
    number = ~values.isnan()
    assert number.sum() >= 0.96 * len(codes)
    assert torch.equal(encode(values, fmt)[number], codes[number])


@pytest.mark.parametrize("name", FP8)
def test_every_bf16_input_encodes_as_in_ml_dtypes(name):
    fmt = FORMATS[name]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = ALL_BF16.numpy().astype(ML_DTYPES[name])
    # ml_dtypes turns what rounds beyond max into inf or NaN; there, and there alone, the contract is ours.
    fits = torch.from_numpy(np.isfinite(expected.astype(np.float32)))
    codes = encode(ALL_BF16, fmt)
    assert fits.sum() > 30_000
    assert torch.equal(codes[fits], torch.from_numpy(expected.view(np.uint8).astype(np.int64))[fits])
    beyond = ALL_BF16.isfinite() & ~fits
    assert (ALL_BF16[beyond].abs() > fmt.max).all()
    assert same(decode(codes[beyond], fmt), (ALL_BF16[beyond].sign() * fmt.max).numpy())


@pytest.mark.parametrize("name", [*FP8, "bf16", "fp16"])
def test_contract_at_the_ends(name):
    fmt = FORMATS[name]
    sign = 1 << (fmt.bits - 1)
    over = np.nextafter(fmt.max, np.inf)
    assert code_of([fmt.max, over, 2 * fmt.max, 1e300], name) == [fmt.max_code] * 4
    assert code_of([-fmt.max, -over, -2 * fmt.max, -1e300], name) == [sign | fmt.max_code] * 4
    assert code_of([np.nan, -np.nan], name) == [fmt.nan_code] * 2
    infinite = [fmt.inf_code, sign | fmt.inf_code] if name in ("e5m2", "bf16", "fp16") else [fmt.nan_code] * 2
    assert code_of([np.inf, -np.inf], name) == infinite
    negative_zero = 0 if fmt.family == "fnuz" else sign
    tiny = fmt.smallest_subnormal / 4
    assert code_of([0.0, -0.0, tiny, -tiny], name) == [0, negative_zero, 0, negative_zero]


@pytest.mark.parametrize("name", [*FP8, "fp16"])
def test_ties_go_to_even(name):
    values = all_values(name)[: FORMATS[name].max_code + 1].astype(np.float64)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact in float64
    even = np.arange(len(low)) + np.arange(len(low)) % 2
    assert code_of(middle.tolist(), name) == even.tolist()
    assert code_of(np.nextafter(middle, 0).tolist(), name) == list(range(len(low)))
    assert code_of(np.nextafter(middle, np.inf).tolist(), name) == list(range(1, len(low) + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FP8)
def test_random_inputs_encode_to_the_nearest(name, dtype):
    torch.manual_seed(1)
    fmt = FORMATS[name]
    values = all_values(name)[: fmt.max_code + 1]
    top = np.log2(fmt.max)
    x = log_uniform(4000, np.log2(fmt.smallest_subnormal) - 3, top, dtype)
    expected = [nearest_code(abs(v), values) for v in x.double().tolist()]
    codes = encode(x, fmt)
    assert (codes & 0x7F).tolist() == expected
    negative = (x < 0) & ((codes != 0) if fmt.family == "fnuz" else True)
    assert torch.equal(codes >= 0x80, negative)
    subnormal = torch.tensor(expected) < (1 << fmt.mantissa_bits)
    assert subnormal.sum() > 100


@pytest.mark.parametrize("name", FP8)
def test_float32_and_float64_subnormals_vanish(name):
    tiny = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-130, 5e-324, -5e-324], dtype=torch.float64)
    assert (decode(encode(tiny, FORMATS[name]), FORMATS[name]) == 0).all()
    assert (decode(encode(tiny.float(), FORMATS[name]), FORMATS[name]) == 0).all()


@pytest.mark.parametrize(("name", "low", "high"), [("bf16", -140, 127.9), ("fp16", -27, 15.99)])
def test_sixteen_bit_formats_encode_as_torch_converts(name, low, high):
    torch.manual_seed(2)
    fmt = FORMATS[name]
    x = torch.cat([log_uniform(300_000, low, high), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    expected = x.to(fmt.dtype)
    saturated = x.isfinite() & expected.isinf()  # torch overflows to inf, we saturate
    codes = encode(x, fmt)
    assert torch.equal(codes[~saturated], expected.view(torch.uint16).long()[~saturated])
    assert (decode(codes[saturated], fmt).abs() == fmt.max).all()


def test_fp32_encodes_to_its_own_bits():
    torch.manual_seed(3)
    x = log_uniform(100_000, -149, 127.9)
    assert torch.equal(encode(x, FORMATS["fp32"]), x.view(torch.int32).long() & 0xFFFFFFFF)
    y = log_uniform(100_000, -149, 127.9, torch.float64)
    assert torch.equal(encode(y, FORMATS["fp32"]), y.float().view(torch.int32).long() & 0xFFFFFFFF)
