"""`octavo.cast_once`: inside the block weights are cast once and never stale; outside it nothing is kept.

The oracle of freshness is a new model with the same state, used outside any block.
"""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.nn import NormLinear, SwiGLU
from octavo.nn.weight_cache import WeightCache

CASTS = {"octavo::quantize", "octavo::quantize_stack", "octavo::quantize_scaled"}
CACHED = ["rowwise", "tensorwise", "blockwise"]
STACKS = 4  # of `Net` by `rowwise`: first, left + right, gate + up, down


class Net(nn.Module):
    """A plain layer, two that share a norm, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 64)
        self.norm = nn.RMSNorm(64)
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.both = NormLinear(self, "norm", "left", "right")
        self.mlp = SwiGLU(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        (left, right), x = self.both(self.first(x))
        y, x = self.mlp(left, self.norm, x)
        return x + y + right


def net(recipe: str = "rowwise") -> Net:
    model = Net()
    octavo.convert(model, recipe)
    return model


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(7, 40, generator=torch.Generator().manual_seed(3)).to(dtype)


def is_fresh(model: Net) -> bool:
    """Whether the model's output comes of the weights that it has now."""
    dtype = model.first.weight.dtype
    twin = Net().to(dtype)
    twin.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
    octavo.convert(twin, model.first.recipe)
    with torch.no_grad():
        return torch.equal(model(batch(dtype)), twin(batch(dtype)))


def caches(model: nn.Module) -> dict[str, WeightCache]:
    found = {name: getattr(module, "weight_cache", None) for name, module in model.named_modules()}
    return {name: cache for name, cache in found.items() if cache is not None}


def kept(model: nn.Module) -> list[str]:
    """The modules that keep bytes now."""
    return [name for name, cache in caches(model).items() if cache.q is not None]


def casts_of_weights(model: nn.Module, call: Callable[[], object]) -> int:
    """How many operations cast weights of `model`, stacks of them counted once."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in CASTS:
                first = args[0] if isinstance(args[0], list) else [args[0]]
                count.append(any(t.data_ptr() in weights for t in first))
            return func(*args, **(kwargs or {}))

    weights = {p.data_ptr() for p in model.parameters() if p.ndim == 2}
    count: list[bool] = []
    with Count():
        call()
    return sum(count)


def train(model: Net) -> None:
    model(batch()).square().mean().backward()


# ---- once


@pytest.mark.parametrize(("recipe", "layers"), [("rowwise", STACKS), ("tensorwise", 6), ("blockwise", 6)])
def test_weights_are_cast_once_a_step(recipe: str, layers: int) -> None:
    model = net(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert casts_of_weights(model, lambda: [train(model), train(model)]) == 2 * layers
    with octavo.cast_once(model):
        assert len(kept(model)) == layers
        assert casts_of_weights(model, lambda: [train(model), train(model), model(batch())]) == 0
        assert casts_of_weights(model, optimizer.step) == layers
        assert casts_of_weights(model, lambda: train(model)) == 0
    assert casts_of_weights(model, lambda: train(model)) == layers


def test_a_weight_that_scales_by_its_history_is_not_kept() -> None:
    model = net("delayed")
    with octavo.cast_once(model):
        assert not kept(model)
        for _ in range(2):
            assert casts_of_weights(model, lambda: train(model)) >= 6
            octavo.update_scales(model)
        with torch.no_grad():
            before = model(batch())
            model.mlp.down_proj.weight.mul_(2)
            assert not torch.equal(model(batch()), before)


def test_a_write_through_shared_memory_is_seen_when_the_block_is_entered_again() -> None:
    """As docs/training_loop.md says: it leaves no trace on the parameter."""
    model = net("rowwise")
    weight = model.mlp.down_proj.weight
    with octavo.cast_once(model), torch.no_grad():
        before = model(batch())
        weight.detach().numpy()[...] *= 2
        assert torch.equal(model(batch()), before)
    with octavo.cast_once(model), torch.no_grad():
        assert not torch.equal(model(batch()), before)


def test_an_unconverted_model_has_nothing_to_keep() -> None:
    model = Net()
    with octavo.cast_once(model):
        assert not kept(model)


@pytest.mark.parametrize("skip", ["*down_proj", "*gate_proj", "right"])
def test_layers_that_are_not_fused_for_a_neighbour_are_kept_one_by_one(skip: str) -> None:
    model = Net()
    octavo.convert(model, skip=(skip,))
    with octavo.cast_once(model):
        assert casts_of_weights(model, lambda: train(model)) == 0
        assert is_fresh_skipping(model, skip)


def is_fresh_skipping(model: Net, skip: str) -> bool:
    twin = Net()
    twin.load_state_dict(model.state_dict())
    octavo.convert(twin, skip=(skip,))
    return torch.equal(model(batch()), twin(batch()))


@pytest.mark.parametrize("recipe", CACHED)
def test_kept_bytes_give_the_outputs_and_gradients_of_new_ones(recipe: str) -> None:
    model = net(recipe)
    x = batch().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        y = model(x)
        return y, *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))

    required = run()
    with octavo.cast_once(model):
        for _ in range(2):
            for a, b in zip(required, run(), strict=True):
                assert torch.equal(a, b)


# ---- never stale


class ThroughData(torch.optim.Optimizer):
    """As many a hand-written optimizer steps: what it writes leaves no trace on the parameter."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-0.1)


