import json
from dataclasses import FrozenInstanceError, replace

import pytest

from octavo.numerics import ROW, TENSOR, Cast, History, block, group
from octavo.recipe import (
    PRESETS,
    WEIGHT_FLOOR,
    Gemm,
    Recipe,
    bf16,
    blockwise,
    delayed,
    fnuz,
    get_recipe,
    groupwise,
    mxfp8,
    rowwise,
    rowwise_dw_bf16,
    tensorwise,
)

POW2_ROW = Cast(scale="pow2")
TENSOR_POW2 = Cast(granularity=TENSOR, scale="pow2")
CUSTOM = Recipe(
    "mine",
    y=Gemm(x=Cast("e5m2", group(96), "e8m0", "stochastic"), w=Cast(granularity=block(3, 5), relative_floor=0.125)),
    dx=Gemm(
        dy=Cast("e5m2", TENSOR, history=History(16, "percentile", 99.5, 0.5, 1.5, 4)),
        w=Cast("e4m3fnuz", TENSOR, "pow2"),
        fast_accumulation=True,
    ),
    rotate=True,
)


# ---- what each preset is


def casts(recipe: Recipe) -> dict[str, tuple[Cast | None, Cast | None]]:
    return {"y": (recipe.y.x, recipe.y.w), "dx": (recipe.dx.dy, recipe.dx.w), "dw": (recipe.dw.dy, recipe.dw.x)}


def three(x: Cast, w: Cast, dy: Cast) -> dict[str, tuple[Cast, Cast]]:
    return {"y": (x, w), "dx": (dy, w), "dw": (dy, x)}


def test_bf16_quantizes_nothing():
    assert bf16() == Recipe("bf16")
    assert not any(gemm.quantized for gemm in (bf16().y, bf16().dx, bf16().dw))


def test_tensorwise():
    x = Cast("e4m3", TENSOR, "fp32")
    assert casts(tensorwise()) == three(x, x, replace(x, format="e5m2"))


def test_rowwise():
    weight = Cast("e4m3", ROW, "fp32", relative_floor=2.0**-8)
    assert WEIGHT_FLOOR == 2.0**-8
    assert casts(rowwise()) == three(Cast("e4m3", ROW, "fp32"), weight, Cast("e4m3", ROW, "pow2"))


def test_rowwise_dw_bf16_is_rowwise_but_for_dw_and_the_scales_of_dy_that_only_dw_asks_for():
    dx = replace(rowwise().dx, dy=replace(rowwise().dx.dy, scale="fp32"))
    assert rowwise_dw_bf16() == replace(rowwise(), name="rowwise_dw_bf16", dx=dx, dw=Gemm())


def test_delayed():
    x = Cast("e4m3", TENSOR, "fp32", history=History(1024, "max"))
    assert casts(delayed()) == three(x, x, replace(x, format="e5m2"))
    history = History(16, "ema")
    assert {cast.history for pair in casts(delayed(history=history)).values() for cast in pair} == {history}


def test_blockwise():
    x = Cast("e4m3", group(128), "fp32")
    assert casts(blockwise()) == three(x, Cast("e4m3", block(128, 128), "fp32"), x)


def test_mxfp8():
    x = Cast("e4m3", group(32), "e8m0")
    assert casts(mxfp8()) == three(x, x, x)


def test_groupwise():
    for size in (32, 64, 128):
        x = Cast("e4m3", group(size), "fp32")
        assert casts(groupwise(size=size)) == three(x, x, x)
    assert groupwise() == groupwise(size=64)


def test_gradients_are_e5m2_where_the_scale_spans_the_tensor_and_e4m3_elsewhere():
    formats = {name: preset().dx.dy.format for name, preset in PRESETS.items() if preset().dx.dy is not None}
    assert formats == {
        "tensorwise": "e5m2",
        "rowwise": "e4m3",
        "rowwise_dw_bf16": "e4m3",
        "delayed": "e5m2",
        "blockwise": "e4m3",
        "mxfp8": "e4m3",
        "groupwise": "e4m3",
    }


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "bf16"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e5m2fnuz"])
def test_the_gradients_format_can_be_chosen(name, fmt):
    recipe = PRESETS[name](gradients=fmt)
    assert recipe.dx.dy.format == fmt
    assert recipe.dw.dy is None or recipe.dw.dy.format == fmt
    assert recipe.y == PRESETS[name]().y


def test_fast_accumulation_never_in_dw_and_no_rotation():
    for name, preset in PRESETS.items():
        recipe = preset()
        flags = (recipe.y.fast_accumulation, recipe.dx.fast_accumulation, recipe.dw.fast_accumulation)
        assert flags == (name != "bf16", name.startswith("rowwise"), False)
        assert recipe.name == name
        assert not recipe.rotate


