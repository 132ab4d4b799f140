"""Packing with scales of least squared error and of powers of two, and which layers share a scale."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from metrics import distance
from safetensors.torch import load_file
from tiny_models import make_model, open_theirs, outputs
from torch import Tensor
from typer.testing import CliRunner

from octavo.artifact.packed.scheme import SCHEMES
from octavo.packing import PackReport, pack
from octavo.runtime import load_packed
from octavo_cli.app import app

SCHEME_NAMES = [name for name in SCHEMES if name != "static"]
Q_K_V = tuple(f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama", seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def packing(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PackReport]:
    """packing(scheme, weights, pow2): the report of that packing, which is made once."""
    root = tmp_path_factory.mktemp("packed")

    @cache
    def make(scheme: str, weights: str, pow2: bool) -> PackReport:
        return pack(source, root / f"{scheme} {weights} {pow2}", scheme=scheme, weights=weights, pow2=pow2)

    return make


@pytest.fixture(scope="module")
def truth(source: Path) -> Tensor:
    """The outputs of the source in float32."""
    return outputs(open_theirs(source, torch.float32))


def errors(packed: Path, source: Path, scheme: str) -> dict[str, float]:
    """The squared error of each packed weight, as transformers widens it; mx, which is exact in BF16, in that alone."""
    theirs = open_theirs(packed, torch.bfloat16 if scheme == "mx" else torch.float32)
    plain = load_file(source / "model.safetensors")
    outputs(theirs)  # it widens at the first call
    layers = json.loads((packed / "octavo.json").read_text())["layers"]
    wide = {name: theirs.get_submodule(name).weight.double() for name in layers}
    return {name: float((w - plain[f"{name}.weight"].double()).square().sum()) for name, w in wide.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_the_gain_by_layer_is_that_of_the_files(
    source: Path, packing: Callable[..., PackReport], scheme: str, pow2: bool
) -> None:
    amax, report = packing(scheme, "amax", pow2), packing(scheme, "mse", pow2)
    assert report.gains.keys() == report.packed.keys()
    before, after = (errors(each.folder, source, scheme) for each in (amax, report))
    for name, gain in report.gains.items():
        ratio = torch.tensor(before[name] / after[name], dtype=torch.float64)
        assert gain == pytest.approx(10 * float(ratio.log10()), abs=2e-3)
        assert gain >= 0 or scheme == "tensor"  # the least error of layers that share a scale may cost one of them
    if not pow2 and scheme.startswith("group"):
        assert min(report.gains.values()) > 0.8
    record = json.loads((report.folder / "octavo.json").read_text())["weight_scales"]
    assert record["rule"] == "mse"
    assert record["sqnr_gain_db"] == report.gains
    plain = json.loads((amax.folder / "octavo.json").read_text())
    assert plain["weight_scales"] == {"rule": "amax", "pow2": pow2}
    assert plain["schemes"][scheme]["weight"]["scale"] == ("e8m0" if scheme == "mx" else "pow2" if pow2 else "fp32")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("weights", ["amax", "mse"])
@pytest.mark.parametrize("scheme", [name for name in SCHEME_NAMES if name != "mx"])
def test_power_of_two_scales_are_such_and_no_smaller(
    truth: Tensor, packing: Callable[..., PackReport], scheme: str, weights: str
) -> None:
    rounded = packing(scheme, weights, True).folder
    plain, stored = (load_file(each / "model.safetensors") for each in (packing(scheme, "amax", False).folder, rounded))
    for name, scale in stored.items():
        if name.endswith("_scale"):
            assert torch.equal(torch.exp2(scale.log2().round()), scale)
            least = 1.0 if weights == "amax" else 0.5
            assert (scale >= least * plain[name]).all()
            assert (scale < 2 * plain[name]).all()
    ours, theirs = outputs(load_packed(rounded).model), outputs(open_theirs(rounded, torch.float32))
    assert distance(ours, truth) < 0.2
    assert distance(ours, theirs) < 1.5 * distance(theirs, truth)


def test_powers_of_two_in_the_fp8_layout(source: Path, truth: Tensor, tmp_path: Path) -> None:
    pack(source, tmp_path / "out", scheme="block", layout="fp8", pow2=True, weights="mse")
    scale = load_file(tmp_path / "out" / "model.safetensors")[f"{Q_K_V[0]}.weight_scale_inv"]
    assert torch.equal(torch.exp2(scale.log2().round()), scale)
    assert distance(outputs(load_packed(tmp_path / "out").model), truth) < 0.2


@pytest.mark.parametrize("weights", ["amax", "mse"])
def test_layers_share_a_scale_unless_told_otherwise(source: Path, tmp_path: Path, weights: str) -> None:
    shared = pack(source, tmp_path / "shared", scheme="tensor", weights=weights)
    own = pack(source, tmp_path / "own", scheme="tensor", weights=weights, share=False)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("shared", "own"))
    assert len({float(ours[f"{name}.weight_scale"]) for name in Q_K_V}) == 1
    scales = [float(theirs[f"{name}.weight_scale"]) for name in Q_K_V]
    assert len(set(scales)) == 3
    assert not shared.ratios
    assert own.ratios[", ".join(Q_K_V)] == pytest.approx(max(scales) / min(scales))


def test_it_is_deterministic(source: Path, tmp_path: Path) -> None:
    for name in "ab":
        pack(source, tmp_path / name, weights="mse", layers={"*.o_proj": "tensor", "*.down_proj": "group64"})
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


def test_an_unknown_rule(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown rule 'best' for weights: choose one of amax, mse"):
        pack(source, tmp_path / "out", weights="best")
    assert not (tmp_path / "out").exists()


def test_the_command_reports_the_gain(source: Path, tmp_path: Path) -> None:
    arguments = ["pack", str(source), str(tmp_path / "out"), "--scheme", "group32", "--weights", "mse", "--pow2"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "SQNR gained by mse" in done.output
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())["weight_scales"]
    assert (record["rule"], record["pow2"]) == ("mse", True)
