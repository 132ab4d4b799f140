"""The early warning of runs on a GPU: no step uses a bad gradient, and compiled blocks go on with promoted layers."""

import json

import pytest
import torch
from early_warning_examples import DOWN, UP, breaks_in_fp8, event

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]
SETTINGS = {
    "device": "cuda", "width": 64, "mlp_width": 128, "context": 64, "steps": 30, "log_every": 100, "save_every": 100,
    "evaluate_every": 100, "watch": {"on_warning": "promote"},
}  # fmt: skip


def promoted(trainer):
    actions = json.loads((trainer.run_folder.path / "actions.json").read_text())
    return {promotion["layer"]: promotion["to"] for promotion in actions["promotions"]}


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_bad_step_is_repeated_with_its_layer_in_bf16(begin, recipe):
    trainer = begin(recipe=recipe, **SETTINGS)
    breaks_in_fp8(trainer)
    assert trainer.run().step == 30
    assert promoted(trainer) == {DOWN: "bf16"}
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_compiled_blocks_go_on_with_promoted_layers(begin, found):
    trainer = begin(compile={"blocks": True}, **SETTINGS)
    found(10, event(DOWN), event(UP, "underflow", "dy"))
    with torch._dynamo.config.patch(recompile_limit=8):
        assert trainer.run().step == 30
    assert promoted(trainer) == {DOWN: "bf16", UP: "e5m2"}
