"""A folder whose scales are reciprocal: every command that reads it says so."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import Folders
from typer.testing import CliRunner
from verify_examples import change_tensors

import octavo
from octavo.packing import convert_layout, pack, unpack
from octavo.verification.pipeline import verify
from octavo_cli.app import app

LAYERS = 14


@pytest.fixture
def model(made: Folders) -> Path:
    return made("llama")


def pack_block(model: Path, out: Path, reciprocal: bool) -> Path:
    """In the layout fp8 of Hugging Face, whose scales are called `weight_scale_inv` and multiply all the same."""
    pack(model, out, scheme="block", layout="fp8")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: 1 / t for name, t in tensors.items() if name.endswith("_scale_inv")})

    if reciprocal:
        change_tensors(out, change)
    return out


def test_load_warns(model: Path, tmp_path: Path) -> None:
    octavo.load(pack_block(model, tmp_path / "right", reciprocal=False))  # a warning is an error
    wrong = pack_block(model, tmp_path / "wrong", reciprocal=True)
    with pytest.warns(UserWarning, match=rf"wrong: the weight scales of .*\({LAYERS} of {LAYERS} packed layers\) look"):
        octavo.load(wrong)


@pytest.mark.parametrize("repack", [unpack, convert_layout])
def test_unpack_and_convert_layout_warn(model: Path, tmp_path: Path, repack: Callable[[Path, Path], object]) -> None:
    repack(pack_block(model, tmp_path / "right", reciprocal=False), tmp_path / "first")  # a warning is an error
    with pytest.warns(UserWarning, match="wrong: the weight scales of .* look reciprocal"):
        repack(pack_block(model, tmp_path / "wrong", reciprocal=True), tmp_path / "second")


def test_inspect_says_it(model: Path, tmp_path: Path) -> None:
    for wrong in (False, True):
        folder = pack_block(model, tmp_path / f"{wrong}", wrong)
        said, listed = (CliRunner().invoke(app, ["inspect", str(folder), *more]).output for more in ([], ["--json"]))
        assert ("look reciprocal" in said) == wrong
        assert len(json.loads(listed)["reciprocal_scales"]) == LAYERS * wrong


def test_verify_says_it_where_weights_are_not_compared(model: Path, tmp_path: Path) -> None:
    assert verify(pack_block(model, tmp_path / "right", reciprocal=False), model, folded=True).ok
    report = verify(pack_block(model, tmp_path / "wrong", reciprocal=True), model, folded=True)
    [finding] = report.findings
    assert finding.kind == "scale"
    assert "look reciprocal" in finding.message
    assert report.not_run
