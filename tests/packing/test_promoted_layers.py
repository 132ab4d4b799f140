"""Runs whose early warning moved layers to BF16: they are packed as they ran."""

import json

import pytest
from packed_examples import LLAMA, lively, write_run
from typer.testing import CliRunner

from octavo.artifact.files import ArtifactError
from octavo.models import Llama, LlamaConfig
from octavo.packing import pack
from octavo_cli.app import app

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.0.mlp"
DOWN = f"{MLP}.down_proj"


def promotion(layer, step=5, to="bf16"):
    return {"step": step, "layer": layer, "to": to, "rule": "underflow"}


@pytest.fixture
def run(tmp_path):
    """A run of seven steps."""
    model = lively(Llama(LlamaConfig(**LLAMA)))
    return write_run(tmp_path / "run", model, model.config.to_hf(), recipe="rowwise")


def promote(run, *promotions):
    (run / "actions.json").write_text(json.dumps({"promotions": promotions, "rollbacks": []}))


def test_they_stay_in_bf16_with_those_that_readers_fuse_with_them(run, tmp_path):
    later, narrow = promotion(f"{MLP}.up_proj", step=8), promotion(f"{ATTENTION}.o_proj", to="e5m2")
    promote(run, promotion(DOWN), promotion(f"{ATTENTION}.k_proj", step=7), later, narrow)
    report = pack(run, tmp_path / "packed")
    fused = f"readers fuse it with {ATTENTION}.k_proj, which training moved to BF16"
    expected = {
        DOWN: "training moved it to BF16 at step 5 (underflow)",
        f"{ATTENTION}.q_proj": fused,
        f"{ATTENTION}.k_proj": "training moved it to BF16 at step 7 (underflow)",
        f"{ATTENTION}.v_proj": fused,
    }
    assert {name: why for name, why in report.skipped.items() if name != "lm_head"} == expected
    assert len(report.packed) == 14 - len(expected)
    ignored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["ignore"]
    assert expected.keys() <= set(ignored)


def test_the_command_says_so_and_packs_a_layer_that_is_named(run, tmp_path):
    promote(run, promotion(DOWN))
    said = CliRunner().invoke(app, ["pack", str(run), str(tmp_path / "packed")], env={"COLUMNS": "300"}).output
    assert f"{DOWN}: training moved it to BF16 at step 5 (underflow)" in said
    report = pack(run, tmp_path / "asked", layers={DOWN: "channel"})
    assert report.packed[DOWN] == "channel"


def test_a_run_that_moved_all_its_layers_is_refused(run, tmp_path):
    leaves = [f"self_attn.{leaf}_proj" for leaf in "qkvo"] + [f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
    promote(run, *(promotion(f"model.layers.{i}.{leaf}") for i in range(2) for leaf in leaves))
    with pytest.raises(
        ValueError, match=r"every layer .* to BF16: pack an earlier step .--step., or name layers in --layer"
    ):
        pack(run, tmp_path / "packed")


def test_a_damaged_file_of_actions_is_refused(run, tmp_path):
    promote(run, {"layer": DOWN})
    with pytest.raises(ArtifactError, match=r"actions.json is damaged: KeyError 'to'"):
        pack(run, tmp_path / "packed")
