"""Arguments that a person types by mistake in Python: the message says what to give."""

import json
import typing
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import octavo
from octavo.calibration import calibrate
from octavo.data import read_text
from octavo.distributed import expert_parallel
from octavo.evaluation.metrics import Budget
from octavo.inference.kv_cache import check_settings
from octavo.numerics.formats import NARROW_FORMATS
from octavo.numerics.qtensor import ROUNDINGS, SCALE_KINDS
from octavo.packing import convert_layout, freeze_folder, pack, pack_frozen, pack_within, unpack
from octavo.packing.gguf_export import export_gguf
from octavo.packing.options import PackOptions
from octavo.packing.transforms import fold
from octavo.recipe import PRESETS
from octavo.verification import verify


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("convert", octavo.convert),
        ("restore", octavo.restore),
        ("octavo.scales", octavo.scales.update_scales),
        ("watch", octavo.watch),
        ("cast_once", lambda model: octavo.scales.cast_once(model).__enter__()),
        ("expert_parallel", lambda model: expert_parallel(model, None)),
    ],
)
def test_something_else_than_a_model(name, function):
    with pytest.raises(TypeError, match=rf"{name} takes a torch.nn.Module, got 'llama': pass the model itself"):
        function("llama")


def test_something_else_than_a_mesh_or_a_list():
    with pytest.raises(TypeError, match=r"expert_parallel takes a DeviceMesh, such as init_device_mesh.*got None"):
        expert_parallel(nn.Linear(8, 8), None)
    with pytest.raises(TypeError, match=r"data is a list of sources, got the string 'book.txt': give \['book.txt'\]"):
        read_text("book.txt")


@pytest.mark.parametrize(
    ("skip", "got"),
    [
        ("head", r"the string 'head': give \['head'\]"),  # a sequence too, of its letters
        (None, r"None: give \['lm_head'\]"),
        ([5], r"\[5\]: give \['lm_head'\]"),
    ],
)
@pytest.mark.parametrize("use", [lambda s: octavo.convert(nn.Linear(8, 8), skip=s), lambda s: PackOptions(skip=s)])
def test_globs_that_are_no_strings(use, skip, got):
    with pytest.raises(TypeError, match=rf"skip takes a list of globs, got {got}"):
        use(skip)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (None, r"takes a list of batches, got NoneType: give \[batch\]"),
        ({"x": torch.ones(2, 8)}, r"takes a list of batches, got dict: give \[batch\]"),
        ([None], "the layer '0' takes a tensor, got NoneType"),
        ([torch.ones(2, 8).numpy()], "the layer '0' takes a tensor, got ndarray"),
    ],
)
@pytest.mark.parametrize("function", [octavo.scales.freeze_scales, octavo.scales.saturation])
def test_batches_that_are_none(function, batches, message):
    model = nn.Sequential(nn.Linear(8, 8))
    octavo.convert(model, "delayed")
    octavo.scales.seed_scales(model, SimpleNamespace(input_histories={"0": [1.0]}))
    with pytest.raises(TypeError, match=message):
        function(model, batches)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(8), nn.Sequential(nn.LazyConv2d(4, 1)), nn.LazyBatchNorm1d()])
def test_a_model_whose_parameters_have_no_shape_yet_stays_as_it_is(lazy):
    model = nn.Sequential(nn.Linear(8, 8), lazy)
    before = [(type(module), vars(module).keys()) for module in model.modules()]
    message = r"1\..*(weight|running_mean) \(\d such.*no shape yet: run the model on one batch"
    with pytest.raises(ValueError, match=message):
        octavo.convert(model)
    assert [(type(module), vars(module).keys()) for module in model.modules()] == before


@pytest.mark.parametrize(
    "function",
    [
        pack, unpack, convert_layout, export_gguf,
        lambda source, out: pack_frozen(source, out, ["x"]),
        lambda source, out: pack_within(source, out, [Budget.parse("kl=1")], ["x"]),
        lambda source, out: freeze_folder(source, out, ["x"]),
        lambda source, out: calibrate(source, ["x"], out),
        lambda source, out: fold(source, out, rotate=True),
        lambda source, out: verify(source, source),
    ],
    ids=["pack", "unpack", "convert_layout", "export_gguf", "pack_frozen", "pack_within", "freeze_folder", "calibrate",
         "fold", "verify"],
)  # fmt: skip
def test_folders_may_be_strings(function, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none: give"):
        function(str(tmp_path / "none"), str(tmp_path / "out"))


def test_an_editor_knows_every_name():
    """The names in the types of arguments are those that the functions take."""
    recipes = get_args(typing.get_type_hints(octavo.convert)["recipe"])
    assert {name for kind in recipes for name in get_args(kind)} == {*PRESETS, "auto"}
    hints = typing.get_type_hints(octavo.quantize)
    assert set(get_args(hints["format"])) == NARROW_FORMATS.keys() - {"int8"}
    assert (get_args(hints["scale"]), get_args(hints["rounding"])) == (SCALE_KINDS, ROUNDINGS)
    hints = typing.get_type_hints(octavo.load, localns={"PreTrainedModel": PreTrainedModel})
    assert hints["return"] is PreTrainedModel
    assert get_args(hints["attention"]) == ("bf16", "fp8")
    for cache in get_args(hints["kv_cache"]):
        assert cache == "auto" or check_settings(cache, None, None) is None


def test_a_report_is_data():
    report = octavo.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), skip=["1"])
    found = json.loads(json.dumps(report.to_dict()))
    rows = [(row["name"], row["shape"], row["reason"] == "") for row in found["layers"]]
    assert rows == [("0", [8, 8], True), ("1", [4, 8], False)]
    assert found["recipe"] == octavo.recipe.PRESETS["rowwise"]().to_dict()
    assert found["backends"]["y"]["name"] == report.backends["y"].name
    assert found["coverage"]["parameters"] == report.coverage.parameters
