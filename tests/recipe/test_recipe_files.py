"""Recipes in files: what may be left out, and the errors of a file that is no recipe."""

import json
from dataclasses import replace

import pytest

from octavo.numerics import TENSOR, Cast, History, group
from octavo.recipe import (
    PRESETS,
    Gemm,
    Recipe,
    delayed,
    get_recipe,
    groupwise,
    rowwise,
    similar_preset,
    tensorwise,
)


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


def test_every_setting_of_an_operand_can_be_written(tmp_path):
    history = {"length": 16, "rule": "ema", "percentile": 99, "beta": 0.5, "margin": 1, "interval": 4}
    x = {"format": "e5m2", "granularity": "tensor", "scale": "pow2", "rounding": "stochastic", "history": history}
    path = write(tmp_path, {"y": {"x": x | {"relative_floor": 0.5}, "w": {}, "fast_accumulation": True}})
    cast = Cast("e5m2", TENSOR, "pow2", "stochastic", 0.5, History(16, "ema", 99.0, 0.5, 1.0, 4))
    found = get_recipe(path)
    assert found == Recipe("mine", Gemm(cast, Cast(), fast_accumulation=True))
    assert type(found.x.history.margin) is float  # written as 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_written_to_a_file_is_that_preset(tmp_path, name):
    assert get_recipe(write(tmp_path, PRESETS[name]().to_dict())) == PRESETS[name]()


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
        ({"rotat": True}, ["unknown field rotat (did you mean 'rotate'?)", "name, rotate, emulate, y, dx, dw"]),
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
        (with_x(granularity=None), ["y.x.granularity must be a string; got None"]),
        (with_x(format="e4m4"), ["y.x: ", "'e4m4'", "e4m3, e5m2"]),
        (with_x(rounding="up"), ["y.x: unknown rounding 'up'", "nearest, stochastic"]),
        (with_x(relative_floor="1"), ["y.x.relative_floor must be a finite number; got '1' (str)"]),
        (with_x(relative_floor=2), ["y.x: relative_floor is a fraction", "got 2.0"]),
        (with_x(history={}), ["y.x: a history holds one amax a tensor", "granularity tensor, got row"]),
        (with_x(history={"margn": 1}), ["unknown field y.x.history.margn (did you mean 'margin'?)"]),
        (with_x(history={"margin": float("nan")}), ["y.x.history.margin must be a finite number; got nan"]),
        (with_x(history={"margin": 5000}), ["y.x.history: margin", "-64 to 64, got 5000.0"]),
        (with_x(history={"length": True}), ["y.x.history.length must be an integer; got True (bool)"]),
        (with_x(history={"length": 0}), ["y.x.history: length and interval must be at least 1, got 0"]),
        (with_x(scale="e8m0"), ["recipe mine: no GEMM takes row scales in e8m0"]),
        ({"dw": {"dy": {}, "x": {}}}, ["recipe mine: a row-scaled dw takes"]),
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


@pytest.mark.parametrize(
    ("name", "advice"),
    [("rowise", r"did you mean 'rowwise'\?"), ("fp8", "fp8 is a format; 'rowwise' is the default recipe")],
)
def test_a_misspelt_preset_is_answered_with_the_nearest_and_a_format_with_the_default(name, advice):
    with pytest.raises(ValueError, match=rf"unknown recipe '{name}' \({advice}\): choose one of bf16"):
        get_recipe(name)


def test_the_similar_preset_casts_x_and_w_alike():
    for name, preset in PRESETS.items():
        similar = "rowwise" if name == "rowwise_dw_bf16" else name
        assert similar_preset(replace(preset(), name="mine")) == similar
    assert similar_preset(delayed(history=History(16, margin=4.0))) == "delayed"
    assert similar_preset(replace(rowwise(), dx=None, dw=None)) == "rowwise"
    assert similar_preset(replace(rowwise(), rotate=("y",))) == "custom"
    assert similar_preset(groupwise(size=32)) == "custom"
    wide = Cast("e5m2", TENSOR)
    assert similar_preset(replace(tensorwise(), y=Gemm(wide, wide))) == "custom"  # packing would keep scales for e5m2
