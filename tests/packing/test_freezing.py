"""Folders of the scheme static whose scales of inputs come from a warm-up, against calibrations and other readers."""

import json
from pathlib import Path

import pytest
import torch
from metrics import distance
from packed_examples import LLAMA, write_run
from safetensors.torch import load_file
from tiny_models import make_model, open_theirs, outputs, write_text
from torch import Tensor
from typer.testing import CliRunner

import octavo
from octavo.artifact.packed.layouts import read_config
from octavo.artifact.packed.reader import PackedTensors
from octavo.calibration import calibrate
from octavo.evaluation import PromptOptions
from octavo.evaluation.prompts import open_prompts
from octavo.hf.meta_model import read_meta_model
from octavo.models import Llama, LlamaConfig
from octavo.packing import PackOptions, convert_layout, freeze_folder, pack, pack_frozen
from octavo.runtime import load_packed
from octavo_cli.app import app

PROMPTS = PromptOptions(16, 64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(write_text(tmp_path_factory.mktemp("data") / "text.txt"))]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "bf16", "qwen2", num_hidden_layers=1)


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def batches(folder: Path, data: list[str]) -> list[Tensor]:
    return open_prompts(data, folder, PROMPTS, read_meta_model(read_config(folder), folder)).batches(PROMPTS.batch)


def test_a_model_folder_gets_the_scales_of_a_calibration(bf16: Path, data: list[str], tmp_path: Path) -> None:
    """A calibration runs the model block by block, a warm-up as a whole: the same bytes and scales."""
    calibrate(bf16, data, tmp_path / "calibrated", prompts=PROMPTS)
    pack(bf16, tmp_path / "expected", scheme="static", calibration=tmp_path / "calibrated")
    report = pack_frozen(bf16, tmp_path / "out", data, prompts=PROMPTS)
    assert set(report.packed.values()) == {"static"}
    expected, found = stored(tmp_path / "expected"), stored(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    assert record["calibration"] == {"rule": "frozen"}
    assert (record["warm_up"]["prompts"], record["warm_up"]["context"]) == (9, 64)


def test_a_run_that_was_not_trained_with_delayed_is_frozen(data: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**LLAMA))  # type: ignore[arg-type]
    run = write_run(tmp_path / "run", model, model.config.to_hf(), skip=("*.down_proj",))
    report = pack_frozen(run, tmp_path / "out", data, prompts=PROMPTS)
    assert not [name for name in report.packed if name.endswith("down_proj")]
    assert "model.layers.0.mlp.up_proj.input_scale" in stored(tmp_path / "out")
    assert distance(outputs(load_packed(tmp_path / "out").model), outputs(open_theirs(tmp_path / "out"))) < 0.05


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_a_packed_folder_is_frozen_as_its_model_in_memory(
    bf16: Path, data: list[str], tmp_path: Path, scheme: str
) -> None:
    pack(bf16, tmp_path / "packed", scheme=scheme)
    result = freeze_folder(tmp_path / "packed", tmp_path / "out", data, prompts=PROMPTS)
    assert result.lossless == (scheme == "tensor")
    model = octavo.load(tmp_path / "packed")
    scales = octavo.freeze_scales(model, batches(bf16, data))
    found = PackedTensors(tmp_path / "out")
    assert {name: float(found.input_scale(name)) for name in found.packing.schemes} == {
        name: float(scale) for name, scale in scales.items()
    }
    assert torch.equal(outputs(model), outputs(octavo.load(tmp_path / "out")))
    clipped = octavo.saturation(model, batches(bf16, data))
    assert clipped.keys() == scales.keys()
    assert max(clipped.values()) < 1e-4  # not 0: static layers give the layers after them other inputs
    theirs = open_theirs(tmp_path / "out", torch.float32)
    assert distance(outputs(model.float()), outputs(theirs)) < 1e-2
    with pytest.raises(ValueError, match="has no layer whose scales can be frozen"):
        octavo.freeze_scales(model, batches(bf16, data))


