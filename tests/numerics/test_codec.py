"""encode and decode against ml_dtypes over every code and every BF16 input, and exact arithmetic where that differs."""

import numpy as np
import pytest
import torch
from codec_oracle import ALL_BF16, FP8, ML_DTYPES, NARROW, all_values, code_of, log_uniform, same

from octavo.numerics.formats import FORMATS, cast, decode, encode, widen


@pytest.mark.parametrize("name", [*NARROW, "e8m0", "bf16", "fp16"])
def test_every_code_decodes_as_in_ml_dtypes(name):
    assert same(decode(torch.arange(1 << FORMATS[name].bits), FORMATS[name]), all_values(name))


def test_fp32_decodes_to_itself():
    ends = torch.tensor([0, 1, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000])
    codes = torch.cat([torch.randint(1 << 32, (100_000,)), ends])
    assert same(decode(codes, FORMATS["fp32"]), codes.numpy().astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_encode_undoes_decode(name):
    fmt = FORMATS[name]
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


@pytest.mark.parametrize(("name", "low", "high"), [("bf16", -140, 127.9), ("fp16", -27, 15.99)])
def test_sixteen_bit_formats_encode_as_torch_converts(name, low, high):
    fmt = FORMATS[name]
    x = torch.cat([log_uniform(300_000, low, high), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    expected = x.to(fmt.dtype)
    saturated = x.isfinite() & expected.isinf()  # torch overflows to inf, we saturate
    codes = encode(x, fmt)
    assert torch.equal(codes[~saturated], expected.view(torch.uint16).long()[~saturated])
    assert (decode(codes[saturated], fmt).abs() == fmt.max).all()


def test_fp32_encodes_to_its_own_bits():
    x = log_uniform(100_000, -149, 127.9)
    assert torch.equal(encode(x, FORMATS["fp32"]), x.view(torch.int32).long() & 0xFFFFFFFF)
    y = log_uniform(100_000, -149, 127.9, torch.float64)
    assert torch.equal(encode(y, FORMATS["fp32"]), y.float().view(torch.int32).long() & 0xFFFFFFFF)


# ---- E8M0, the format of the MX scales, against ml_dtypes and, below its range, exact arithmetic


E8M0 = FORMATS["e8m0"]


def test_every_bf16_input_becomes_the_e8m0_code_of_ml_dtypes():
    """From 2^-126 up; below, ml_dtypes rounds subnormal float32 inputs in its own way: see the next test.

    1.5 * 2^e goes up, there as here. Only what rounds beyond 2^127, NaN there, saturates here.
    """
    x = ALL_BF16[(ALL_BF16 >= 2.0**-126) & ALL_BF16.isfinite()]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = torch.from_numpy(x.numpy().astype(ML_DTYPES["e8m0"]).view(np.uint8).astype(np.int64))
    fits, codes = expected != 0xFF, encode(x, E8M0)
    assert len(x) == 254 << 7
    assert torch.equal(codes[fits], expected[fits])
    assert (fits & (torch.frexp(x).mantissa == 0.75)).sum() == 253
    assert torch.equal(x[~fits], ALL_BF16[(ALL_BF16 >= 1.5 * 2.0**127) & ALL_BF16.isfinite()])
    assert (codes[~fits] == 0xFE).all()


def test_what_is_no_positive_number_is_nan():
    nothing = ALL_BF16[~((ALL_BF16 > 0) & ALL_BF16.isfinite())]
    assert len(nothing) > 32_768
    assert (encode(nothing, E8M0) == 0xFF).all()


def test_subnormal_float32_inputs_round_to_the_nearest_power_of_two():
    subnormal = ALL_BF16[(ALL_BF16 > 0) & (ALL_BF16 < 2.0**-126)]
    assert len(subnormal) == 127
    # Codes 0 and 1 are 2^-127 and 2^-126: the middle, 1.5 * 2^-127, is a tie and goes up.
    expected = [int(v >= 1.5 * 2.0**-127) for v in subnormal.double().tolist()]  # float64 has these numbers
    assert set(expected) == {0, 1}
    assert encode(subnormal, E8M0).tolist() == expected


def test_ties_go_up_their_neighbours_to_the_nearest_and_what_is_beyond_to_the_ends():
    ties = np.array([1.5 * 2.0 ** (c - 127) for c in range(254)])
    assert code_of(ties.tolist(), "e8m0") == list(range(1, 255))
    assert code_of(np.nextafter(ties, 0).tolist(), "e8m0") == list(range(254))
    assert code_of(np.nextafter(ties, np.inf).tolist(), "e8m0") == list(range(1, 255))
    assert code_of([2.0**-140, 2.0**-1000, 2.0**127, 2.0**128, 1e300], "e8m0") == [0, 0, 0xFE, 0xFE, 0xFE]


# ---- `cast`, which clamps and then uses torch's conversion, against `encode`; stochastic rounding with given noise


@pytest.mark.parametrize("name", FP8)
def test_cast_equals_encode(name):
    fmt = FORMATS[name]
    log_max, log_min = np.log2(fmt.max), np.log2(fmt.smallest_subnormal)
    x = torch.cat([ALL_BF16[ALL_BF16.isfinite()], log_uniform(1_000_000, log_min - 4, log_max + 2)])
    result = cast(x, fmt)
    assert result.dtype == fmt.dtype
    assert torch.equal(result.view(torch.uint8), encode(x, fmt).to(torch.uint8))
    assert cast(torch.tensor([torch.nan, -torch.nan]), fmt).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*NARROW, "fp16"])
def test_a_number_becomes_the_nearest_or_by_noise_one_of_its_two_neighbours(name, dtype):
    """Ties go to even, and no exact number moves."""
    fmt = FORMATS[name]
    values = all_values(name)[: fmt.max_code + 1].astype(np.float64)
    ties, exact = (torch.from_numpy(t).to(dtype) for t in ((values[:-1] + values[1:]) / 2, np.append(values, -values)))
    x = log_uniform(20_000, np.log2(fmt.smallest_subnormal) - 3, np.log2(fmt.max), dtype)
    beside = (torch.nextafter(ties, torch.tensor(end, dtype=dtype)) for end in (0.0, torch.inf))
    x = torch.cat([x, ties, *beside, exact, exact, exact])
    of_exact = (torch.full_like(exact, each) for each in (0.0, 0.5, 1 - 2.0**-24))
    noise = torch.cat([torch.rand(20_000 + 3 * len(ties)), *of_exact])
    size = x.double().abs().numpy()
    below = np.searchsorted(values, size, side="right") - 1
    above = np.minimum(below + 1, fmt.max_code)
    # The distance in spacings, powers of two: exact
    part = (size - values[below]) / np.maximum(values[above] - values[below], 1e-30)
    nearest = np.where((part > 0.5) | ((part == 0.5) & (below % 2 == 1)), above, below)
    noisy = np.where(part + noise.double().numpy() >= 1, above, below)
    for given, expected in ((None, nearest), (noise, noisy)):
        negative = x.signbit().numpy() & ((expected != 0) | (fmt.family != "fnuz"))
        assert np.array_equal(encode(x, fmt, given).numpy(), expected + (negative << fmt.bits - 1))
    assert 0.3 < (noisy == above)[:20_000].mean() < 0.7
    assert (nearest < 1 << fmt.mantissa_bits).sum() > 500  # subnormal


@pytest.mark.parametrize("noise", [None, 0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("name", FP8)
def test_a_cast_saturates_and_keeps_nan_however_it_is_rounded(name, noise):
    fmt = FORMATS[name]
    x = torch.tensor([fmt.max, 1.01 * fmt.max, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, -torch.nan])
    result = widen(cast(x, fmt, None if noise is None else torch.full((8,), noise)))
    assert result[:6].tolist() == [fmt.max, fmt.max, fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert result[6:].isnan().all()


# ---- `widen` against `decode`: all 256 codes, wherever and however it runs


CODES = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)


@pytest.mark.parametrize("name", FP8)
def test_every_code_is_widened_as_it_is_decoded(name):
    codes = CODES.clone().view(FORMATS[name].dtype)
    wide = widen(codes)
    assert (wide.dtype, wide.shape) == (torch.float32, codes.shape)
    assert same(wide, decode(CODES, FORMATS[name]).numpy())
    wide.fill_(7)
    assert torch.equal(codes.view(torch.uint8), CODES)  # the result is memory of its own
    transposed = codes.transpose(0, 2)
    assert same(widen(transposed), decode(CODES, FORMATS[name]).transpose(0, 2).numpy())
    empty = widen(transposed[:0])
    assert (empty.dtype, empty.shape) == (torch.float32, (0, 8, 2))


@pytest.mark.parametrize("name", FP8)
def test_it_is_exact_where_subnormals_are_flushed(name):
    """FP8's subnormals are normal numbers in float32: `torch.set_flush_denormal` must not change them."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        wide = widen(CODES.view(FORMATS[name].dtype))
    finally:
        torch.set_flush_denormal(False)
    assert same(wide, decode(CODES, FORMATS[name]).numpy())


@pytest.mark.parametrize("name", FP8)
def test_it_takes_the_device_of_its_data_whatever_the_context(name):
    """A model is often created under `torch.device("meta")`: no tensor of that device may be cached."""
    data = torch.tensor([1.0, -2.0, 0.0, -0.0]).to(FORMATS[name].dtype)
    expected = data.float()
    with torch.device("meta"):
        shadow = widen(data.to("meta"))
        real = widen(data)
    assert (shadow.device.type, shadow.dtype, shadow.shape) == ("meta", torch.float32, (4,))
    assert real.device.type == "cpu"
    assert same(real, expected.numpy())
    assert same(widen(data), expected.numpy())


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in ("e4m3", "e5m2", "e5m2fnuz")),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("e5m2", "e4m3fnuz")),
    ],
)
def test_it_compiles_into_one_graph(name, backend):
    torch.compiler.reset()
    compiled = torch.compile(widen, fullgraph=True, backend=backend)
    for codes in (CODES, CODES.flatten()[:7]):  # with NaN, and without
        assert same(compiled(codes.view(FORMATS[name].dtype)), decode(codes, FORMATS[name]).numpy())
