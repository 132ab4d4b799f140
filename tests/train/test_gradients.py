"""Gradients: the sum of many in BF16 and the norm of all, against float64; and clipping."""

import functools
import math

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from octavo.train.gradients import accumulate_in_fp32, clip_gradients
from octavo.train.mesh import Degrees, make_mesh

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


class Clipped(nn.Module):
    """Two layers, and one that gets no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = nn.Linear(8, 12), nn.Linear(12, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.first(x.to(self.first.weight.dtype)).relu()
        return 2 * self.second(hidden.to(self.second.weight.dtype))


def backward(model):
    torch.manual_seed(1)
    model(torch.randn(4, 8)).square().sum().backward()


def exact_norm(model):
    """The norm of the gradients in float64."""
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


@pytest.mark.parametrize("limit", [0.25, 1e4, math.inf])
def test_clipping_divides_by_the_norm_where_it_is_above_the_limit(limit):
    model = Clipped()
    backward(model)
    norm = exact_norm(model)
    factor = min(limit / norm, 1)
    expected = {name: p.grad.double() * factor for name, p in model.named_parameters() if p.grad is not None}
    found = clip_gradients(model.parameters(), limit)
    assert found.shape == ()
    assert float(found) == pytest.approx(norm, rel=1e-6)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert sorted(grads) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    for name, grad in grads.items():
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-5, atol=0)


def test_clipping_takes_gradients_of_two_dtypes():
    model = Clipped()
    model.first.bfloat16()
    backward(model)
    norm = exact_norm(model)
    found = clip_gradients(model.parameters(), 0.5)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(norm, rel=1e-2)  # the norm of BF16 gradients is BF16
    assert exact_norm(model) == pytest.approx(0.5, rel=1e-2)


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    model = Clipped()
    backward(model)
    model.second.bias.grad[2] = math.nan
    assert not clip_gradients(model.parameters(), 1.0).isfinite()


def sharded_clipping(rank):
    """Whether norm and gradients are those of one process, and the all-reduces, by the layout of the parameters."""
    whole = Clipped()
    backward(whole)
    norm = exact_norm(whole)
    clip_gradients(whole.parameters(), 0.25)
    results = {}
    degrees = {"FSDP2": Degrees(1, 4), "HSDP": Degrees(2, 2), "with tensor parallelism": Degrees(1, 2, 2)}
    for layout, each in degrees.items():
        mesh, model = make_mesh(each, torch.device("cpu"), timeout=60), Clipped()
        if each.tp > 1:
            parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"] if each.dp_replicate > 1 else mesh["dp_shard"])
        backward(model)
        with CommDebugMode() as collectives:
            found = clip_gradients(model.parameters(), 0.25)
        results[layout, "norm"] = float(found) == pytest.approx(norm, rel=1e-6)
        for name, p in model.named_parameters():
            expected = whole.get_parameter(name).grad
            if expected is not None:
                grad = p.grad.full_tensor()
                results[layout, name] = torch.allclose(grad, expected, rtol=1e-5, atol=1e-8)
        results[layout, "collectives"] = collectives.get_total_counts()
    return results


@pytest.mark.slow
def test_clipping_of_sharded_gradients_is_that_of_one_process():
    for results in run_ranks(4, sharded_clipping):
        counts = {layout: count for (layout, what), count in results.items() if what == "collectives"}
        assert counts["FSDP2"] == counts["HSDP"] == 1  # for all gradients
        assert len(results) == 3 * 6
        assert all(results.values()), results
