"""Faults that are planted into real runs: each rule finds its own within ten steps, at the layer that has it.

The steps before the planting are clean: the rules are silent there.
"""

import argparse
import ast
import inspect
import math
import re
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from early_warning_examples import run_with

RUN = {"mlp_width": 256, "log_every": 100, "evaluate_every": 100, "save_every": 100}


def layer(trainer, name):
    return trainer.model.get_submodule(f"model.layers.1.{name}")


def amax_jump(trainer):
    layer(trainer, "input_layernorm").weight.data.mul_(50)


def amax_jump_of_gradient(trainer):
    gradient_of(trainer, "self_attn.k_proj", lambda dy: 1e6 * dy)


def kurtosis_growth(trainer):
    """One column of the input of down is large, for the half of the tokens whose gate is open."""
    gate, up = (layer(trainer, f"mlp.{name}").weight.data for name in ("gate_proj", "up_proj"))
    up[0] *= 300
    gate[0] = up[0]


def swiglu_alignment(trainer):
    layer(trainer, "mlp.up_proj").weight.data.copy_(-layer(trainer, "mlp.gate_proj").weight.data)


def gradient_of(trainer, name, change):
    layer(trainer, name).register_full_backward_pre_hook(lambda module, dy: (change(dy[0].float()).to(dy[0].dtype),))


def underflow(trainer):
    """A third of the columns of dy of o_proj are far below the others."""
    width = trainer.config.width
    gradient_of(trainer, "self_attn.o_proj", lambda dy: dy * torch.where(torch.arange(width) % 3 == 0, 1e-8, 1.0))


def underflow_in_dw(trainer):
    """Three quarters of the tokens of v_proj have tiny gradients: each row has a scale, but dw has one exponent."""
    gradient_of(trainer, "self_attn.v_proj", lambda dy: dy * torch.where(torch.arange(32) % 4 == 0, 1.0, 1e-9)[:, None])


def scale(trainer, name, value):
    history = layer(trainer, name).histories.of("x")
    history.scale.fill_(value * float(history.scale))
    history.rule = replace(history.rule, interval=10**9)


def saturation_spike(trainer):
    scale(trainer, "self_attn.q_proj", 1 / 64)


def dead_scale(trainer):
    scale(trainer, "mlp.gate_proj", 1e20)


def scale_gap(trainer):
    scale(trainer, "self_attn.o_proj", 2**10)


def dead_scale_of_gradient(trainer):
    gradient_of(trainer, "mlp.up_proj", lambda dy: 0 * dy)


def non_finite(trainer):
    layer(trainer, "self_attn.k_proj").register_forward_hook(lambda module, args, y: y * math.nan)


def loss_spike(trainer):
    trainer.model.model.norm.weight.data.mul_(20)


FAULTS = {
    amax_jump: ("rowwise", "self_attn.q_proj", "x"),
    amax_jump_of_gradient: ("rowwise", "self_attn.k_proj", "dy"),
    kurtosis_growth: ("rowwise", "mlp.down_proj", "x"),
    swiglu_alignment: ("rowwise", "mlp.gate_proj", None),
    underflow: ("rowwise", "self_attn.o_proj", "dy"),
    underflow_in_dw: ("rowwise", "self_attn.v_proj", "dy"),
    saturation_spike: ("delayed", "self_attn.q_proj", "x"),
    dead_scale: ("delayed", "mlp.gate_proj", "x"),
    scale_gap: ("delayed", "self_attn.o_proj", "x"),
    dead_scale_of_gradient: ("rowwise", "mlp.up_proj", "dy"),
    non_finite: ("tensorwise", "self_attn.k_proj", "y"),
    loss_spike: ("bf16", None, None),
}


@pytest.fixture
def events(begin):
    """events(recipe, faults, after): those of a run of ten steps more in which the faults are planted after some.

    The run is watched as by default.
    """

    def run(recipe, faults, after):
        rate = 1e-2 if faults == [loss_spike] else 1e-3  # a spike comes after a fall
        return run_with(begin(recipe=recipe, **RUN, steps=after + 10, learning_rate=rate), faults, after)

    return run


GROUPS = [
    (42, [amax_jump, underflow, kurtosis_growth]),
    (53, [swiglu_alignment, underflow_in_dw, amax_jump_of_gradient]),
    (44, [saturation_spike, dead_scale, scale_gap]),
    (51, [dead_scale_of_gradient]),
    (17, [non_finite]),
    (27, [loss_spike]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "faults"), GROUPS, ids=[" ".join(f.__name__ for f in faults) for _, faults in GROUPS]
)
def test_a_fault_is_found_within_ten_steps_and_nothing_before_it(events, after, faults):
    recipes = {FAULTS[fault][0] for fault in faults}
    found = events(*recipes, faults, after)
    assert min(event.step for event in found) > after, found
    for fault in faults:
        _, name, operand = FAULTS[fault]
        name = name and f"model.layers.1.{name}"
        rule = fault.__name__.removesuffix("_in_dw").removesuffix("_of_gradient")
        assert (rule, name, operand) in {(event.rule, event.layer, event.operand) for event in found}, found


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_the_rules_are_silent_in_a_clean_run(events, recipe):
    assert events(recipe, [], 140) == []


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A text that two layers do not learn by heart: 300 kB of Python's own code."""
    path = tmp_path_factory.mktemp("data") / "code.txt"
    path.write_text("".join(Path(module.__file__).read_text() for module in (argparse, ast, inspect, typing)))
    return str(path)


@pytest.fixture
def learning(begin, code):
    """learning(recipe, rate, seed, faults): the events of 200 steps of a model of width 64 that learn, in which the
    faults are planted after 60."""
    sizes = {"width": 64, "heads": 4, "kv_heads": 4, "mlp_width": 176, "context": 64, "batch": 4}

    def run(recipe, rate, seed=0, faults=()):
        steps = {"steps": 200, "decay_steps": 600, "warmup": 20, "seed": seed}
        return run_with(begin(recipe=recipe, data=(code,), learning_rate=rate, **RUN | sizes | steps), faults, 60)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_a_rate_a_hundred_times_too_high_is_said_while_it_rises(learning, recipe):
    found = learning(recipe, 0.1)
    assert (found[0].rule, found[0].step) == ("rate_too_high", 4)
    assert {event.rule for event in found} >= ({"underflow"} if recipe == "rowwise" else set())


def harder(trainer):
    """Noise in the last hidden states that grows with the steps: the loss rises, and no step is a spike."""
    first = trainer.state.step

    def blur(module, args, y):
        return y + 0.03 * (trainer.state.step - first) * torch.randn_like(y)

    trainer.model.model.norm.register_forward_hook(blur)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "seed"), [("bf16", 0), ("rowwise", 1), ("delayed", 2)])
def test_at_the_right_rate_nothing_is_said(learning, recipe, seed):
    assert learning(recipe, 1e-3, seed) == []


def test_every_fault_is_planted():
    assert {fault for _, group in GROUPS for fault in group} == FAULTS.keys()
