import ml_dtypes
import pytest
import torch
from codec_oracle import ML_DTYPES

from octavo.numerics.formats import FORMATS, FP8_FORMATS, format_of, get_format, narrow_format


@pytest.mark.parametrize("name", ML_DTYPES)
def test_facts_equal_ml_dtypes(name):
    fmt, facts = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
    assert (fmt.bits, fmt.exponent_bits, fmt.mantissa_bits) == (facts.bits, facts.nexp, facts.nmant)
    assert fmt.max == float(facts.max)
    assert fmt.smallest_normal == float(facts.smallest_normal)
    assert fmt.smallest_subnormal == float(facts.smallest_subnormal)
    assert fmt.epsilon == float(facts.eps)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"e2m1"}))
def test_facts_equal_torch(name):
    fmt = FORMATS[name]
    facts = torch.finfo(fmt.dtype)
    assert (fmt.bits, fmt.max, fmt.smallest_normal) == (facts.bits, facts.max, facts.smallest_normal)
    # torch (up to 2.13) says 0.125 for e5m2fnuz, which has two mantissa bits; ml_dtypes has it right.
    assert fmt.epsilon == (0.25 if name == "e5m2fnuz" else facts.eps)
    assert fmt.dtype.itemsize * 8 == fmt.bits


@pytest.mark.parametrize(
    ("name", "max_code", "inf_code", "nan_code"),
    [
        ("e4m3", 0x7E, 0x7F, 0x7F),
        ("e5m2", 0x7B, 0x7C, 0x7E),
        ("e4m3fnuz", 0x7F, 0x80, 0x80),
        ("e5m2fnuz", 0x7F, 0x80, 0x80),
        ("e2m1", 0x7, 0x7, 0x0),
        ("e8m0", 0xFE, 0xFF, 0xFF),
        ("bf16", 0x7F7F, 0x7F80, 0x7FC0),
        ("fp16", 0x7BFF, 0x7C00, 0x7E00),
        ("fp32", 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    ],
)
def test_codes_at_the_ends(name, max_code, inf_code, nan_code):
    fmt = FORMATS[name]
    assert (fmt.max_code, fmt.inf_code, fmt.nan_code) == (max_code, inf_code, nan_code)


def test_which_formats_have_infinity_and_sign():
    assert {f.name for f in FORMATS.values() if f.has_inf} == {"e5m2", "bf16", "fp16", "fp32"}
    assert {f.name for f in FORMATS.values() if not f.signed} == {"e8m0"}


def test_look_up_by_name_and_dtype():
    for name, fmt in FORMATS.items():
        assert get_format(name) is fmt
        assert format_of(fmt.dtype) is FORMATS["e4m3" if name == "e2m1" else name]
    assert set(FP8_FORMATS) == {"e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"}


def test_unknown_names_are_answered_with_the_choices():
    with pytest.raises(ValueError, match="unknown format 'fp8'") as error:
        get_format("fp8")
    assert all(name in str(error.value) for name in FORMATS)
    for name in ("fp8", "e8m0", "bf16"):
        with pytest.raises(ValueError, match=f"tensors cannot be quantized to '{name}'") as error:
            narrow_format(name)
        assert str(error.value).endswith("e4m3, e5m2, e4m3fnuz, e5m2fnuz, e2m1, int8")
    with pytest.raises(ValueError, match=r"torch\.int8") as error:
        format_of(torch.int8)
    assert "torch.float8_e4m3fn" in str(error.value)
