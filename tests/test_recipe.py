"""The presets, recipes as JSON and in files, and what is refused."""

import json
from dataclasses import FrozenInstanceError, replace
from inspect import signature
from itertools import product

import pytest
import torch
from torch import nn

from octavo import recipe as recipes
from octavo.nn import convert
from octavo.numerics import ROW, TENSOR, Cast, History, block, group
from octavo.recipe import PRESETS, Gemm, Recipe, delayed, get_recipe, groupwise, rowwise, rowwise_forward
from octavo.train.config import Config
from octavo.train.model import chosen_recipe
from octavo_cli import doctor

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


X, WEIGHT = Cast("e4m3", TENSOR, "fp32"), Cast("e4m3", ROW, "fp32", relative_floor=2.0**-8)
HISTORY, GROUPS, MX = replace(X, history=History(1024, "max", margin=1.0)), group(128), Cast("e4m3", group(32), "e8m0")
CASTS = {
    "bf16": [None, None, None],
    "tensorwise": three(X, X, replace(X, format="e5m2")),
    "rowwise": three(Cast("e4m3", ROW, "fp32"), WEIGHT, Cast("e4m3", ROW, "pow2")),
    "delayed": three(HISTORY, HISTORY, replace(HISTORY, format="e5m2")),
    "blockwise": three(Cast("e4m3", GROUPS), Cast("e4m3", block(128, 128), "fp32"), Cast("e4m3", GROUPS)),
    "mxfp8": three(MX, MX, MX),
    "groupwise": three(*[Cast("e4m3", group(64), "fp32")] * 3),
}


@pytest.mark.parametrize("name", CASTS)
def test_the_casts_of_a_preset(name):
    assert casts(PRESETS[name]()) == CASTS[name]
    assert PRESETS[name]().quantized == (name != "bf16")


def test_presets_that_follow_others_and_presets_with_settings():
    assert recipes.tensorwise_rotated() == replace(recipes.tensorwise(), name="tensorwise_rotated", rotate=("y",))
    dx = replace(rowwise().dx, a=replace(rowwise().dy, scale="fp32"))  # only dw asks for powers of two
    assert recipes.rowwise_dw_bf16() == replace(rowwise(), name="rowwise_dw_bf16", dx=dx, dw=None)
    assert rowwise_forward() == replace(rowwise(), name="rowwise_forward", dx=None, dw=None, exact_backward=True)
    assert not rowwise_forward().in_bf16("y").exact_backward
    history = History(16, "ema")
    assert {cast.history for pair in casts(delayed(history=history)) for cast in pair} == {history}
    assert casts(groupwise(size=32)) == three(*[Cast("e4m3", group(32), "fp32")] * 3)


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("bf16", "rowwise_dw_bf16", "rowwise_forward")])
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


@pytest.mark.parametrize("name", [n for n, preset in PRESETS.items() if signature(preset).parameters])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e5m2fnuz"])
def test_the_gradients_format_can_be_chosen(name, fmt):
    recipe = PRESETS[name](gradients=fmt)
    assert recipe.dy.format == fmt
    assert recipe.dw is None or recipe.dw.a.format == fmt
    assert recipe.y == PRESETS[name]().y


def test_fast_accumulation_never_in_dw_and_rotation_in_the_presets_that_say_so():
    rotated = {"tensorwise_rotated": ("y",), "mxfp4": ("dx", "dw"), "nvfp4": ("dw",)}
    for name, preset in PRESETS.items():
        recipe = preset()
        fast = [gemm is not None and gemm.fast_accumulation for gemm in (recipe.y, recipe.dx, recipe.dw)]
        assert fast == [name not in ("bf16", "mxfp4", "nvfp4"), name in ("rowwise", "rowwise_dw_bf16"), False]
        assert recipe.name == name
        assert recipe.rotate == rotated.get(name, ())


