"""The sum of many BF16 gradients, against float64."""

import functools

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from octavo.train.gradients import accumulate_in_fp32

MICRO_BATCHES = 300


def make_layer():
    torch.manual_seed(0)
    return nn.Linear(8, 12, bias=False).bfloat16()


def inputs():
    """A small gradient with the same sign each time, so that a BF16 sum stops growing."""
    draw = torch.Generator().manual_seed(1)
    return [1 + torch.rand(4, 8, generator=draw).bfloat16() / 8 for _ in range(MICRO_BATCHES)]


def summed(model):
    for x in inputs():
        model(x).sum().backward()
    [grad] = [p.grad for p in model.parameters()]
    return grad


@functools.cache
def expected():
    """The sum in float64 of the BF16 gradients of the micro-batches."""
    total = torch.zeros(12, 8, dtype=torch.float64)
    for x in inputs():
        layer = make_layer()
        layer(x).sum().backward()
        total += layer.weight.grad.double()
    return total


def error(grad):
    return float(((grad.double() - expected()) / expected()).abs().max())


def test_in_fp32_nothing_is_lost():
    layer = make_layer()
    assert error(summed(layer)) > 0.05  # without
    layer = make_layer()
    accumulate_in_fp32(layer.parameters())
    grad = summed(layer)
    assert grad.dtype == torch.float32
    assert error(grad) < 1e-6


def test_a_new_step_begins_at_zero_and_other_parameters_stay_as_they_are():
    model = nn.Sequential(make_layer(), nn.Linear(12, 3, dtype=torch.bfloat16), nn.LayerNorm(3)).requires_grad_()
    model[2].requires_grad_(False)
    accumulate_in_fp32(p for p in model.parameters() if p.requires_grad)
    for _ in range(2):
        model(inputs()[0]).square().sum().backward()
        first = {name: p.grad for name, p in model.named_parameters()}
        assert {name: None if g is None else g.dtype for name, g in first.items()} == {
            "0.weight": torch.float32, "1.weight": torch.float32, "1.bias": torch.float32,
            "2.weight": None, "2.bias": None,
        }  # fmt: skip
        model.zero_grad()
    plain = nn.Linear(2, 2)
    accumulate_in_fp32(plain.parameters())
    assert plain.weight.grad_dtype == torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        plain.weight.grad = torch.zeros(2, 2, dtype=torch.bfloat16)


def sharded_errors(rank):
    """Under FSDP2, where each micro-batch is reduced and where only the last is, and under tensor parallelism."""
    errors = []
    for layout in ("each", "last", "tensor parallel"):
        layer, mesh = make_layer(), init_device_mesh("cpu", (2,))
        if layout == "tensor parallel":
            layer = parallelize_module(layer, mesh, ColwiseParallel())
        else:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        accumulate_in_fp32(layer.parameters())
        if layout == "last":
            layer.set_requires_gradient_sync(False)
            summed(layer)
            layer.set_requires_gradient_sync(True)
            layer(torch.zeros(4, 8, dtype=torch.bfloat16)).sum().backward()
            grad = layer.weight.grad
        else:
            grad = summed(layer)
        assert grad.to_local().dtype == torch.float32
        errors.append(error(grad.full_tensor()))
    return errors


@pytest.mark.slow
def test_sharded_weights_too():
    for errors in run_ranks(2, sharded_errors):
        assert errors[0] < 1e-6
        assert errors[1] < 1e-2  # the sum of all micro-batches is rounded to BF16 once
        assert errors[2] < 1e-6
