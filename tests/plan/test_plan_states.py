"""The table that people meet first, and the bytes of a parameter against the optimizers' own tensors."""

import pytest
import torch
from torch import nn

from octavo.plan.setup import KNOWN_STATES, own_states, states_of
from octavo.recipe import PRESETS, bf16, rowwise
from octavo.train.config import Config, OptimizerSettings
from octavo.train.optimizer import make_optimizer


def test_the_three_numbers_of_a_model_of_seven_billion_parameters():
    gigabytes = [states.on_gpu * 7e9 / 1e9 for states in KNOWN_STATES.values()]
    assert gigabytes == [112, 140, 28]
    assert [(states.total - states.on_gpu) * 7 for states in KNOWN_STATES.values()] == [0, 0, 112]


@pytest.mark.parametrize("state", ["fp32", "8bit", "fp8"])
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_bytes_of_a_parameter_are_those_of_the_tensors(state, weights):
    if (state, weights) != ("fp32", "fp32"):
        pytest.importorskip("torchao")
    layer = nn.Linear(1024, 256, bias=False).to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[weights]))
    layer(torch.ones(1, 1024, dtype=layer.weight.dtype)).sum().backward()
    config = Config().change(**{"optimizer.state": state, "optimizer.weights": weights})
    optimizer = make_optimizer(layer, config)
    moments = [optimizer.state[layer.weight][name] for name in ("exp_avg", "exp_avg_sq")]
    planned = states_of(config.optimizer, bf16(), accumulate=1)
    count = layer.weight.numel()
    assert planned.weight * count == layer.weight.nbytes
    assert planned.gradient * count == layer.weight.grad.nbytes
    tensors = [part for m in moments for part in ([m] if type(m) is torch.Tensor else [m.codes, m.scale])]
    assert planned.moments * count == sum(tensor.nbytes for tensor in tensors)


def test_accumulation_holds_gradients_in_fp32():
    settings = OptimizerSettings(weights="bf16")
    assert [states_of(settings, bf16(), accumulate=n).gradient for n in (1, 2)] == [2, 4]


def test_recipes_whose_weights_are_cached_take_a_byte_more():
    cached = {name for name, make in PRESETS.items() if states_of(OptimizerSettings(), make(), accumulate=1).copies}
    assert cached == {"tensorwise", "rowwise", "rowwise_dw_bf16", "blockwise", "mxfp8", "groupwise"}


def test_offloading_leaves_the_copies_on_the_gpu():
    states = states_of(OptimizerSettings(offload=True), rowwise(), accumulate=1)
    assert (states.on_gpu, states.total) == (1, 17)
    assert own_states()["octavo, default"].on_gpu == 16
