"""AdamW: which parameters decay, what a step computes, and its state by name."""

import pytest
import torch
from torch import nn

from octavo.artifact.files import model_tensors
from octavo.train.optimizer import make_optimizer, optimizer_state


def test_matrices_decay_and_nothing_else_does(begin):
    trainer = begin(model="gpt2", weight_decay=0.3)
    names = {p: name for name, p in trainer.model.named_parameters()}
    decayed, plain = trainer.state.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {names[p] for p in plain["params"]} == {n for n in names.values() if n.endswith("bias") or "layer_norm" in n}
    together = [names[p] for p in decayed["params"] + plain["params"]]
    assert sorted(together) == sorted(names.values())


def test_frozen_parameters_are_not_in_the_optimizer(settings):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, settings())
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [
        id(p) for p in model[1].parameters()
    ]
    assert sorted(optimizer_state(model, optimizer)) == sorted(
        f"1.{p}.{e}" for p in ("weight", "bias") for e in ("step", "exp_avg", "exp_avg_sq")
    )


def test_steps_are_those_of_adamw(settings):
    """Loshchilov and Hutter, algorithm 2, in float64, on gradients given."""
    torch.manual_seed(0)
    config = settings(learning_rate=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9)
    model = nn.Linear(3, 5)
    optimizer = make_optimizer(model, config)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for t in range(1, 4):
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            m, v = (old * beta for old, beta in zip(moments[name], (0.8, 0.9), strict=True))
            m, v = m + 0.2 * p.grad.double(), v + 0.1 * p.grad.double() ** 2
            moments[name] = m, v
            decay = 0.01 * 0.1 * expected[name] if name == "weight" else 0
            expected[name] = expected[name] - decay - 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8)
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("steps", [0, 2])
def test_state_by_name_is_what_is_required_and_goes_back(settings, steps):
    """Also before the first step, and for a parameter that never met a gradient."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
    model["frozen"].requires_grad_(False)
    optimizer = make_optimizer(model, settings())

    def step():
        optimizer.zero_grad()
        model["used"](torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    saved = {name: tensor.clone() for name, tensor in optimizer_state(model, optimizer).items()}
    weights = {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}
    step()
    expected = {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}
    with torch.no_grad():
        for name, tensor in model_tensors(model).items():
            tensor.copy_(weights[name])
    optimizer = make_optimizer(model, settings())
    for name, tensor in optimizer_state(model, optimizer).items():
        tensor.copy_(saved[name])
    step()
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, expected[name]), name
