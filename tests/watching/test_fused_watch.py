"""A watch of fused modules, of compiled code and of activation checkpointing.

The fused modules never hold the output of their norm and of their activation, nor the gradient of its input. In float32
their records must be those of the same layers, run one by one.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from watch_examples import backward, one_layer, tiny_model
from watch_oracle import matrix

import octavo
from octavo.integrations.peft import inject
from octavo.train.config import Config
from octavo.train.model import prepare_blocks
from octavo.watching.storage import RECOMPUTED

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it of every input


def blocks_of(model):
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def step(model, optimizer=None):
    loss = backward(model)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    octavo.scales.update_scales(model)
    return loss


def sample(model, watch):
    for p in model.parameters():
        p.grad = None
    step(model)
    watch.read_gradients()
    watch.step()
    return watch.latest()


def agree(found, expected, *, rel, db=0.05, shares=0.02):
    """Whether two records of the same tensors, computed in another order, agree."""
    assert np.array_equal(found[["layer", "operand"]], expected[["layer", "operand"]])
    for name in ("amax", "rms", "crest", "kurtosis"):
        assert found[name] == pytest.approx(expected[name], rel=rel), name
    assert found["sqnr"] == pytest.approx(expected["sqnr"], abs=db)
    for name in ("saturated", "flushed", "zero_rows", "shift_lost"):
        assert found[name] == pytest.approx(expected[name], abs=shares), name


@pytest.mark.parametrize(("name", "adapters"), [("llama", False), ("gpt2", False), ("llama", True)])
def test_fused_modules_record_what_their_layers_record_one_by_one(name, adapters):
    model = tiny_model(name, layers=2)
    if adapters:
        inject(model, 2, 4.0, (), torch.float32, "")
    with octavo.watch(model, interval=1) as watch:
        fused = sample(model, watch).operands
        assert any("in " in layer.gemms["y"].why for layer in watch.layers if layer.recipe)
        for module in model.modules():
            if isinstance(module, octavo.Linear):
                module.register_forward_pre_hook(lambda *args: None)  # a hook keeps it from being fused
        apart = sample(model, watch).operands
    x_and_w = fused["operand"] < 2
    assert len(fused) == sum(len(layer.formats) for layer in watch.layers if layer.recipe) - 3 * adapters
    agree(fused[x_and_w], apart[x_and_w], rel=1e-4)
    # Another order of sums puts elements on the other side of a code's border, and their error into all gradients.
    # Stacked layers share the scale of a row of dy, so that less of dy is flushed one by one.
    # A frozen layer alone quantizes another dy: without the scales of w that the fused pass multiplies into it.
    agree(fused[~x_and_w], apart[~x_and_w], rel=0.05, db=2 if adapters else 0.6, shares=0.05)
    assert fused["scale"][x_and_w] == pytest.approx(apart["scale"][x_and_w], rel=1e-4)


@pytest.mark.parametrize(("name", "recipe"), [("llama", "rowwise"), ("gpt2", "rowwise"), ("llama", "delayed")])
def test_the_numbers_of_training_do_not_change(name, recipe):
    def losses(watched):
        model = tiny_model(name, recipe, layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watch = octavo.watch(model, interval=2) if watched else None
        found = []
        for _ in range(4):
            found.append(step(model, optimizer))
            if watch is not None:
                watch.step()
        if watch is not None:
            watch.close()
        return torch.stack(found), [p.detach() for p in model.parameters()]

    (plain, weights), (watched, watched_weights) = losses(False), losses(True)
    assert torch.equal(plain, watched)
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_recomputation_is_recorded_and_not_counted(compiled):
    torch._dynamo.reset()
    model = tiny_model("llama")
    with octavo.watch(model) as watch:
        expected = sample(model, watch).operands
        assert "recomputation" not in watch.layers[0].gemms
    table = {"compile": {"blocks": compiled, "backend": "aot_eager"}, "activation_checkpointing": {"mode": "full"}}
    prepare_blocks(model, Config.from_dict(table))
    counters.clear()
    with octavo.watch(model) as watch:
        found = sample(model, watch).operands
        runs = [layer.gemms["recomputation"].precision for layer in watch.layers if layer.recipe]
    assert runs == ["fp8"] * 7
    assert counters["stats"]["unique_graphs"] == compiled
    agree(found, expected, rel=1e-4)
    assert (found["flags"][found["operand"] == 0] == (0 if compiled else RECOMPUTED)).all()


@pytest.mark.slow
def test_compiled_code_records_the_same_without_a_break_or_a_recompilation():
    torch._dynamo.reset()
    model = tiny_model("llama", layers=2)
    with octavo.watch(model, interval=3) as watch:
        for _ in range(3):
            step(model)
            watch.step()
        expected = watch.latest().operands
        for block in blocks_of(model):
            block.compile(fullgraph=True, backend="aot_eager")
        counters.clear()
        for _ in range(2):
            step(model)
            watch.step()
        graphs = counters["stats"]["unique_graphs"]
        step(model)
        watch.step()
        assert counters["stats"]["unique_graphs"] == graphs == 2
        found = watch.latest()
        assert (found.step, len(found.operands)) == (6, len(expected))
    agree(found.operands, expected, rel=1e-4)


def test_two_forward_passes_before_their_backward_passes():
    model = one_layer()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with octavo.watch(model) as watch:
        y = [run(matrix(48, 80, seed=seed).requires_grad_()) for seed in (0, 1)]
        for each in y:
            each.sum().backward()
        watch.step()
        assert (watch.latest().operands["rms"] > 0).all()


def test_gate_and_up_that_are_aligned():
    model = tiny_model("llama", layers=2)
    mlp = blocks_of(model)[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight.copy_(mlp.gate_proj.weight * -3)
    with octavo.watch(model) as watch:
        found = sample(model, watch).layer_records
        names = [layer.name for layer in watch.layers]
    alignment = {names[r["layer"]].split(".", 2)[-1]: r["alignment"] for r in found}
    assert alignment["0.mlp.gate_proj"] == alignment["0.mlp.up_proj"] == pytest.approx(1, rel=1e-5)
    assert 0.05 < alignment["1.mlp.gate_proj"] < 0.3
    assert np.isnan(alignment["0.mlp.down_proj"])