def test_only_delayed_recipes_are_delayed():
    assert {name for name, preset in PRESETS.items() if preset().delayed} == {"delayed"}
    assert CUSTOM.delayed
    assert Recipe("w", y=Gemm(x=Cast(), w=Cast(granularity=TENSOR, history=History()))).delayed


def test_rowwise_folds_and_no_other_preset():
    assert {name for name, preset in PRESETS.items() if preset().folds} == {"rowwise"}
    assert rowwise("e5m2").folds
    assert rowwise("e5m2fnuz").folds


@pytest.mark.parametrize(
    ("operand", "change", "folds"),
    [
        ("x", {"scale": "pow2"}, True),
        ("w", {"scale": "pow2"}, True),
        ("w", {"relative_floor": 0.5}, True),
        ("x", {"relative_floor": 0.5}, False),
        ("dy", {"relative_floor": 0.5}, False),
        *((operand, {"rounding": "stochastic"}, False) for operand in ("x", "w", "dy")),
    ],
    ids=str,
)
def test_a_recipe_folds_if_the_fused_operations_do_its_casts(operand, change, folds):
    recipe = rowwise()
    x, w, dy = (
        replace(cast, **change if name == operand else {})
        for name, cast in zip(("x", "w", "dy"), (recipe.y.x, recipe.y.w, recipe.dx.dy), strict=True)
    )
    assert Recipe("odd", y=Gemm(x=x, w=w), dx=Gemm(dy=dy, w=w), dw=Gemm(dy=dy, x=x)).folds == folds


def test_a_recipe_folds_if_all_three_gemms_have_row_scales_and_nothing_is_rotated():
    recipe = rowwise()
    assert not replace(recipe, rotate=True).folds
    tensor = Cast(granularity=TENSOR)
    assert not replace(recipe, y=Gemm(x=recipe.y.x, w=tensor), dx=Gemm(dy=recipe.dx.dy, w=tensor)).folds


# ---- JSON


@pytest.mark.parametrize("recipe", [*(preset() for preset in PRESETS.values()), CUSTOM], ids=lambda r: r.name)
def test_json_round_trip(recipe):
    text = recipe.to_json()
    assert Recipe.from_json(text) == recipe
    assert Recipe.from_json(json.dumps(json.loads(text), indent=4, sort_keys=True)) == recipe


def test_json_says_what_the_recipe_says():
    """Known text, so that files written today are read tomorrow."""
    row = {"format": "e4m3", "granularity": "row", "scale": "fp32", "rounding": "nearest", "history": None}
    weight = row | {"relative_floor": 0.00390625}
    gradient = row | {"scale": "pow2", "relative_floor": 0.0}
    assert json.loads(rowwise().to_json()) == {
        "name": "rowwise",
        "rotate": False,
        "y": {"x": row | {"relative_floor": 0.0}, "w": weight, "fast_accumulation": True},
        "dx": {"dy": gradient, "w": weight, "fast_accumulation": True},
        "dw": {"dy": gradient, "x": row | {"relative_floor": 0.0}, "fast_accumulation": False},
    }
    history = json.loads(CUSTOM.to_json())["dx"]["dy"]["history"]
    assert history == {
        "length": 16,
        "rule": "percentile",
        "percentile": 99.5,
        "beta": 0.5,
        "margin": 1.5,
        "interval": 4,
    }
    assert json.loads(CUSTOM.to_json())["dw"] == {"fast_accumulation": False}


def test_equal_recipes_hash_alike_and_are_frozen():
    assert len({rowwise(), rowwise(), Recipe.from_json(rowwise().to_json())}) == 1
    with pytest.raises(FrozenInstanceError):
        rowwise().rotate = True


# ---- what is refused


@pytest.mark.parametrize(
    ("gemms", "message"),
    [
        ({"y": Gemm(x=Cast())}, r"y takes casts of x and w, got \['x'\]"),
        ({"y": Gemm(x=Cast(), dy=Cast())}, r"y takes casts of x and w, got \['dy', 'x'\]"),
        ({"dx": Gemm(dy=Cast(), x=Cast())}, r"dx takes casts of dy and w, got \['dy', 'x'\]"),
        ({"dw": Gemm(dy=Cast())}, r"dw takes casts of dy and x, got \['dy'\]"),
        ({"dw": Gemm(x=Cast(), w=Cast(), dy=Cast())}, r"dw takes casts of dy and x, got \['dy', 'w', 'x'\]"),
    ],
)
def test_each_gemm_takes_its_two_operands_or_none(gemms, message):
    with pytest.raises(ValueError, match="recipe odd: " + message):
        Recipe("odd", **gemms)


def test_a_row_scaled_w_in_dx_must_be_the_one_of_y():
    good = Gemm(dy=POW2_ROW, w=Cast())
    assert Recipe("fine", y=Gemm(x=POW2_ROW, w=Cast()), dx=good).dx == good
    for y in (Gemm(), Gemm(x=POW2_ROW, w=Cast("e5m2")), Gemm(x=POW2_ROW, w=Cast(granularity=TENSOR))):
        with pytest.raises(ValueError, match="recipe odd: a row-scaled w in dx must be the cast of w in y"):
            Recipe("odd", y=y, dx=good)


