"""Calibration of the experts of a mixture, against the model run at once; and static scales that follow from it."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from calibration_examples import whole_model
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from typer.testing import CliRunner

import octavo
from octavo.calibration import Calibration, calibrate
from octavo.evaluation import PromptOptions
from octavo.evaluation.prompts import open_tokenizer, read_prompts
from octavo.packing import pack
from octavo.runtime.packed_experts import PackedGroupedLinear
from octavo.verification import verify
from octavo_cli.app import app

PROMPTS = PromptOptions(samples=8, context=32, batch=4, seed=3)
SIZES = {"moe_intermediate_size": 48, "intermediate_size": 48}
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3moe": ("mlp", "gate_proj", "up_proj", "down_proj")}


@pytest.fixture(scope="module")
def unreached(tmp_path_factory, data) -> tuple[Path, Path]:
    """A Mixtral whose first router never chooses experts 2 and 3, and its calibration."""
    root = tmp_path_factory.mktemp("unreached")
    folder = make_model(root / "model", "mixtral", **SIZES, num_experts_per_tok=1)
    tensors = load_file(folder / "model.safetensors")
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[1], router[2:] = -router[0], 0  # of the first two one is above zero
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    calibrate(folder, data, root / "calibrated", prompts=PROMPTS)
    return folder, root / "calibrated"


@pytest.mark.parametrize("kind", NAMES)
def test_the_amax_of_every_expert_is_that_of_the_model_run_at_once(kind, tmp_path, data):
    folder = make_model(tmp_path / kind, kind, **SIZES)
    found = calibrate(folder, data, tmp_path / "out", prompts=PROMPTS)
    prompts = read_prompts(data, open_tokenizer(folder), PROMPTS)
    seen: dict[str, list[torch.Tensor]] = {}
    model, state = whole_model(folder), load_file(folder / "model.safetensors")
    block, gate, up, down = NAMES[kind]

    def note(name):
        def hook(module, args):
            x, index, _ = args
            for e in range(4):
                n = x[(index == e).any(1)]
                path = f"{name}.experts.{e}"
                inner, outer = (F.linear(n, state[f"{path}.{leaf}.weight"].bfloat16()) for leaf in (gate, up))
                seen.setdefault(f"{path}.{gate}", []).append(n)
                seen.setdefault(f"{path}.{down}", []).append(F.silu(inner) * outer)

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(note(f"model.layers.{i}.{block}"))
    with torch.no_grad():
        for batch in prompts.batches(4):
            model(batch)
    assert len(seen) == 2 * 4 * 2
    for name, tensors in seen.items():
        x = torch.cat(tensors).float().abs()
        statistics = found.sites[f"{name}.input"]
        assert statistics.tokens == len(x), name
        assert statistics.amax == x.max().item(), name
    assert found.layers[f"model.layers.1.{block}.experts.2.{up}"] == f"model.layers.1.{block}.experts.2.{gate}.input"
    assert found.unseen == []


def test_an_expert_without_tokens_is_named_and_has_the_scale_of_others(unreached):
    found = Calibration.load(unreached[1])
    path = "model.layers.0.block_sparse_moe.experts"
    assert sorted(found.unseen) == [f"{path}.{e}.{leaf}" for e in (2, 3) for leaf in ("w1", "w2", "w3")]
    assert found.record["unseen_experts"] == found.unseen
    for leaf in ("w1", "w2"):
        seen = [float(found.scale(f"{path}.{e}.{leaf}")) for e in (0, 1)]
        assert float(found.scale(f"{path}.2.{leaf}")) == max(seen) > min(seen) > 0


def test_static_experts_run_and_verify(unreached, tmp_path):
    folder, calibrated = unreached
    report = pack(folder, tmp_path / "packed", experts=True, scheme="static", calibration=calibrated)
    tensors = load_file(report.folder / "model.safetensors")
    scales = {name: t for name, t in tensors.items() if name.endswith("input_scale") and ".experts." in name}
    assert len(scales) == 2 * 4 * 3
    assert all(t.shape == (1,) and float(t) > 0 and bool(t.isfinite()) for t in scales.values())
    recorded = json.loads((report.folder / "octavo.json").read_text())["calibration"]["unseen_experts"]
    assert len(recorded) == 6
    model = octavo.load(report.folder)
    stack = model.model.layers[1].mlp.experts.down_proj
    assert isinstance(stack, PackedGroupedLinear)
    stored = [scales[f"model.layers.1.block_sparse_moe.experts.{e}.w2.input_scale"] for e in range(4)]
    assert torch.equal(stack.input_scale, torch.cat(stored))
    found = verify(report.folder, folder)
    assert found.ok, [str(finding) for finding in found.findings]
    assert [reader.outcome for reader in found.readers] == ["agrees", "agrees", "not run"]


def test_static_experts_are_not_packed_without_a_calibration(unreached, tmp_path):
    with pytest.raises(ValueError, match="those of experts come from a calibration alone: give --calibration"):
        pack(unreached[0], tmp_path / "packed", experts=True, layers={"*.experts.*": "static"})


def test_the_command_names_experts_without_tokens(unreached, tmp_path, data):
    command = ["calibrate", str(unreached[0]), str(tmp_path / "out"), *(f"--data={source}" for source in data)]
    done = CliRunner().invoke(app, [*command, "--samples", "4", "--context", "16"], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    named = "no token reached 6 matrices of experts (model.layers.0.block_sparse_moe.experts.2.w1, "
    assert named in " ".join(done.output.split())
