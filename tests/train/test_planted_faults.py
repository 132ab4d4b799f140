"""Faults that are planted into real runs: each rule finds its own within ten steps, at the layer that has it.

The steps before the planting are clean: the rules are silent there. In a mixture a fault is planted into one expert,
which the rule names with its layer. Only recipes with scales by row run experts, so nothing of an expert saturates, and
no scale of one is fixed before.
"""

import argparse
import ast
import inspect
import math
import re
import typing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from early_warning_examples import run_with

from octavo.packing import pack
from octavo.watching import read_watch

pytestmark = pytest.mark.slow

RUN = {"mlp_width": 256, "log_every": 100, "evaluate_every": 100, "save_every": 100, "learning_rate": 1e-3}
MIXTURE = RUN | {"model": "mixture", "experts": {"count": 4, "top_k": 2}, "batch": 4}
LAYER, EXPERT = "model.layers.1.mlp.experts", 2


def layer(trainer, name):
    return trainer.model.get_submodule(f"model.layers.1.{name}")


def gate_and_up(trainer):
    """Their weights in the MLP, or in the expert."""
    mlp = layer(trainer, "mlp")
    if hasattr(mlp, "experts"):
        return mlp.experts.gate_up_proj.data[EXPERT].chunk(2)
    return mlp.gate_proj.weight.data, mlp.up_proj.weight.data


def kurtosis_growth(trainer):
    """One column of the input of down is large, for the half of the tokens whose gate is open."""
    gate, up = gate_and_up(trainer)
    up[0] *= 300
    gate[0] = up[0]


def swiglu_alignment(trainer):
    gate, up = gate_and_up(trainer)
    up.copy_(-gate)


def gradient_of(name, change):
    return lambda trainer: layer(trainer, name).register_full_backward_pre_hook(
        lambda module, dy: (change(dy[0].float()).to(dy[0].dtype),)
    )


def scale(name, value):
    """A fault that multiplies the scale of x of a layer, and holds it."""

    def plant(trainer):
        history = layer(trainer, name).histories["x"]
        history.scale.fill_(value * float(history.scale))
        history.rule = replace(history.rule, interval=10**9)

    return plant


def non_finite(trainer):
    layer(trainer, "self_attn.k_proj").register_forward_hook(lambda module, args, y: y * math.nan)


# A third of the columns of dy of o_proj are far below the others.
underflow = gradient_of("self_attn.o_proj", lambda dy: dy * torch.where(torch.arange(dy.shape[-1]) % 3 == 0, 1e-8, 1.0))
# Three quarters of the tokens of v_proj have tiny gradients: each row has a scale, but dw has one exponent.
FEW = torch.where(torch.arange(32) % 4 == 0, 1.0, 1e-9)[:, None]

# Runs, which are watched as by default: the recipe and the steps after which faults are planted; and of each fault the
# rule, the layer and the operand where that finds it, and what plants it.
GROUPS = {
    ("rowwise", 42): [
        ("amax_jump", "self_attn.q_proj", "x", lambda t: layer(t, "input_layernorm").weight.data.mul_(50)),
        ("underflow", "self_attn.o_proj", "dy", underflow),
        ("kurtosis_growth", "mlp.down_proj", "x", kurtosis_growth),
    ],
    ("rowwise", 53): [
        ("swiglu_alignment", "mlp.gate_proj", None, swiglu_alignment),
        ("underflow", "self_attn.v_proj", "dy", gradient_of("self_attn.v_proj", lambda dy: dy * FEW)),  # in dw
        ("amax_jump", "self_attn.k_proj", "dy", gradient_of("self_attn.k_proj", lambda dy: 1e6 * dy)),
    ],
    ("delayed", 44): [
        ("saturation_spike", "self_attn.q_proj", "x", scale("self_attn.q_proj", 1 / 64)),
        ("dead_scale", "mlp.gate_proj", "x", scale("mlp.gate_proj", 1e20)),
        ("scale_gap", "self_attn.o_proj", "x", scale("self_attn.o_proj", 2**10)),
    ],
    ("rowwise", 51): [("dead_scale", "mlp.up_proj", "dy", gradient_of("mlp.up_proj", lambda dy: 0 * dy))],
    ("tensorwise", 17): [("non_finite", "self_attn.k_proj", "y", non_finite)],
    ("bf16", 27): [("loss_spike", None, None, lambda t: t.model.model.norm.weight.data.mul_(20))],
}