def test_a_row_scaled_w_in_dx_forbids_a_history_for_dy():
    """The scale of w is folded into dy first: what dy was in earlier steps says nothing of that."""
    history = Gemm(dy=Cast("e5m2", TENSOR, history=History()), w=Cast())
    with pytest.raises(ValueError, match=r"recipe odd: .* dy, into which its scale is folded, cannot .* a history"):
        Recipe("odd", y=Gemm(x=Cast(), w=Cast()), dx=history)
    dynamic = replace(history, dy=Cast("e5m2", TENSOR))
    assert Recipe("fine", y=Gemm(x=Cast(), w=Cast()), dx=dynamic).dx == dynamic
    tensor = replace(history, w=Cast(granularity=TENSOR))
    assert Recipe("fine", y=Gemm(x=Cast(), w=Cast(granularity=TENSOR)), dx=tensor).dx == tensor


@pytest.mark.parametrize("x", [Cast(), POW2_ROW, Cast("e5m2", scale="pow2")], ids=str)
@pytest.mark.parametrize("dy", [POW2_ROW, Cast("e5m2", scale="pow2")], ids=str)
def test_a_row_scaled_dw_takes_any_scale_of_x_and_powers_of_two_of_dy(x, dy):
    recipe = Recipe("fine", y=Gemm(x=x, w=Cast()), dx=Gemm(dy=dy, w=Cast()), dw=Gemm(x=x, dy=dy))
    assert (recipe.dw.x, recipe.dw.dy) == (x, dy)


@pytest.mark.parametrize(
    "change",
    [
        {"y": Gemm()},
        {"y": Gemm(x=POW2_ROW, w=Cast())},
        {"dx": Gemm()},
        {"dx": Gemm(dy=replace(POW2_ROW, format="e5m2"), w=Cast())},
        {"dw": Gemm(x=POW2_ROW, dy=POW2_ROW)},
        {"dw": Gemm(x=Cast(), dy=Cast())},
        {"dx": Gemm(dy=Cast(), w=Cast()), "dw": Gemm(x=Cast(), dy=Cast())},
        {"dw": Gemm(x=Cast(), dy=Cast(granularity=TENSOR))},
        {"dx": Gemm(dy=TENSOR_POW2, w=Cast()), "dw": Gemm(x=Cast(), dy=TENSOR_POW2)},
    ],
    ids=str,
)
def test_a_row_scaled_dw_folds_powers_of_two(change):
    gemms = {"y": Gemm(x=Cast(), w=Cast()), "dx": Gemm(dy=POW2_ROW, w=Cast()), "dw": Gemm(x=Cast(), dy=POW2_ROW)}
    Recipe("fine", **gemms)
    if not change.get("y", gemms["y"]).quantized:
        gemms["dx"] = Gemm(dy=POW2_ROW, w=Cast(granularity=TENSOR))  # a row-scaled w would be refused for itself
    with pytest.raises(ValueError, match="recipe odd: a row-scaled dw takes the casts of x in y and of dy in dx"):
        Recipe("odd", **gemms | change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "fp8"}, "'fp8' is no format to quantize to: choose one of e4m3, e5m2, e4m3fnuz, e5m2fnuz"),
        ({"format": "bf16"}, "'bf16' is no format to quantize to"),
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


def test_recipes_by_name():
    for name, preset in PRESETS.items():
        assert get_recipe(name) == preset()
    assert get_recipe(CUSTOM) is CUSTOM
    with pytest.raises(ValueError, match="unknown recipe 'row': choose one of") as error:
        get_recipe("row")
    assert all(name in str(error.value) for name in PRESETS)


def test_fnuz_changes_the_formats_and_nothing_else():
    turned = fnuz(rowwise_dw_bf16("e5m2"))
    assert turned.name == "rowwise_dw_bf16_fnuz"
    assert {cast.format for gemm in (turned.y, turned.dx) for cast in (gemm.x, gemm.w) if cast} == {"e4m3fnuz"}
    assert turned.dx.dy.format == "e5m2fnuz"
    assert turned.dw == Gemm()
    assert turned.dx.w.relative_floor == WEIGHT_FLOOR
    assert turned.y.fast_accumulation
    assert Recipe.from_json(turned.to_json()) == turned


@pytest.mark.parametrize("operand", ["x", "w"])
def test_row_scales_in_e8m0_are_refused(operand):
    row = Cast(granularity=ROW)
    casts = {"x": row, "w": row} | {operand: replace(row, scale="e8m0")}
    with pytest.raises(ValueError, match=r"no GEMM takes row scales in e8m0: .* scale='pow2'"):
        Recipe("mine", y=Gemm(**casts))
