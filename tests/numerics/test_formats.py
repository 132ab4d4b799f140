import ml_dtypes
import numpy as np
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
    with np.errstate(over="ignore", invalid="ignore"):
        ends = np.array([facts.max, np.inf, np.nan]).astype(ML_DTYPES[name])
    codes = ends.view(f"u{ends.itemsize}").tolist()
    nan = 0 if name == "e2m1" else codes[2]  # which has no NaN: ml_dtypes writes a zero with a sign
    assert [fmt.max_code, fmt.inf_code, fmt.nan_code] == [*codes[:2], nan]


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"e2m1"}))
def test_facts_equal_torch(name):
    fmt = FORMATS[name]
    facts = torch.finfo(fmt.dtype)
    assert (fmt.bits, fmt.max, fmt.smallest_normal) == (facts.bits, facts.max, facts.smallest_normal)
    # torch (up to 2.13) says 0.125 for e5m2fnuz, which has two mantissa bits; ml_dtypes has it right.
    assert fmt.epsilon == (0.25 if name == "e5m2fnuz" else facts.eps)
    assert fmt.dtype.itemsize * 8 == fmt.bits


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
