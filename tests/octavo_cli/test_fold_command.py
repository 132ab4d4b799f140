"""octavo fold, as it is typed."""

import json
import re

import pytest
import torch
from calibration_examples import write_model
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


def test_smooth_and_rotate(octavo, model, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("It was a bright cold day in April. " * 20)
    options = ("--samples", 8, "--context", 24)
    assert octavo("calibrate", model, tmp_path / "calibrated", "--data", data, *options)[0] == 0
    code, out, err = octavo(
        "fold", model, tmp_path / "out", "--smooth", tmp_path / "calibrated", "--alpha", 0.6, "--rotate"
    )
    assert (code, err) == (0, "")
    assert f"folded {model} into {tmp_path / 'out'}" in out
    assert re.search(r"tensors smoothed +3, by factors of ", out)
    assert "residual stream in blocks of 32, heads in blocks of 16" in out
    assert "has its own weight now" in out
    assert json.loads((tmp_path / "out" / "octavo.json").read_text())["folded"]["smooth"]["alpha"] == 0.6
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_errors_are_one_line(refused, model, tmp_path):
    for words, message in (
        ((), "--smooth with a calibration of the model, --rotate, or both"),
        (("--rotate", "--dtype", "float16"), "choose one of bfloat16, float32"),
        (("--smooth", tmp_path / "no"), "calibration.json is missing"),
    ):
        assert message in refused("fold", model, tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())
