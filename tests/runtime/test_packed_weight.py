"""The weight that a packed layer caches is that of its buffers, whatever changes them."""

import copy
import re

import pytest
import torch
from torch import nn

from octavo.artifact.packed.scheme import SCHEMES
from octavo.ops import quantize
from octavo.runtime import PackedLinear
from octavo.runtime.packed_linear import swap_linears


def packed(scheme: str, seed: int) -> PackedLinear:
    torch.manual_seed(seed)
    linear = nn.Linear(128, 256, bias=False)
    layer = PackedLinear(linear, SCHEMES[scheme])
    q = quantize(linear.weight.detach(), layer.scheme.weight)
    layer.weight.copy_(q.data)
    layer.weight_scale.copy_(layer.scheme.stored_scale(q))
    if layer.input_scale is not None:
        layer.input_scale.fill_(0.01)
    return layer


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_state(scheme, assign):
    layer, other, x = packed(scheme, 0), packed(scheme, 1), torch.randn(3, 128).bfloat16()
    first = layer(x)
    assert torch.equal(layer(x), first)
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(layer(x), other(x))
    assert not torch.equal(layer(x), first)
    layer.weight_scale.mul_(2 if layer.weight_scale.is_floating_point() else 1)
    other.weight_scale.copy_(layer.weight_scale)
    assert torch.equal(layer(x), other(x))


def test_an_input_of_another_width_names_the_layer():
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(24, 8, bias=False))
    swap_linears(model, {"1": SCHEMES["channel"]})
    what = "the layer '1', a PackedLinear with a weight [8, 24], takes an input [..., 24], got [3, 16]: give"
    with pytest.raises(ValueError, match=re.escape(what)):
        model(torch.randn(3, 32))


def test_copies_and_moves_have_a_weight_of_their_own():
    layer, x = packed("channel", 0), torch.randn(3, 128).bfloat16()
    first = layer(x)
    twin = copy.deepcopy(layer)
    twin.weight_scale.mul_(2)
    assert torch.equal(twin(x), 2 * first)
    assert torch.equal(layer(x), first)
    layer.to("meta")
    assert layer._weight is None