@pytest.mark.parametrize(("recipe", "after"), GROUPS)
def test_a_fault_is_found_within_ten_steps_and_nothing_before_it(begin, recipe, after):
    faults = GROUPS[recipe, after]
    rate = {"learning_rate": 1e-2} if recipe == "bf16" else {}  # a spike comes after a fall
    found = run_with(begin(recipe=recipe, **RUN | rate, steps=after + 10), [plant for *_, plant in faults], after)
    assert min(event.step for event in found) > after, found
    events = {(event.rule, event.layer, event.operand) for event in found}
    for rule, name, operand, _ in faults:
        assert (rule, name and f"model.layers.1.{name}", operand) in events, found


@pytest.mark.parametrize("run", [RUN, RUN | {"recipe": "delayed"}, MIXTURE], ids=["rowwise", "delayed", "mixture"])
def test_the_rules_are_silent_in_a_clean_run(begin, run):
    assert run_with(begin(**run, steps=150), [], 0) == []


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A text that two layers do not learn by heart: 300 kB of Python's own code."""
    path = tmp_path_factory.mktemp("data") / "code.txt"
    path.write_text("".join(Path(module.__file__).read_text() for module in (argparse, ast, inspect, typing)))
    return str(path)


@pytest.fixture
def learning(begin, code):
    """learning(recipe, rate, seed, faults): the events of 200 steps of width 64, with faults planted after 60."""
    sizes = {"width": 64, "heads": 4, "kv_heads": 4, "mlp_width": 176, "context": 64, "batch": 4}

    def run(recipe, rate, seed=0, faults=()):
        steps = {"steps": 200, "decay_steps": 600, "warmup": 20, "seed": seed}
        return run_with(begin(recipe=recipe, data=(code,), **RUN | sizes | steps | {"learning_rate": rate}), faults, 60)

    return run


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_a_rate_a_hundred_times_too_high_is_said_while_it_rises(learning, recipe):
    found = learning(recipe, 0.1)
    assert (found[0].rule, found[0].step) == ("rate_too_high", 4)
    assert {event.rule for event in found} >= ({"underflow"} if recipe == "rowwise" else set())


def harder(trainer):
    """Noise in the last hidden states that grows with the steps: the loss rises, and no step is a spike."""
    first, norm = trainer.state.step, trainer.model.model.norm
    norm.register_forward_hook(lambda module, args, y: y + 0.03 * (trainer.state.step - first) * torch.randn_like(y))


@pytest.mark.parametrize(
    ("recipe", "rate", "faults", "causes"),
    [
        ("bf16", 1e-3, [harder], r"a learning rate, 0.001, that is too high or too low; data"),
        ("bf16", 3e-2, [harder], r"the learning rate, too high since step \d+; (\d+ warnings? of \w+; )?data"),
        ("rowwise", 1e-3, [harder, underflow], r"\d+ warnings? of underflow; a learning rate, 0.001"),
    ],
)
def test_a_loss_that_stops_falling_is_a_stall_with_its_causes(learning, recipe, rate, faults, causes):
    stall = next(event for event in learning(recipe, rate, faults=faults) if event.rule == "loss_stall")
    assert stall.step > 128
    assert re.search(f"Causes, the likeliest first: {causes}", stall.message), stall.message


@pytest.mark.parametrize(("recipe", "seed"), [("bf16", 0), ("rowwise", 1), ("delayed", 2)])
def test_at_the_right_rate_nothing_is_said(learning, recipe, seed):
    assert learning(recipe, 1e-3, seed) == []