def test_rowwise_is_fusable_and_no_other_preset():
    assert {name for name, preset in PRESETS.items() if preset().fusable} == {"rowwise"}
    by_tensor = Gemm(rowwise().x, Cast(granularity=TENSOR))
    for change in ({"rotate": ("y",)}, {"dw": None}, {"y": by_tensor, "dx": replace(by_tensor, a=rowwise().dy)}):
        assert not replace(rowwise(), **change).fusable
    assert rowwise("e5m2fnuz").fusable
    recipe = replace(rowwise("e5m2"), emulate=True)
    fusable = recipe.fusable
    assert (fusable.y, fusable.dx, fusable.dw, fusable.emulate) == (recipe.y, recipe.dx, recipe.dw, True)
    assert (fusable.x, fusable.w, fusable.dy) == (recipe.x, recipe.w, recipe.dy)
    assert replace(recipe, name="odd").text == recipe.text
    assert Recipe.from_json(recipe.text).fusable == fusable


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
    expected = {"length": 16, "rule": "percentile", "percentile": 99.5, "beta": 0.5, "margin": 1.5, "interval": 4}
    assert history == expected
    assert json.loads(CUSTOM.to_json())["dw"] is None


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


def test_a_rotated_gradient_is_quantized_again():
    y, dx, rotated = (replace(rowwise(), rotate=(gemm,)) for gemm in ("y", "dx", "dw"))
    assert (rotated.quantizes_x_once, rotated.quantizes_w_once) == (False, True)
    assert (dx.quantizes_x_once, dx.quantizes_w_once) == (True, False)
    assert (y.quantizes_x_once, y.quantizes_w_once) == (True, True)
    assert replace(rotated, dw=Gemm(Cast("e5m2", TENSOR), Cast(granularity=group(32)))).dw.b.granularity == group(32)
    x = recipes.ROW_X
    assert replace(rotated, dw=Gemm(x, x)).dw.a == x  # no scale is folded: any may be float32


# ---- by name


def test_recipes_by_name():
    for name, preset in PRESETS.items():
        assert get_recipe(name) == preset()
    assert get_recipe(CUSTOM) is CUSTOM
    with pytest.raises(ValueError, match="unknown recipe 'row'.*: choose one of") as error:
        get_recipe("row")
    assert all(name in str(error.value) for name in PRESETS)
    with pytest.raises(ValueError, match="'fp8' .fp8 is a format; 'rowwise' is the default recipe.: choose one"):
        get_recipe("fp8")


def test_fnuz_changes_the_formats_and_nothing_else():
    turned = recipes.fnuz(recipes.rowwise_dw_bf16("e5m2"))
    assert turned.name == "rowwise_dw_bf16_fnuz"
    w = replace(recipes.ROW_W, format="e4m3fnuz")
    assert casts(turned) == [(Cast("e4m3fnuz"), w), (Cast("e5m2fnuz"), w), None]
    assert turned.y.fast_accumulation
    assert Recipe.from_json(turned.to_json()) == turned


# ---- The casts and recipes that are refused


