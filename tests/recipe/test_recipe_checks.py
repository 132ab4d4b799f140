"""The casts and recipes that are refused."""

from dataclasses import replace

import pytest

from octavo.numerics import ROW, TENSOR, Cast, History, group
from octavo.recipe import Gemm, Recipe

POW2_ROW = Cast(scale="pow2")
TENSOR_POW2 = Cast(granularity=TENSOR, scale="pow2")


def test_a_row_scaled_w_in_dx_must_be_the_one_of_y():
    good = Gemm(POW2_ROW, Cast())
    assert Recipe("fine", y=Gemm(POW2_ROW, Cast()), dx=good).dx == good
    assert Recipe("fine", dx=good).w == good.b  # y in BF16
    for y in (Gemm(POW2_ROW, Cast("e5m2")), Gemm(POW2_ROW, Cast(granularity=TENSOR))):
        with pytest.raises(ValueError, match="recipe odd: a row-scaled w in dx must be the cast of w in y"):
            Recipe("odd", y=y, dx=good)


def test_a_row_scaled_w_in_dx_forbids_a_history_for_dy():
    """The scale of w is folded into dy first: what dy was in earlier steps says nothing of that."""
    history = Gemm(Cast("e5m2", TENSOR, history=History()), Cast())
    with pytest.raises(ValueError, match=r"recipe odd: .* dy, into which its scale is folded, cannot .* a history"):
        Recipe("odd", y=Gemm(Cast(), Cast()), dx=history)
    dynamic = replace(history, a=Cast("e5m2", TENSOR))
    assert Recipe("fine", y=Gemm(Cast(), Cast()), dx=dynamic).dx == dynamic
    tensor = replace(history, b=Cast(granularity=TENSOR))
    assert Recipe("fine", y=Gemm(Cast(), Cast(granularity=TENSOR)), dx=tensor).dx == tensor


@pytest.mark.parametrize("operands", [("e4m3", Cast()), (Cast(), "e4m3")])
def test_a_gemm_takes_casts(operands):
    name = "ab"[operands.index("e4m3")]
    with pytest.raises(TypeError, match=rf"got 'e4m3' \(str\) for {name}: give a Cast, such as Cast\('e4m3'\)"):
        Gemm(*operands)
    with pytest.raises(TypeError, match=r"recipe mine: dx must be a Gemm, or None for BF16, got 'e4m3' \(str\)"):
        Recipe("mine", dx="e4m3")


def test_a_cast_takes_a_granularity():
    with pytest.raises(TypeError, match=r"granularity must be a Granularity, got 'row' \(str\): give ROW"):
        Cast("e4m3", "row")


@pytest.mark.parametrize("x", [Cast(), POW2_ROW, Cast("e5m2", scale="pow2")], ids=str)
@pytest.mark.parametrize("dy", [POW2_ROW, Cast("e5m2", scale="pow2")], ids=str)
def test_a_row_scaled_dw_takes_any_scale_of_x_and_powers_of_two_of_dy(x, dy):
    recipe = Recipe("fine", Gemm(x, Cast()), Gemm(dy, Cast()), Gemm(dy, x))
    assert recipe.dw == Gemm(dy, x)


@pytest.mark.parametrize(
    "change",
    [
        {"y": Gemm(POW2_ROW, Cast())},
        {"dx": Gemm(replace(POW2_ROW, format="e5m2"), Cast())},
        {"dw": Gemm(POW2_ROW, POW2_ROW)},
        {"dw": Gemm(Cast(), Cast())},
        {"dx": Gemm(Cast(), Cast()), "dw": Gemm(Cast(), Cast())},
        {"dw": Gemm(Cast(granularity=TENSOR), Cast())},
        {"dx": Gemm(TENSOR_POW2, Cast()), "dw": Gemm(TENSOR_POW2, Cast())},
    ],
    ids=str,
)
def test_a_row_scaled_dw_folds_powers_of_two(change):
    gemms = {"y": Gemm(Cast(), Cast()), "dx": Gemm(POW2_ROW, Cast()), "dw": Gemm(POW2_ROW, Cast())}
    for name in ("y", "dx"):
        Recipe("fine", **gemms | {name: None})  # in BF16
    with pytest.raises(ValueError, match="recipe odd: a row-scaled dw takes the casts of x in y and of dy in dx"):
        Recipe("odd", **gemms | change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "fp8"}, "tensors cannot be quantized to 'fp8': choose one of e4m3, e5m2, e4m3fnuz, e5m2fnuz"),
        ({"format": "bf16"}, "tensors cannot be quantized to 'bf16'"),
        ({"scale": "fp16"}, "unknown kind of scale 'fp16': choose one of fp32, pow2, e8m0"),
        ({"rounding": "up"}, "unknown rounding 'up': choose one of nearest, stochastic"),
        ({"relative_floor": -0.1}, "0 to 1, got -0.1"),
        ({"relative_floor": 1.5}, "0 to 1, got 1.5"),
        ({"relative_floor": float("nan")}, "0 to 1, got nan"),
        ({"history": History()}, "needs granularity tensor, got row"),
        ({"history": History(), "granularity": group(32)}, "needs granularity tensor, got group:32"),
    ],
)
def test_casts_refuse(fields, message):
    with pytest.raises(ValueError, match=message):
        Cast(**fields)


def test_casts_are_equal_where_all_settings_are():
    changes = [
        {"format": "e5m2"}, {"granularity": group(32)}, {"scale": "pow2"}, {"rounding": "stochastic"},
        {"relative_floor": 0.5}, {"granularity": TENSOR}, {"granularity": TENSOR, "history": History()},
        {"granularity": TENSOR, "history": History(margin=2.0)}, {"granularity": TENSOR, "history": History(16)},
    ]  # fmt: skip
    casts = [Cast(), *(Cast(**change) for change in changes)]
    assert len(set(casts)) == len(casts)
    assert all((a == b) == (i == j) for i, a in enumerate(casts) for j, b in enumerate(casts))
    assert Cast(relative_floor=1) == Cast(relative_floor=1.0)
    whole, real = (Cast(granularity=TENSOR, history=History(margin=margin)) for margin in (1, 1.0))
    assert whole == real
    assert hash(whole) == hash(real)
    assert Cast() != "e4m3 row fp32 0.0"


@pytest.mark.parametrize("operand", ["a", "b"])
def test_row_scales_in_e8m0_are_refused(operand):
    row = Cast(granularity=ROW)
    casts = {"a": row, "b": row} | {operand: replace(row, scale="e8m0")}
    with pytest.raises(ValueError, match=r"no GEMM takes row scales in e8m0: .*scale='pow2'"):
        Recipe("mine", Gemm(**casts))