# ---- Faults of one expert of a mixture


def experts(trainer):
    return layer(trainer, "mlp.experts")


def jump_of_the_gradient(trainer):
    """The input of down is so small that the loss stays, and its gradient large."""
    experts(trainer).down_proj.data[EXPERT] *= 1e4
    gate_and_up(trainer)[1].mul_(1e-4)


def tiny_columns(trainer):
    """A third of the columns of down are far below the others."""
    experts(trainer).down_proj.data[EXPERT, :, ::3] *= 1e-8


def tiny_tokens(trainer):
    """Three quarters of the tokens of the expert have tiny weights: each row has a scale, but dw has one exponent."""

    def weigh(module, args):
        x, index, weight = args
        few = torch.where(torch.arange(len(x)) % 4 == 0, 1.0, 1e-9)[:, None]
        return x, index, torch.where(index == EXPERT, few * weight, weight)

    experts(trainer).register_forward_pre_hook(weigh)


def zero_down(trainer):
    experts(trainer).down_proj.data[EXPERT] = 0


def infinite_output(trainer, only_in_fp8=False):
    def overflow(module, args, y):
        bad = (args[1] == EXPERT).any(1, keepdim=True)
        return torch.where(bad, math.inf, y) if module.recipe.quantized or not only_in_fp8 else y

    experts(trainer).register_forward_hook(overflow)


# Of each fault, the rule, the place, and the steps after which it is planted: training undoes some faults within steps,
# as tokens leave the expert, or its matrices change.
EXPERT_FAULTS = {
    "jump of gate and up": ("amax_jump", ".down_proj", "x", 49, lambda t: gate_and_up(t)[1].mul_(50)),
    "jump of the gradient": ("amax_jump", ".gate_up_proj", "dy", 49, jump_of_the_gradient),
    "kurtosis": ("kurtosis_growth", ".down_proj", "x", 42, kurtosis_growth),
    "alignment": ("swiglu_alignment", ".gate_up_proj", None, 53, swiglu_alignment),
    "tiny columns": ("underflow", ".down_proj", "w", 49, tiny_columns),
    "tiny tokens": ("underflow", ".down_proj", "dy", 42, tiny_tokens),
    "zero down": ("dead_scale", ".down_proj", "w", 49, zero_down),
    "inf in w": ("non_finite", "", "w", 17, lambda t: experts(t).gate_up_proj.data[EXPERT, 3, 5].fill_(math.inf)),
    "inf in y": ("non_finite", "", "y", 18, infinite_output),
}


@pytest.mark.parametrize("name", EXPERT_FAULTS)
def test_the_expert_is_named_within_ten_steps(begin, name):
    rule, leaf, operand, after, fault = EXPERT_FAULTS[name]
    found = run_with(begin(**MIXTURE, steps=after + 10), [fault], after)
    assert min((event.step for event in found), default=after + 1) > after, found
    place = rule, f"{LAYER}{leaf}", operand
    events = [event for event in found if (event.rule, event.layer, event.operand) == place]
    assert {event.expert for event in events} == {EXPERT}, found
    assert f"expert {EXPERT}" in events[0].describe()


def test_the_layer_moves_to_bf16_and_stays_there(begin, go_on, tmp_path):
    trainer = begin(**MIXTURE, steps=52, watch={"on_warning": "promote"})
    found = run_with(trainer, [zero_down], 49)
    assert experts(trainer).recipe.name == "bf16"
    assert "promote" in {event.action for event in found if event.expert == EXPERT}
    assert [promotion.layer for promotion in trainer.run_folder.read_actions().promotions] == [LAYER]
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
    trainer = begin(**MIXTURE, steps=24, watch={"on_warning": "promote"})
    (event,) = run_with(trainer, [partial(infinite_output, only_in_fp8=True)], 17)
    assert (event.rule, event.layer, event.expert, event.action) == ("non_finite", LAYER, EXPERT, "promote")
    assert trainer.state.step == 24
