"""`octavo.cast_once`: inside the block weights are cast once; outside it nothing is cached."""

import copy

import pytest
import torch
from cast_once_examples import (
    Net,
    ThroughData,
    batch,
    cached_modules,
    casts_of_weights,
    in_place,
    is_fresh,
    loaded,
    net,
    sgd,
    through_data,
    train,
)
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import octavo

STACKS = 4  # of `Net` by `rowwise`: first, left + right, gate + up, down


@pytest.mark.parametrize(("recipe", "layers"), [("rowwise", STACKS), ("tensorwise", 6), ("blockwise", 6)])
def test_weights_are_cast_once_a_step(recipe: str, layers: int) -> None:
    model = net(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert casts_of_weights(model, lambda: [train(model), train(model)]) == 2 * layers
    with octavo.cast_once(model):
        assert len(cached_modules(model)) == layers
        assert casts_of_weights(model, lambda: [train(model), train(model), model(batch())]) == 0
        assert casts_of_weights(model, optimizer.step) == layers
        assert casts_of_weights(model, lambda: train(model)) == 0
    assert casts_of_weights(model, lambda: train(model)) == layers


def test_a_weight_that_scales_by_its_history_is_not_cached() -> None:
    model = net("delayed")
    with octavo.cast_once(model):
        assert not cached_modules(model)
        for _ in range(2):
            assert casts_of_weights(model, lambda: train(model)) >= 6
            octavo.update_scales(model)
        with torch.no_grad():
            before = model(batch())
            model.mlp.down_proj.weight.mul_(2)
            assert not torch.equal(model(batch()), before)


def test_a_write_through_shared_memory_is_seen_when_the_block_is_entered_again() -> None:
    """It leaves no trace on the parameter (docs/training_loop.md)."""
    model = net("rowwise")
    weight = model.mlp.down_proj.weight
    with octavo.cast_once(model), torch.no_grad():
        before = model(batch())
        weight.detach().numpy()[...] *= 2
        assert torch.equal(model(batch()), before)
    with octavo.cast_once(model), torch.no_grad():
        assert not torch.equal(model(batch()), before)


def test_an_unconverted_model_has_nothing_to_cache() -> None:
    model = Net()
    with octavo.cast_once(model):
        assert not cached_modules(model)


@pytest.mark.parametrize("skip", ["*down_proj", "*gate_proj", "right"])
def test_layers_that_are_not_fused_for_a_neighbour_are_cached_one_by_one(skip: str) -> None:
    model = Net()
    octavo.convert(model, skip=(skip,))
    with octavo.cast_once(model):
        assert casts_of_weights(model, lambda: train(model)) == 0
        assert is_fresh_skipping(model, skip)


def is_fresh_skipping(model: Net, skip: str) -> bool:
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    octavo.convert(fresh, skip=(skip,))
    return torch.equal(model(batch()), fresh(batch()))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_cached_bytes_give_the_outputs_and_gradients_of_new_ones(recipe: str) -> None:
    model = net(recipe)
    x = batch().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        y = model(x)
        return y, *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))

    expected = run()
    with octavo.cast_once(model):
        for _ in range(2):
            for a, b in zip(expected, run(), strict=True):
                assert torch.equal(a, b)


@pytest.mark.slow
def test_compiled_code_sees_the_new_bytes() -> None:
    torch.compiler.reset()
    model = net()
    fresh = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    kinds = (torch.optim.AdamW, ThroughData)
    steps = [[kind(m.parameters()).step for m in (model, fresh)] for kind in kinds]  # after the compiler was loaded
    with octavo.cast_once(model):
        for i in range(4):
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                y = compiled(batch())
            expected = fresh(batch())
            assert torch.equal(y, expected)
            for m, out, step in zip((model, fresh), (y, expected), steps[i % 2], strict=True):
                m.zero_grad()
                out.square().mean().backward()
                step()
        assert cached_modules(model)
        assert not cached_modules(fresh)
    for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_block_a_step_is_compiled_once() -> None:
    torch.compiler.reset()
    model, graphs = net(), []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for _ in range(10):
        with octavo.cast_once(model):
            compiled(batch()).sum().backward()
        in_place(model)
        model.zero_grad()
    assert len(graphs) == 1
    for _ in range(2):  # outside the block: one more, which casts
        in_place(model)
        with torch.no_grad():
            torch.testing.assert_close(compiled(batch()), model(batch()))
    assert len(graphs) <= 3  # with and without gradients


def registered(model: nn.Module) -> tuple[int, int]:
    return len(torch_optimizer._global_optimizer_post_hooks), len(model._load_state_dict_post_hooks)


def test_the_block_leaves_nothing_behind() -> None:
    model = net()
    before = registered(model)
    with octavo.cast_once(model):
        assert registered(model) == (before[0] + 1, before[1] + 1)
        train(model)
    assert registered(model) == before
    assert not cached_modules(model)
    sgd(model)
    loaded(model)
    assert not cached_modules(model)
    assert is_fresh(model)


def test_a_block_that_ends_in_an_error_leaves_nothing_behind() -> None:
    model = net()
    before = registered(model)

    def fail() -> None:
        with octavo.cast_once(model):
            model(torch.randn(7, 41))

    with pytest.raises(ValueError, match="takes an input"):
        fail()
    assert registered(model) == before
    assert not cached_modules(model)


def test_nested_blocks() -> None:
    model = net()
    before = registered(model)
    with octavo.cast_once(model):
        with octavo.cast_once(model.mlp):
            through_data_after_training(model)
            assert is_fresh(model)
        through_data_after_training(model)
        assert is_fresh(model)
        in_place(model)
        assert is_fresh(model)
    assert registered(model) == before
    assert not cached_modules(model)
    in_place(model)
    assert is_fresh(model)


def through_data_after_training(model: Net) -> None:
    model.zero_grad()
    train(model)
    through_data(model)


def test_a_copy_made_inside_the_block_caches_nothing() -> None:
    """An exponential mean of the weights is such a copy: it outlives the block, which does not know it."""
    model = net()
    with octavo.cast_once(model):
        fresh = copy.deepcopy(model)
    assert not cached_modules(fresh)
    assert is_fresh(fresh)
    for p in fresh.parameters():
        p.data.mul_(1.5)
    assert is_fresh(fresh)


def test_the_state_has_no_trace_of_the_bytes() -> None:
    model = net()
    with octavo.cast_once(model):
        assert model.state_dict().keys() == Net().state_dict().keys()
        assert not list(model.buffers())