POW2_ROW, ANY_TENSOR = Cast(scale="pow2"), Cast(granularity=TENSOR)
POW2_TENSOR = replace(ANY_TENSOR, scale="pow2")
HISTORY_DX = Gemm(Cast("e5m2", TENSOR, history=History()), Cast())
ROW_SCALED = {"y": Gemm(Cast(), Cast()), "dx": Gemm(POW2_ROW, Cast()), "dw": Gemm(POW2_ROW, Cast())}
DW = "recipe odd: a row-scaled dw takes the casts of x in y and of dy in dx"
DX = "recipe odd: a row-scaled w in dx must be the cast of w in y"
SECOND = r"has a history, but quantizes its tensor a second time.* in both"
ALONE = r"has a history.* a rotated GEMM alone.*: leave the history out$"
REFUSED = [
    (lambda: Cast("fp8"), "tensors cannot be quantized to 'fp8': choose one of e4m3, e5m2, e4m3fnuz, e5m2fnuz"),
    (lambda: Cast("int8", rounding="stochastic"), "int8 is rounded to nearest"),
    (lambda: Recipe("mine", Gemm(Cast("int8"), Cast("int8"))), "training takes FP8 formats, not int8"),
    (lambda: Cast(scale="fp16"), "unknown kind of scale 'fp16': choose one of fp32, pow2, e8m0"),
    (lambda: Cast(rounding="up"), "unknown rounding 'up': choose one of nearest, stochastic"),
    (lambda: Cast(relative_floor=-0.1), "0 to 1, got -0.1"),
    (lambda: Cast(relative_floor=float("nan")), "0 to 1, got nan"),
    (lambda: Cast(history=History()), "needs granularity tensor, got row"),
    (lambda: delayed(history={"length": 4}), r"history must be a History or None, got {'length': 4}: give"),
    (lambda: Cast("e4m3", "row"), r"granularity must be a Granularity, got 'row' \(str\): give ROW"),
    (lambda: Gemm("e4m3", Cast()), r"got 'e4m3' \(str\) for a: give a Cast, such as Cast\('e4m3'\)"),
    (lambda: Gemm(Cast(), "e4m3"), r"got 'e4m3' \(str\) for b: give a Cast"),
    (lambda: Gemm(Cast(), Cast(), "no"), "a Gemm's fast_accumulation must be true or false, got 'no'"),
    (lambda: replace(rowwise(), emulate="no"), "recipe rowwise: emulate must be true or false, got 'no'"),
    (lambda: Recipe("mine", exact_backward=0), "recipe mine: exact_backward must be true or false, got 0"),
    (lambda: replace(rowwise(), exact_backward=True), "rowwise: exact_backward takes dx and dw in BF16.* leave it out"),
    (lambda: Recipe("mine", exact_backward=True), "mine: exact_backward takes .* casts of y without rotation, by row"),
    (lambda: replace(rowwise_forward(), rotate=("y",)), "exact_backward takes .* casts of y without rotation"),
    (lambda: Recipe("mine", groupwise().y, exact_backward=True), "exact_backward takes .* by row, tensor or square"),
    (lambda: Recipe("mine", dx="e4m3"), r"recipe mine: dx must be a Gemm, or None for BF16, got 'e4m3' \(str\)"),
    (lambda: Recipe("mine", Gemm(Cast(scale="e8m0"), Cast())), "no GEMM takes row scales in e8m0: .*scale='pow2'"),
    (lambda: Recipe("mine", Gemm(Cast(), Cast(scale="e8m0"))), "no GEMM takes row scales in e8m0: .*scale='pow2'"),
    (lambda: rowwise().in_bf16("w"), "the GEMMs of a linear layer are y, dx, dw; got 'w'"),
    *(
        (lambda r=r: replace(rowwise(), rotate=r), r"rotate lists .*, of y, dx, dw, such as \['y'\].*; got")
        for r in (True, "dx", ["K"], ["y", 3], None)
    ),
    *(
        (lambda gemm=gemm: Recipe("mine", rotate=(gemm,)), f"rotate names {gemm}, of which no operand is quantized")
        for gemm in ("y", "dx", "dw")
    ),
    (lambda: replace(delayed(), dx=replace(delayed().dx, b=replace(X, history=History(4)))), SECOND),
    (lambda: replace(delayed(), dw=replace(delayed().dw, a=replace(X, history=History(4)))), SECOND),
    (lambda: replace(delayed(), dw=replace(delayed().dw, b=replace(X, history=History(4)))), f"dw.x {SECOND}"),
    (lambda: replace(delayed(), rotate=("y",)), f"y.x {ALONE}"),
    (lambda: replace(delayed(), rotate=("dx",)), f"dx.dy {ALONE}"),
    (lambda: replace(delayed(), rotate=("dw",)), f"dw.dy {ALONE}"),
    (lambda: Recipe("odd", Gemm(POW2_ROW, Cast("e5m2")), Gemm(POW2_ROW, Cast())), DX),
    (lambda: Recipe("odd", Gemm(POW2_ROW, ANY_TENSOR), Gemm(POW2_ROW, Cast())), DX),
    # The scale of w is folded into dy first: what dy was in earlier steps says nothing of that.
    (lambda: Recipe("odd", Gemm(Cast(), Cast()), HISTORY_DX), "into which its scale is folded, cannot .* a history"),
    *(
        (lambda change=change: Recipe("odd", **ROW_SCALED | change), DW)
        for change in (
            {"y": Gemm(POW2_ROW, Cast())},
            {"dx": Gemm(replace(POW2_ROW, format="e5m2"), Cast())},
            {"dw": Gemm(POW2_ROW, POW2_ROW)},
            {"dw": Gemm(Cast(), Cast())},
            {"dx": Gemm(Cast(), Cast()), "dw": Gemm(Cast(), Cast())},
            {"dw": Gemm(ANY_TENSOR, Cast())},
            {"dx": Gemm(POW2_TENSOR, Cast()), "dw": Gemm(POW2_TENSOR, Cast())},
        )
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_casts_gemms_and_recipes_that_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_recipes_beside_those_that_are_refused():
    dx, tensor = Gemm(POW2_ROW, Cast()), Gemm(Cast(), ANY_TENSOR)
    assert Recipe("fine", Gemm(POW2_ROW, Cast()), dx).dx == dx
    assert Recipe("fine", dx=dx).w == dx.b  # y in BF16
    dynamic = replace(HISTORY_DX, a=Cast("e5m2", TENSOR))
    assert Recipe("fine", Gemm(Cast(), Cast()), dynamic).dx == dynamic
    assert Recipe("fine", tensor, replace(HISTORY_DX, b=ANY_TENSOR)).dx.a.history is not None
    assert replace(delayed(), dw=Gemm(ANY_TENSOR, ANY_TENSOR)).dw.a.history is None
    for name in ("y", "dx"):
        Recipe("fine", **ROW_SCALED | {name: None})  # in BF16
    for x, dy in product([Cast(), POW2_ROW, Cast("e5m2", scale="pow2")], [POW2_ROW, Cast("e5m2", scale="pow2")]):
        assert Recipe("fine", Gemm(x, Cast()), Gemm(dy, Cast()), Gemm(dy, x)).dw == Gemm(dy, x)


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


# ---- A recipe of one's own among the presets


def toy(gradients: str = "e4m3") -> Recipe:
    """dw alone in eight bits."""
    return Recipe("toy", dw=rowwise(gradients).dw)


def test_a_recipe_is_registered(printed, monkeypatch):
    """In `octavo.recipe`, and in the names that the command line knows without PyTorch (`octavo_cli.shared`)."""
    monkeypatch.setitem(PRESETS, "toy", toy)
    monkeypatch.setattr(doctor, "RECIPES", (*doctor.RECIPES, "toy"))
    model = nn.Sequential(nn.Linear(32, 32))
    assert convert(model, "toy").recipe == toy()
    model(torch.randn(16, 32)).sum().backward()
    settings = Config.from_dict({"data": ("text.txt",), "recipe": "toy", "bf16_gemms": ("dx",)})
    assert chosen_recipe(settings, torch.device("cpu")) == toy()
    with pytest.raises(ValueError, match="unknown recipe 'toys'.*did you mean 'toy'.* nvfp4, toy"):
        get_recipe("toys")
    assert "\ntoy " in printed("doctor")
    assert Recipe.from_dict(json.loads(printed("formats", "toy")), "toy") == toy()


# ---- Recipes in files: what may be left out, and the errors of a file that is no recipe


def with_x(**fields):
    return {"y": {"x": fields, "w": {}}}


def write(folder, values, name="mine.json"):
    path = folder / name
    path.write_text(json.dumps(values))
    return path


def test_a_field_that_is_left_out_has_its_default(tmp_path):
    assert get_recipe(write(tmp_path, {})) == Recipe("mine")
    path = write(tmp_path, {"rotate": ["dx"], "dx": {"dy": {"format": "e5m2", "granularity": "group:64"}, "w": {}}})
    expected = Recipe("mine", dx=Gemm(Cast("e5m2", group(64)), Cast()), rotate=("dx",))
    assert get_recipe(path) == get_recipe(str(path)) == expected


def test_a_changed_preset_needs_a_name_of_its_own(tmp_path):
    changed = replace(rowwise(), rotate=("y",)).to_dict()
    with pytest.raises(ValueError, match=r"mine.json: rowwise is the name of a preset, .* give the recipe a name"):
        get_recipe(write(tmp_path, changed))
    del changed["name"]
    assert get_recipe(write(tmp_path, changed)).name == "mine"
    with pytest.raises(ValueError, match="rowwise is the name of a preset"):
        get_recipe(write(tmp_path, changed, "rowwise.json"))


@pytest.mark.parametrize(
    ("values", "essentials"),
    [
        ([1], ["must hold a JSON object, got list"]),
        (
            {"rotat": True},
            ["unknown field rotat (did you mean 'rotate'?)", "name, rotate, emulate, exact_backward, y, dx, dw"],
        ),
        ({"zzz": 1}, ["unknown field zzz: the fields are name"]),
        ({"rotate": 1}, ["rotate lists the GEMMs", "of y, dx, dw", "got 1"]),
        ({"name": ""}, ["name must not be empty"]),
        ({"y": 3}, ["y must be an object with the fields x, w, fast_accumulation; got 3 (int)"]),
        ({"y": {"x": {}}}, ["y.w is missing", "x and w, or is null for BF16"]),
        ({"dx": {"x": {}, "w": {}}}, ["unknown field dx.x: the fields are dy, w, fast_accumulation"]),
        ({"y": {"rotate": True}}, ["unknown field y.rotate (rotate is a field of the recipe): the fields are x, w"]),
        (with_x(rotate=True), ["unknown field y.x.rotate (rotate is a field of the recipe): the fields are format"]),
        (with_x(margin=1), ["unknown field y.x.margin (margin is a field of a history)"]),
        ({"format": "e5m2"}, ["unknown field format (format is a field of an operand): the fields are name, rotate"]),
        ({"fast_accumulation": True}, ["(fast_accumulation is a field of a GEMM: y, dx or dw): the fields are name"]),
        (with_x(granularty="row"), ["unknown field y.x.granularty (did you mean 'granularity'?)", "rounding"]),
        (with_x(granularity="rows"), ["y.x.granularity: unknown granularity 'rows'", "block:RxC"]),
        (with_x(granularity=None), ["y.x.granularity must be a string, got None"]),
        (with_x(rounding="up"), ["y.x: unknown rounding 'up'", "nearest, stochastic"]),
        (with_x(relative_floor="1"), ["y.x.relative_floor must be a number, got '1'"]),
        (with_x(history={"margn": 1}), ["unknown field y.x.history.margn (did you mean 'margin'?)"]),
        (with_x(history={"margin": float("nan")}), ["y.x.history: margin", "-64 to 64, got nan"]),
        (with_x(history={"margin": 5000}), ["y.x.history: margin", "-64 to 64, got 5000"]),
        (with_x(history={"length": True}), ["y.x.history.length must be a whole number, got True"]),
        (with_x(history={"length": 0}), ["y.x.history: length and interval are integers, at least 1, got 0"]),
        (with_x(scale="e8m0"), ["recipe mine: no GEMM takes row scales in e8m0"]),
    ],
    ids=str,
)
def test_an_error_names_the_file_the_field_and_what_is_allowed(tmp_path, values, essentials):
    path = write(tmp_path, values)
    with pytest.raises(ValueError, match="recipe file") as caught:
        get_recipe(path)
    for essential in (str(path), *essentials):
        assert essential in str(caught.value)


def test_a_file_that_is_missing_or_no_json(tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(ValueError, match=r"mine.json cannot be read: No such file"):
        get_recipe(path)
    for data in (b'{"y": ', b"\xff\xfe"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"mine.json is not valid JSON"):
            get_recipe(path)


def test_the_similar_preset_casts_x_and_w_alike():
    for name, preset in PRESETS.items():
        similar = "rowwise" if name.startswith("rowwise") else name
        assert recipes.similar_preset(replace(preset(), name="mine")) == similar
    assert recipes.similar_preset(delayed(history=History(16, margin=4.0))) == "delayed"
    assert recipes.similar_preset(replace(rowwise(), dx=None, dw=None)) == "rowwise"
    assert recipes.similar_preset(replace(rowwise(), rotate=("y",))) == "custom"
    assert recipes.similar_preset(groupwise(size=32)) == "custom"
    wide = replace(recipes.tensorwise(), y=Gemm(Cast("e5m2", TENSOR), Cast("e5m2", TENSOR)))
    assert recipes.similar_preset(wide) == "custom"  # packing would keep scales for e5m2