def test_a_frozen_model_answers_the_same_in_every_batch(bf16: Path, data: list[str], tmp_path: Path) -> None:
    pack_frozen(bf16, tmp_path / "out", data, prompts=PROMPTS)
    model = octavo.load(tmp_path / "out").float()
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        alone, again = model(ids).logits, model(ids).logits
        beside = model(torch.cat([ids, 255 - ids])).logits[:1]
    assert torch.equal(alone, again)
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-5)


def test_scales_of_a_converted_model_are_packed(bf16: Path, data: list[str], tmp_path: Path) -> None:
    model = open_theirs(bf16)
    octavo.convert(model, octavo.Recipe("no margin", *three_delayed()))
    scales = octavo.freeze_scales(model, batches(bf16, data))
    pack(bf16, tmp_path / "out", input_scales=scales, share=False)
    packed = stored(tmp_path / "out")
    for name, scale in scales.items():
        assert torch.equal(packed[f"{name}.input_scale"], scale)
    assert distance(outputs(model.eval()), outputs(load_packed(tmp_path / "out").model)) < 1e-2


def three_delayed() -> tuple[octavo.Gemm, octavo.Gemm, octavo.Gemm]:
    cast = octavo.Cast(granularity=octavo.Granularity(None, None), history=octavo.History())
    return octavo.Gemm(cast, cast), octavo.Gemm(cast, cast), octavo.Gemm(cast, cast)


def test_what_cannot_be_frozen(bf16: Path, data: list[str], tmp_path: Path) -> None:
    pack_frozen(bf16, tmp_path / "static", data, prompts=PROMPTS)
    with pytest.raises(ValueError, match="stores the scales of its inputs already"):
        freeze_folder(tmp_path / "static", tmp_path / "out", data)
    pack(bf16, tmp_path / "packed")
    with pytest.raises(ValueError, match=r"warm the model up on text \(--freeze\)"):
        convert_layout(tmp_path / "packed", tmp_path / "out", scheme="static")
    with pytest.raises(ValueError, match="only the scheme static stores scales of inputs, and channel is given"):
        pack_frozen(bf16, tmp_path / "out", data, PackOptions(scheme="channel"))
    with pytest.raises(ValueError, match="input_scales has no scale of model.layers.0.self_attn.q_proj"):
        pack(bf16, tmp_path / "out", input_scales={"other": torch.ones(1)})
    for bad in (torch.zeros(1), torch.tensor([torch.nan]), torch.ones(2)):
        with pytest.raises(ValueError, match="the scale of a must be one positive number"):
            pack(bf16, tmp_path / "out", input_scales={"a": bad})
    assert not (tmp_path / "out").exists()


def test_the_commands(bf16: Path, data: list[str], tmp_path: Path) -> None:
    def call(*words: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, result.output or result.exception
        return result.stdout or str(result.exception)

    assert "7, static" in call("pack", bf16, tmp_path / "one", "--freeze", 4, "--data", *data)
    call("pack", bf16, tmp_path / "packed", "--scheme", "tensor")
    output = call("convert-layout", tmp_path / "packed", tmp_path / "two", "--freeze", 4, "--data", *data)
    assert "no weight changed" in output
    one, two = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(float(two[n] / one[n] - 1) < 0.2 for n in one if n.endswith("input_scale"))
    assert "--freeze runs the model on text" in call("pack", bf16, tmp_path / "x", "--freeze", 4, code=1)
    both = call("pack", bf16, tmp_path / "x", "--freeze", 4, "--budget", "kl=1", "--data", *data, code=1)
    assert "--budget and --freeze both run the model" in both
    wrong = call("convert-layout", tmp_path / "packed", tmp_path / "x", "--freeze", 4, "--scheme", "block", code=1)
    assert "only the scheme static has" in wrong
