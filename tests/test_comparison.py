"""The comparison of two models layer by layer, and the tensors that each call of a layer has."""

import copy
import math

import pytest
import torch
from tiny_models import open_theirs
from torch import nn

import octavo
from octavo.comparison import layer_errors, seen_calls, with_parameters

BATCH = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))


def layers(*sizes):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(16, size, bias=False) for size in sizes))


def test_the_first_layer_that_differs_comes_before_the_layers_that_it_changes():
    reference = layers(16, 16, 16, 4)
    other = copy.deepcopy(reference)
    with torch.no_grad():
        other[1].weight *= 1.01
    errors = dict(layer_errors(reference, other, lambda model: model(BATCH)))
    assert list(errors) == ["0", "1", "2", "3"]
    assert errors["0"].sqnr == math.inf
    assert next(name for name, error in errors.items() if error.noise) == "1"
    assert [errors[name].sqnr for name in "123"] == pytest.approx([40, 40, 40], abs=1e-3)  # 20 log10(1 / 0.01)


def test_layers_of_one_model_alone_and_of_another_shape_are_left_out():
    reference, other = layers(16, 16, 4), layers(16, 16, 8)
    reference.add_module("head", nn.Identity())
    other[1] = nn.Identity()
    assert [name for name, _ in layer_errors(reference, other, lambda model: model(BATCH))] == ["0"]


def test_a_packed_model_differs_from_its_first_packed_layer_on(made):
    reference, served = open_theirs(made("llama"), torch.bfloat16), octavo.load(made("llama", scheme="channel"))
    with torch.no_grad():
        errors = dict(layer_errors(reference, served, lambda model: model(torch.arange(48)[None])))
    assert next(name for name, error in errors.items() if error.noise) == "model.layers.0.self_attn.q_proj"
    assert 25 < errors["model.layers.0.self_attn.q_proj"].sqnr < 35
    assert len([name for name in errors if name.endswith("_proj")]) == 14


def test_each_call_has_the_gradient_of_its_own_input():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers(16, 16)

        def forward(self, x):
            return self.first(x), self.second(x) + self.second(2 * x)

    model, x, seen = Twice(), BATCH.clone().requires_grad_(), []
    with seen_calls(with_parameters(model), lambda call, tensor, value: seen.append((call, tensor, value))):
        one, two = model(x)
        (one.sum() + 3 * two.sum()).backward()
    expected = [(name, tensor) for name in ("first", "second", "second") for tensor in ("x", "y")]
    assert [(call.name, tensor) for call, tensor, _ in seen if tensor in ("x", "y")] == expected
    gradients = {(call, tensor): value for call, tensor, value in seen}
    assert len({call for call, *_ in seen}) == 3
    for call, tensor, dx in seen:
        if tensor == "dx":
            torch.testing.assert_close(dx, gradients[call, "dy"] @ call.module.weight)  # [T,N] @ [N,K]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
