"""Faults that are planted into one expert of a mixture in training: a rule names the layer and the expert.

The faults, the rules and the limits are those of test_planted_faults. Only recipes with scales by row run experts, so
nothing of an expert saturates, and no scale of one is fixed before.
"""

import json
import math

import pytest
import torch
from early_warning_examples import run_with

from octavo.packing import pack
from octavo.watching import read_watch

pytestmark = pytest.mark.slow

EXPERT = 2
RUN = {
    "model": "mixture", "experts": {"count": 4, "top_k": 2}, "batch": 4, "mlp_width": 256, "learning_rate": 1e-3,
    "log_every": 100, "evaluate_every": 100, "save_every": 100,
}  # fmt: skip
LAYER = "model.layers.1.mlp.experts"


def experts(trainer):
    return trainer.model.get_submodule(LAYER)


def gate_and_up(trainer):
    return experts(trainer).gate_up_proj.data[EXPERT].chunk(2)


def amax_jump(trainer):
    gate_and_up(trainer)[1].mul_(50)


def amax_jump_of_gradient(trainer):
    """The input of down is so small that the loss stays, and its gradient large."""
    experts(trainer).down_proj.data[EXPERT] *= 1e4
    gate_and_up(trainer)[1].mul_(1e-4)


def kurtosis_growth(trainer):
    """One column of the input of down is large, for the half of the tokens whose gate is open."""
    gate, up = gate_and_up(trainer)
    up[0] *= 300
    gate[0] = up[0]


def swiglu_alignment(trainer):
    gate, up = gate_and_up(trainer)
    up.copy_(-gate)


def underflow(trainer):
    """A third of the columns of down are far below the others."""
    experts(trainer).down_proj.data[EXPERT, :, ::3] *= 1e-8


def underflow_in_dw(trainer):
    """Three quarters of the tokens of the expert have tiny weights: each row has a scale, but dw has one exponent."""

    def weigh(module, args):
        x, index, weight = args
        few = torch.where(torch.arange(len(x)) % 4 == 0, 1.0, 1e-9)[:, None]
        return x, index, torch.where(index == EXPERT, few * weight, weight)

    experts(trainer).register_forward_pre_hook(weigh)


def dead_scale(trainer):
    experts(trainer).down_proj.data[EXPERT] = 0


def non_finite_w(trainer):
    experts(trainer).gate_up_proj.data[EXPERT, 3, 5] = math.inf


def non_finite_y(trainer):
    def overflow(module, args, y):
        return torch.where((args[1] == EXPERT).any(1, keepdim=True), math.inf, y)

    experts(trainer).register_forward_hook(overflow)


# Of each fault, its place, and the steps after which it is planted: training undoes some faults within steps, as tokens
# leave the expert, or its matrices change.
FAULTS = {
    amax_jump: ("down_proj", "x", 49),
    amax_jump_of_gradient: ("gate_up_proj", "dy", 49),
    kurtosis_growth: ("down_proj", "x", 42),
    swiglu_alignment: ("gate_up_proj", None, 53),
    underflow: ("down_proj", "w", 49),
    underflow_in_dw: ("down_proj", "dy", 42),
    dead_scale: ("down_proj", "w", 49),
    non_finite_w: ("", "w", 17),
    non_finite_y: ("", "y", 18),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_expert_is_named_within_ten_steps(begin, fault):
    leaf, operand, after = FAULTS[fault]
    found = run_with(begin(**RUN, steps=after + 10), [fault], after)
    assert min((event.step for event in found), default=after + 1) > after, found
    rule = fault.__name__.removesuffix("_in_dw").removesuffix("_of_gradient").removesuffix("_w").removesuffix("_y")
    name = f"{LAYER}.{leaf}".rstrip(".")
    events = [event for event in found if (event.rule, event.layer, event.operand) == (rule, name, operand)]
    assert {event.expert for event in events} == {EXPERT}, found
    assert f"expert {EXPERT}" in events[0].describe()


def test_the_rules_are_silent_in_a_clean_run(begin):
    assert run_with(begin(**RUN, steps=130), [], 0) == []


def test_the_layer_moves_to_bf16_and_stays_there(begin, go_on, tmp_path):
    trainer = begin(**RUN, steps=52, watch={"on_warning": "promote"})
    found = run_with(trainer, [dead_scale], 49)
    module = experts(trainer)
    assert module.recipe.name == "bf16"
    assert "promote" in {event.action for event in found if event.expert == EXPERT}
    actions = json.loads((trainer.run_folder.path / "actions.json").read_text())
    assert [each["layer"] for each in actions["promotions"]] == [LAYER]
    layers = {layer.name: layer for layer in read_watch(trainer.run_folder.path).layers}
    assert layers[f"{LAYER}.down_proj"].formats["x"] == "bf16"
    assert layers["model.layers.0.mlp.experts.down_proj"].formats["x"] == "e4m3"
    resumed = go_on(trainer.run_folder.path, "--steps", "54")
    assert experts(resumed).recipe.name == "bf16"
    resumed.run()
    packed = pack(trainer.run_folder.path, tmp_path / "packed", experts=True).packed
    assert any(".0.block_sparse_moe.experts." in name for name in packed)
    assert not any(".1.block_sparse_moe.experts." in name for name in packed)


def test_a_number_that_is_not_finite_moves_the_layer_too(begin):
    def breaks_in_fp8(trainer):
        def overflow(module, args, y):
            bad = (args[1] == EXPERT).any(1, keepdim=True)
            return torch.where(bad, math.inf, y) if module.recipe.quantized else y

        experts(trainer).register_forward_hook(overflow)

    trainer = begin(**RUN, steps=24, watch={"on_warning": "promote"})
    (event,) = run_with(trainer, [breaks_in_fp8], 17)
    assert (event.rule, event.layer, event.expert, event.action) == ("non_finite", LAYER, EXPERT, "promote")
    assert trainer.state.step == 24
