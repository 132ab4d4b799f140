"""octavo formats, against ml_dtypes."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from codec_oracle import ML_DTYPES

TYPES = ML_DTYPES | {"fp32": np.float32}
SIGNED = [name for name in TYPES if name != "e8m0"]
# Ties, subnormals, both zeros, and numbers of each sign.
NUMBERS = [0.1, -0.1, 1.0, 0.0, -0.0, 17.0, 19.0, -1e-5, 2.0**-9, 3 * 2.0**-10, 2.0**-17, -200.0, math.pi, 1e-9]


def looked_at(octavo, number, name):
    code, out, err = octavo("formats", "--format", name, "--json", "--", number)
    assert (code, err) == (0, "")
    (row,) = json.loads(out)
    assert row["format"] == name
    return row


def test_table_and_json_name_every_format(octavo):
    code, table, _ = octavo("formats")
    assert code == 0
    assert [line.split()[0] for line in table.splitlines()[1:] if line.strip()] == list(TYPES)
    assert [row["format"] for row in json.loads(octavo("formats", "--json")[1])] == list(TYPES)


def test_facts_are_those_of_ml_dtypes(octavo):
    for row in json.loads(octavo("formats", "--json")[1]):
        finfo = ml_dtypes.finfo(TYPES[row["format"]])
        assert row["bits"] == finfo.bits
        assert row["max"] == float(finfo.max)
        assert row["normal"] == float(finfo.smallest_normal)
        assert row["epsilon"] == float(finfo.eps)
        assert row["layout"] == f"{int(row['format'] != 'e8m0')}-{finfo.nexp}-{finfo.nmant}"
        if row["format"] != "e8m0":
            assert row["subnormal"] == float(finfo.smallest_subnormal)


@pytest.mark.parametrize("name", SIGNED)
def test_a_number_is_stored_as_ml_dtypes_stores_it(octavo, name):
    dtype = np.dtype(TYPES[name])
    for number in NUMBERS:
        row = looked_at(octavo, number, name)
        stored = np.array(number).astype(dtype)
        code = int(stored.view(f"u{dtype.itemsize}"))
        assert int(row["code"], 16) == int(row["bits"].replace(" ", ""), 2) == code
        assert (row["value"], row["error"]) == (float(stored), abs(float(stored) - number))
        assert row["relative"] == (row["error"] / abs(number) if number else 0)
        for side, direction in (("below", ml_dtypes.finfo(dtype).min), ("above", ml_dtypes.finfo(dtype).max)):
            assert row[side] == float(np.nextafter(stored, direction))


def test_a_format_in_the_place_of_the_number(octavo):
    code, _, err = octavo("formats", "e4m3")
    assert code == 2
    assert "'e4m3' is no number. A format is given as --format NAME." in " ".join(err.split())


def test_bits_are_cut_into_sign_exponent_and_mantissa(octavo):
    assert looked_at(octavo, 0.1, "e4m3")["bits"] == "0 0011 101"  # 1.625 * 2^(3 - 7)
    assert looked_at(octavo, -0.1, "e5m2")["bits"] == "1 01011 10"  # -1.5 * 2^(11 - 15)
    assert looked_at(octavo, 4.0, "e8m0")["bits"] == "10000001"  # 2^(129 - 127)


def test_e8m0_holds_the_nearest_power_of_two(octavo):
    for number, value in ((0.1, 0.125), (0.09, 0.0625), (1.0, 1.0), (3.1, 4.0)):
        row = looked_at(octavo, number, "e8m0")
        assert (row["below"], row["value"], row["above"]) == (value / 2, value, value * 2)


def test_a_number_beyond_the_largest_saturates(octavo):
    row = looked_at(octavo, -1000, "e4m3")
    assert (row["code"], row["value"], row["error"], row["above"]) == ("0xfe", -448, 552, -416)


def test_a_number_is_shown_in_every_format(octavo):
    code, table, _ = octavo("formats", "0.1")
    assert code == 0
    assert [line.split()[0] for line in table.splitlines()[1:] if line.strip()] == list(TYPES)
    shown = octavo("formats", "0.1", "--format", "e4m3")[1]
    for essential in ("e4m3", "0 0011 101", "0x1d", "0.1016", "0.09375", "0.1094"):
        assert essential in shown


def test_an_unknown_format_names_the_choices(refused):
    err = refused("formats", "--format", "fp8")
    assert all(part in err for part in ("'fp8'", *TYPES))


@pytest.mark.parametrize("number", ["448", "inf", "nan", "-1e300"])
def test_json_has_no_nan_and_no_infinity(octavo, number):
    printed = octavo("formats", "--json", "--", number)[1]
    assert len(json.loads(printed, parse_constant=pytest.fail)) == 8
