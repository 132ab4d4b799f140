"""Inside the block of `octavo.cast_once` no weight is stale, whichever way it was written."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from cast_once_examples import (
    Net,
    batch,
    cached_modules,
    caches,
    in_place,
    is_fresh,
    loaded,
    net,
    sgd,
    through_data,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.nn import SwiGLU


def adamw(model: Net) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True).step()


def adamw_fused(model: Net) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def with_closure(model: Net) -> None:
    torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2).step(lambda: model(batch()).square().sum())


def loaded_and_assigned(model: Net) -> None:
    model.load_state_dict(Net().state_dict(), assign=True)


def a_part_loaded(model: Net) -> None:
    model.mlp.load_state_dict(SwiGLU(64, 96).state_dict())


def replaced(model: Net) -> None:
    for module in (model.first, model.left, model.mlp.up_proj, model.mlp.down_proj):
        module.weight = nn.Parameter(torch.randn_like(module.weight))


def swapped(model: Net) -> None:
    for module in (model.first, model.left, model.mlp.up_proj, model.mlp.down_proj):
        torch.utils.swap_tensors(module.weight, nn.Parameter(torch.randn_like(module.weight)))


def to_bfloat16(model: Net) -> None:
    model.to(torch.bfloat16)


def reinitialized(model: Net) -> None:
    for module in (model.first, model.left, model.mlp.up_proj, model.mlp.down_proj):
        module.reset_parameters()


ROUTES = [
    sgd, adamw_fused, with_closure,
    adamw, through_data, reinitialized,
    in_place, a_part_loaded, swapped,
    loaded, loaded_and_assigned,
    to_bfloat16, replaced,
]  # fmt: skip


OTHERS = [(recipe, route) for recipe in ("tensorwise", "blockwise", "delayed") for route in ROUTES[::3]]


@pytest.mark.parametrize(("recipe", "route"), [("rowwise", route) for route in ROUTES] + OTHERS)
def test_a_weight_written_inside_the_block_is_used(recipe: str, route: Callable[[Net], None]) -> None:
    model = net(recipe)
    with octavo.cast_once(model):
        for _ in range(2):
            train(model)
            before = model(batch(model.first.weight.dtype)).detach()
            route(model)
            model.zero_grad()
            assert is_fresh(model)
            if route is to_bfloat16:
                break
            assert not torch.equal(model(batch()), before)
    assert is_fresh(model)


def test_every_weight_alone_is_noticed() -> None:
    model = net()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 6
    with octavo.cast_once(model):
        for layer in layers:
            before = model(batch())
            with torch.no_grad():
                layer.weight.add_(0.1)
            assert not torch.equal(model(batch()), before)
            assert is_fresh(model)


def test_weights_converted_to_another_dtype_and_back() -> None:
    """The weights are rounded to BF16 in between, and may have the same address as before."""
    for n in range(16, 400, 5):
        model = nn.Sequential(nn.Linear(64, n, bias=False))
        octavo.convert(model)
        x = torch.randn(3, 64)
        with octavo.cast_once(model):
            model(x)
            inside = model.to(torch.bfloat16).to(torch.float32)(x)
        assert torch.equal(inside, model(x)), n


def test_a_weight_given_for_one_call() -> None:
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    octavo.convert(model)
    x, w = torch.randn(3, 64), torch.randn(48, 64)
    expected = [torch.func.functional_call(model, {"0.weight": w * 2**-i}, x) for i in range(5)]
    own = model(x)
    with octavo.cast_once(model), torch.no_grad():
        for i, y in enumerate(expected):
            assert torch.equal(torch.func.functional_call(model, {"0.weight": w * 2**-i}, x), y)
            assert torch.equal(model(x), own)


@pytest.mark.parametrize("fill", ["step", "load"])
def test_bytes_stay_in_their_memory(fill: str) -> None:
    """A CUDA graph reads the addresses that it recorded."""
    model = net()
    with octavo.cast_once(model):
        before = {name: (c.q.data.data_ptr(), c.q.scale.data_ptr()) for name, c in caches(model).items() if c.q}
        bytes_before = model.first.weight_cache.q.data.float()
        train(model)
        sgd(model) if fill == "step" else loaded(model)
        after = {name: (c.q.data.data_ptr(), c.q.scale.data_ptr()) for name, c in caches(model).items() if c.q}
        assert after == before
        assert not torch.equal(model.first.weight_cache.q.data.float(), bytes_before)


def test_an_optimizer_of_another_model_may_step_between_forward_and_backward() -> None:
    """As in adversarial training."""
    model, other = net(), nn.Linear(3, 3)
    train(model)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    other(torch.randn(2, 3)).sum().backward()
    with octavo.cast_once(model):
        loss = model(batch()).square().mean()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        loss.backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def by_hand(model: Net) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("evaluated", [False, True], ids=["", "evaluated"])
@pytest.mark.parametrize("step", [sgd, adamw, through_data, by_hand])
def test_sharded_parameters_are_not_stale(step: Callable[[Net], None], evaluated: bool) -> None:
    """After a forward pass without backward FSDP leaves the root's parameters gathered, as plain tensors."""
    model = net()
    fresh = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    if evaluated:
        with torch.no_grad():
            model(batch())
    with octavo.cast_once(model):
        for _ in range(3):
            y, expected = model(batch()), fresh(batch())
            assert torch.equal(y, expected)
            for m, out in ((model, y), (fresh, expected)):
                out.square().mean().backward()
                step(m)
                m.zero_grad()
            with torch.no_grad():
                assert torch.equal(model(batch()), fresh(batch()))
        assert not cached_modules(model)
    assert torch.equal(model(batch()), fresh(batch()))