def sgd(model: Net) -> None:
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def adamw(model: Net) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True).step()


def adamw_fused(model: Net) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def with_closure(model: Net) -> None:
    torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2).step(lambda: model(batch()).square().sum())


def through_data(model: Net) -> None:
    ThroughData(model.parameters()).step()


def in_place(model: Net) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + torch.randn_like(p))


def loaded(model: Net) -> None:
    model.load_state_dict(Net().state_dict())


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


def test_there_and_back_again() -> None:
    """Weights that were rounded to BF16 in between, and may lie where they lay before."""
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
    required = [torch.func.functional_call(model, {"0.weight": w * 2**-i}, x) for i in range(5)]
    own = model(x)
    with octavo.cast_once(model), torch.no_grad():
        for i, y in enumerate(required):
            assert torch.equal(torch.func.functional_call(model, {"0.weight": w * 2**-i}, x), y)
            assert torch.equal(model(x), own)


@pytest.mark.parametrize("fill", ["step", "load"])
def test_bytes_stay_in_their_memory(fill: str) -> None:
    """So that a CUDA graph, which knows addresses, reads the new ones."""
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
    required = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    other(torch.randn(2, 3)).sum().backward()
    with octavo.cast_once(model):
        loss = model(batch()).square().mean()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        loss.backward()
    for p, gradient in zip(model.parameters(), required, strict=True):
        assert torch.equal(p.grad, gradient)


# ---- compiled


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, ThroughData])
def test_compiled_code_sees_the_new_bytes(optimizer: type[torch.optim.Optimizer]) -> None:
    torch.compiler.reset()
    model = net()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    steps = [optimizer(m.parameters()).step for m in (model, twin)]  # made after the compiler was loaded
    with octavo.cast_once(model):
        for i in range(3):
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                y = compiled(batch())
            required = twin(batch())
            assert torch.equal(y, required)
            for m, out, step in zip((model, twin), (y, required), steps, strict=True):
                m.zero_grad()
                out.square().mean().backward()
                step()
        assert kept(model)
        assert not kept(twin)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
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


# ---- sharded


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
    """After a forward pass alone FSDP leaves the root's parameters gathered: plain tensors, when the block begins."""
    model = net()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    if evaluated:
        with torch.no_grad():
            model(batch())
    with octavo.cast_once(model):
        for _ in range(3):
            y, required = model(batch()), twin(batch())
            assert torch.equal(y, required)
            for m, out in ((model, y), (twin, required)):
                out.square().mean().backward()
                step(m)
                m.zero_grad()
            with torch.no_grad():
                assert torch.equal(model(batch()), twin(batch()))
        assert not kept(model)
    assert torch.equal(model(batch()), twin(batch()))


# ---- and then nothing


def registered(model: nn.Module) -> tuple[int, int]:
    return len(torch_optimizer._global_optimizer_post_hooks), len(model._load_state_dict_post_hooks)


def test_the_block_leaves_nothing_behind() -> None:
    model = net()
    before = registered(model)
    with octavo.cast_once(model):
        assert registered(model) == (before[0] + 1, before[1] + 1)
        train(model)
    assert registered(model) == before
    assert not kept(model)
    sgd(model)
    loaded(model)
    assert not kept(model)
    assert is_fresh(model)


def test_nor_does_one_that_ends_in_an_error() -> None:
    model = net()
    before = registered(model)

    def fail() -> None:
        with octavo.cast_once(model):
            model(torch.randn(7, 41))

    with pytest.raises(ValueError, match="same K"):
        fail()
    assert registered(model) == before
    assert not kept(model)


def test_blocks_inside_one_another() -> None:
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
    assert not kept(model)
    in_place(model)
    assert is_fresh(model)


def through_data_after_training(model: Net) -> None:
    model.zero_grad()
    train(model)
    through_data(model)


def test_a_copy_made_inside_the_block_keeps_nothing() -> None:
    """Of an exponential mean of the weights, say: it lives on when the block, which knows nothing of it, has ended."""
    model = net()
    with octavo.cast_once(model):
        twin = copy.deepcopy(model)
    assert not kept(twin)
    assert is_fresh(twin)
    for p in twin.parameters():
        p.data.mul_(1.5)
    assert is_fresh(twin)


def test_the_state_has_no_trace_of_the_bytes() -> None:
    model = net()
    with octavo.cast_once(model):
        assert model.state_dict().keys() == Net().state_dict().keys()
        assert not list(model.buffers())
