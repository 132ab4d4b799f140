"""The presets, and recipes as JSON."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from octavo.numerics import ROW, TENSOR, Cast, History, block, group
from octavo.recipe import (
    PRESETS,
    ROW_W,
    ROW_X,
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
    tensorwise_rotated,
)

CUSTOM = Recipe(
    "mine",
    y=Gemm(Cast("e5m2", group(96), "e8m0", "stochastic"), Cast(granularity=block(3, 5), relative_floor=0.125)),
    dx=Gemm(
        Cast("e5m2", TENSOR, history=History(16, "percentile", 99.5, 0.5, 1.5, 4)),
        Cast("e4m3fnuz", TENSOR, "pow2"),
        fast_accumulation=True,
    ),
    rotate=("y",),
    emulate=True,
)


# ---- what each preset is


def casts(recipe: Recipe) -> list[tuple[Cast, Cast] | None]:
    return [None if gemm is None else (gemm.a, gemm.b) for gemm in (recipe.y, recipe.dx, recipe.dw)]


def three(x: Cast, w: Cast, dy: Cast) -> list[tuple[Cast, Cast]]:
    return [(x, w), (dy, w), (dy, x)]


def test_bf16_quantizes_nothing():
    assert bf16() == Recipe("bf16")
    assert not bf16().quantized
    assert casts(bf16()) == [None, None, None]


def test_tensorwise():
    x = Cast("e4m3", TENSOR, "fp32")
    assert casts(tensorwise()) == three(x, x, replace(x, format="e5m2"))


def test_tensorwise_rotated():
    assert tensorwise_rotated() == replace(tensorwise(), name="tensorwise_rotated", rotate=("y",))


def test_rowwise():
    weight = Cast("e4m3", ROW, "fp32", relative_floor=2.0**-8)
    assert casts(rowwise()) == three(Cast("e4m3", ROW, "fp32"), weight, Cast("e4m3", ROW, "pow2"))


def test_rowwise_dw_bf16_is_rowwise_but_for_dw_and_the_scales_of_dy_that_only_dw_asks_for():
    dx = replace(rowwise().dx, a=replace(rowwise().dy, scale="fp32"))
    assert rowwise_dw_bf16() == replace(rowwise(), name="rowwise_dw_bf16", dx=dx, dw=None)


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("bf16", "rowwise_dw_bf16")])
def test_any_gemm_of_a_recipe_runs_in_bf16_and_the_others_keep_their_casts(name):
    recipe = PRESETS[name]()
    for gemm in ("y", "dx", "dw"):
        found = recipe.in_bf16(gemm)
        rotate = tuple(other for other in recipe.rotate if other != gemm)
        assert found == replace(recipe, name=f"{name} with {gemm} in bf16", rotate=rotate, **{gemm: None})
        assert (found.x, found.w, found.dy) == (recipe.x, recipe.w, recipe.dy)
        assert found.in_bf16(gemm) is found
        assert Recipe.from_json(found.to_json()) == found
    assert recipe.in_bf16("dw", "y").name == f"{name} with y, dw in bf16"
    assert not recipe.in_bf16("y", "dx", "dw").quantized
    assert recipe.in_bf16() is recipe
    with pytest.raises(ValueError, match="the GEMMs of a linear layer are y, dx, dw; got 'w'"):
        recipe.in_bf16("w")


def test_delayed():
    x = Cast("e4m3", TENSOR, "fp32", history=History(1024, "max", margin=1.0))
    assert casts(delayed()) == three(x, x, replace(x, format="e5m2"))
    history = History(16, "ema")
    assert {cast.history for pair in casts(delayed(history=history)) for cast in pair} == {history}


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
    casts = {name: preset().dy for name, preset in PRESETS.items() if name != "bf16"}
    wide = {name for name, cast in casts.items() if cast.format == "e5m2"}
    assert wide == {"tensorwise", "tensorwise_rotated", "delayed"}
    assert {casts[name].format for name in casts.keys() - wide} == {"e4m3"}


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "bf16"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e5m2fnuz"])
def test_the_gradients_format_can_be_chosen(name, fmt):
    recipe = PRESETS[name](gradients=fmt)
    assert recipe.dy.format == fmt
    assert recipe.dw is None or recipe.dw.a.format == fmt
    assert recipe.y == PRESETS[name]().y


def test_fast_accumulation_never_in_dw_and_rotation_in_one_preset():
    for name, preset in PRESETS.items():
        recipe = preset()
        fast = [gemm is not None and gemm.fast_accumulation for gemm in (recipe.y, recipe.dx, recipe.dw)]
        assert fast == [name != "bf16", name.startswith("rowwise"), False]
        assert recipe.name == name
        assert recipe.rotate == (("y",) if name == "tensorwise_rotated" else ())


def test_rowwise_is_fusable_and_no_other_preset():
    assert {name for name, preset in PRESETS.items() if preset().fusable} == {"rowwise"}
    assert rowwise("e5m2").fusable
    assert rowwise("e5m2fnuz").fusable


def test_a_fusable_recipe_has_the_gemms_and_casts_of_the_recipe():
    recipe = replace(rowwise(), emulate=True)
    fusable = recipe.fusable
    assert (fusable.y, fusable.dx, fusable.dw, fusable.emulate) == (recipe.y, recipe.dx, recipe.dw, True)
    assert (fusable.x, fusable.w, fusable.dy) == (recipe.x, recipe.w, recipe.dy)


@pytest.mark.parametrize(
    ("operand", "change", "fusable"),
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
def test_a_recipe_is_fusable_if_the_fused_operations_do_its_casts(operand, change, fusable):
    recipe = rowwise()
    x, w, dy = (replace(getattr(recipe, name), **change if name == operand else {}) for name in ("x", "w", "dy"))
    assert bool(Recipe("odd", Gemm(x, w), Gemm(dy, w), Gemm(dy, x)).fusable) == fusable


def test_a_recipe_is_fusable_if_all_three_gemms_have_row_scales_and_nothing_is_rotated():
    recipe = rowwise()
    assert not replace(recipe, rotate=("y",)).fusable
    assert not replace(recipe, dw=None).fusable
    tensor = Cast(granularity=TENSOR)
    assert not replace(recipe, y=Gemm(recipe.x, tensor), dx=Gemm(recipe.dy, tensor)).fusable


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
        "rotate": [],
        "emulate": False,
        "y": {"x": row | {"relative_floor": 0.0}, "w": weight, "fast_accumulation": True},
        "dx": {"dy": gradient, "w": weight, "fast_accumulation": True},
        "dw": {"dy": gradient, "x": row | {"relative_floor": 0.0}, "fast_accumulation": False},
    }
    history = json.loads(CUSTOM.to_json())["dx"]["dy"]["history"]
    assert history == {
        "length": 16, "rule": "percentile", "percentile": 99.5, "beta": 0.5, "margin": 1.5, "interval": 4,
    }  # fmt: skip
    assert json.loads(CUSTOM.to_json())["dw"] is None


def test_json_of_earlier_versions_is_read():
    """They had no `emulate`, wrote a GEMM in BF16 as one without operands, and rotated y or nothing."""
    fields = json.loads(rowwise_dw_bf16().to_json()) | {"dw": {"fast_accumulation": False}}
    del fields["emulate"]
    assert Recipe.from_json(json.dumps(fields | {"rotate": False})) == rowwise_dw_bf16()
    assert Recipe.from_json(json.dumps(fields | {"rotate": True})) == replace(rowwise_dw_bf16(), rotate=("y",))


def test_equal_recipes_hash_alike_and_are_frozen():
    assert len({rowwise(), rowwise(), Recipe.from_json(rowwise().to_json())}) == 1
    with pytest.raises(FrozenInstanceError):
        rowwise().rotate = ("y",)


# ---- rotations


def test_rotations_are_in_the_order_of_the_gemms_and_survive_json():
    recipe = replace(rowwise(), name="mine", rotate=["dw", "y", "dw"])
    assert recipe.rotate == ("y", "dw")
    assert json.loads(recipe.to_json())["rotate"] == ["y", "dw"]
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize("wrong", [True, "dx", ["K"], ["y", 3], None])
def test_what_is_no_list_of_gemms_cannot_be_rotated(wrong):
    with pytest.raises(ValueError, match=r"rotate lists the GEMMs .*, of y, dx, dw, such as \['y'\].*; got"):
        replace(rowwise(), rotate=wrong)


@pytest.mark.parametrize("gemm", ["y", "dx", "dw"])
def test_a_gemm_without_quantized_operands_cannot_be_rotated(gemm):
    with pytest.raises(ValueError, match=f"rotate names {gemm}, of which no operand is quantized: leave it out"):
        replace(bf16(), rotate=(gemm,))
    rotated = replace(rowwise(), rotate=("y", "dx", "dw"))
    with pytest.raises(ValueError, match="rotate names dw"):
        replace(rotated, dw=None)
    assert rotated.in_bf16("dw").rotate == ("y", "dx")
    assert rotated.in_bf16("y", "dx").rotate == ("dw",)
    assert rotated.in_bf16("y", "dx", "dw").rotate == ()


def test_a_rotated_gradient_is_quantized_again():
    y, dx, rotated = (replace(rowwise(), rotate=(gemm,)) for gemm in ("y", "dx", "dw"))
    assert (rotated.quantizes_x_once, rotated.quantizes_w_once) == (False, True)
    assert (dx.quantizes_x_once, dx.quantizes_w_once) == (True, False)
    assert (y.quantizes_x_once, y.quantizes_w_once) == (True, True)
    uneven = replace(rotated, dw=Gemm(Cast("e5m2", TENSOR), Cast(granularity=group(32))))
    assert uneven.dw.b.granularity == group(32)
    assert replace(rotated, dw=Gemm(ROW_X, ROW_X)).dw.a == ROW_X  # no scale is folded: any may be float32


# ---- histories


def test_only_the_first_quantization_of_a_tensor_has_a_history():
    recipe, other = delayed(), Cast(granularity=TENSOR, history=History(4))
    for changed in ({"dx": replace(recipe.dx, b=other)}, {"dw": replace(recipe.dw, a=other)}):
        with pytest.raises(ValueError, match=r"has a history, but quantizes its tensor a second time.* in both"):
            replace(recipe, **changed)
    with pytest.raises(ValueError, match=r"dw.x has a history"):
        replace(recipe, dw=replace(recipe.dw, b=other))
    for gemm, operand in (("y", "y.x"), ("dx", "dx.dy"), ("dw", "dw.dy")):
        with pytest.raises(
            ValueError, match=rf"{operand} has a history.* a rotated GEMM alone.*: leave the history out$"
        ):
            replace(recipe, rotate=(gemm,))
    assert replace(recipe, dw=Gemm(Cast(granularity=TENSOR), Cast(granularity=TENSOR))).dw.a.history is None


# ---- by name


def test_recipes_by_name():
    for name, preset in PRESETS.items():
        assert get_recipe(name) == preset()
    assert get_recipe(CUSTOM) is CUSTOM
    with pytest.raises(ValueError, match="unknown recipe 'row'.*: choose one of") as error:
        get_recipe("row")
    assert all(name in str(error.value) for name in PRESETS)


def test_fnuz_changes_the_formats_and_nothing_else():
    turned = fnuz(rowwise_dw_bf16("e5m2"))
    assert turned.name == "rowwise_dw_bf16_fnuz"
    w = replace(ROW_W, format="e4m3fnuz")
    assert casts(turned) == [(Cast("e4m3fnuz"), w), (Cast("e5m2fnuz"), w), None]
    assert turned.y.fast_accumulation
    assert Recipe.from_json(turned.to_json()) == turned


# ---- The casts and recipes that are refused


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
