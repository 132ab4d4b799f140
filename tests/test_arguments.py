"""Arguments that a person types by mistake in Python: the message says what to give."""

import pytest
import torch
from torch import nn

import octavo
from octavo.calibration import calibrate
from octavo.dist import expert_parallel
from octavo.evaluation import Budget
from octavo.folding import fold
from octavo.gguf import export_gguf
from octavo.packing import convert_layout, freeze_folder, pack, pack_frozen, pack_within, unpack
from octavo.packing.options import PackOptions
from octavo.text import read_text
from octavo.verification import verify


def enter_cast_once(model):
    with octavo.cast_once(model):
        pass


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("convert", octavo.convert),
        ("restore", octavo.restore),
        ("update_scales", octavo.update_scales),
        ("watch", octavo.watch),
        ("cast_once", enter_cast_once),
        ("expert_parallel", lambda model: expert_parallel(model, None)),
    ],
)
def test_something_else_than_a_model(name, function):
    with pytest.raises(TypeError, match=rf"{name} takes a torch.nn.Module, got 'llama': pass the model itself"):
        function("llama")


def test_something_else_than_a_mesh():
    with pytest.raises(TypeError, match=r"expert_parallel takes a DeviceMesh, such as init_device_mesh.*got None"):
        expert_parallel(nn.Linear(8, 8), None)


def test_a_converted_layer_is_made_by_convert():
    with pytest.raises(TypeError, match=r"octavo.Linear is made of an nn.Linear: .*octavo.convert"):
        octavo.Linear(8, 8)


def test_a_string_for_a_list():
    """A string is a sequence too, of its letters."""
    with pytest.raises(TypeError, match=r"skip takes a list of globs, got the string 'head': give \['head'\]"):
        octavo.convert(nn.Linear(8, 8), skip="head")
    with pytest.raises(TypeError, match=r"skip takes a list of globs, got the string 'head': give \['head'\]"):
        PackOptions(skip="head")
    with pytest.raises(TypeError, match=r"data is a list of sources, got the string 'book.txt': give \['book.txt'\]"):
        read_text("book.txt")


@pytest.mark.parametrize(
    "function",
    [
        lambda source, out: pack(source, out),
        lambda source, out: pack_frozen(source, out, ["x"]),
        lambda source, out: pack_within(source, out, [Budget.parse("kl=1")], ["x"]),
        lambda source, out: unpack(source, out),
        lambda source, out: convert_layout(source, out),
        lambda source, out: freeze_folder(source, out, ["x"]),
        lambda source, out: calibrate(source, ["x"], out),
        lambda source, out: fold(source, out, rotate=True),
        lambda source, out: export_gguf(source, out),
        lambda source, out: verify(source, source),
    ],
    ids=["pack", "pack_frozen", "pack_within", "unpack", "convert_layout", "freeze_folder", "calibrate", "fold",
         "export_gguf", "verify"],
)  # fmt: skip
def test_folders_may_be_strings(function, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none: give"):
        function(str(tmp_path / "none"), str(tmp_path / "out"))


def test_reports_are_shown_as_tables():
    """In a notebook and at a prompt, which show the repr of what a call returns."""
    model = nn.Sequential(nn.Linear(8, 8))
    report, flow = octavo.convert(model), octavo.dtype_flow(model, torch.ones(2, 8))
    assert (repr(report), repr(flow)) == (str(report), str(flow))
