"""`octavo.scales.cast_once`: inside the block weights are cast once; outside it nothing is cached."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from bits import bits
from fsdp_examples import WIDTH, Block, backward, batch
from linear_examples import QUANTIZED, K, N, T, converted, converted_model, run
from operation_counts import saved_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.nn import SwiGLU, linear_function
from octavo.ops import quantize, quantize_stack
from octavo.recipe import GEMMS, Recipe, mxfp8, rowwise, tensorwise
from octavo.scales import cached_stacks

CASTS = {"octavo::quantize", "octavo::quantize_stack", "octavo::quantize_scaled"}


def net(recipe: str = "rowwise") -> Block:
    return converted_model(Block(), recipe)


def is_fresh(model: Block, *skip: str) -> bool:
    """True if the model's output is that of a new model with the same weights, outside any block."""
    dtype = model.plain.weight.dtype
    fresh = Block().to(dtype)
    fresh.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
    octavo.convert(fresh, model.plain.recipe, skip=skip)
    with torch.no_grad():
        return torch.equal(model(batch().to(dtype)), fresh(batch().to(dtype)))


def caches(model: nn.Module):
    owned = {name: getattr(module, "weight_cache", None) for name, module in model.named_modules()}
    return {name: cache for name, cache in owned.items() if cache is not None}


def cached_modules(model: nn.Module) -> list[str]:
    return [name for name, cache in caches(model).items() if cache.q is not None]


def casts_of_weights(model: nn.Module, call: Callable[[], object]) -> int:
    """How many operations cast weights of `model`. A stack counts once."""

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


class ThroughData(torch.optim.Optimizer):
    """An optimizer that writes through `.data`, as many hand-written ones do: the parameter shows no trace of it."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-0.1)


def sgd(model: Block) -> None:
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def through_data(model: Block) -> None:
    ThroughData(model.parameters()).step()


def in_place(model: Block) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + torch.randn_like(p))


def loaded(model: Block) -> None:
    model.load_state_dict(Block().state_dict())


STACKS = 4  # of `Block` by `rowwise`: left + right, plain, gate + up, down


@pytest.mark.gpu
@pytest.mark.parametrize("device", range(min(torch.cuda.device_count(), 2)))
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_gpu_casts_them_by_a_graph_while_they_keep_their_memory(recipe: str, device: int, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", torch.cuda.Stream(0))  # as after a graph there
    model = converted_model(Block().cuda(device), recipe, emulate=True)
    used = cached_stacks(model)

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        sgd(model)

    with octavo.scales.cast_once(model):
        counts = []
        for number in range(5):
            if number == 3:
                model.plain.weight.data = model.plain.weight.data.clone()
            versions = [cache.q.data._version for cache, _, _ in used]
            counts.append(casts_of_weights(model, step))
            assert all(cache.q.data._version > version for version, (cache, _, _) in zip(versions, used, strict=True))
            for cache, linears, cast in used:
                weights = [linear.weight for linear in linears]
                fresh = quantize_stack(weights, cast) if cast.by_row else quantize(weights[0], cast)
                assert torch.equal(bits(cache.q.data), bits(fresh.data))
                assert torch.equal(cache.q.scale, fresh.scale)
                assert not cache.is_stale(weights)
    assert counts == [len(used), len(used), 0, len(used), len(used)]  # the second of one kind is recorded


@pytest.mark.parametrize(("recipe", "layers"), [("rowwise", STACKS), ("tensorwise", 6), ("blockwise", 6)])
def test_weights_are_cast_once_a_step(recipe: str, layers: int) -> None:
    model = net(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert casts_of_weights(model, lambda: [backward(model, 0), backward(model, 0)]) == 2 * layers
    with octavo.scales.cast_once(model):
        assert len(cached_modules(model)) == layers
        assert casts_of_weights(model, lambda: [backward(model, 0), backward(model, 0), model(batch())]) == 0
        assert casts_of_weights(model, optimizer.step) == layers
        assert casts_of_weights(model, lambda: backward(model, 0)) == 0
    assert casts_of_weights(model, lambda: backward(model, 0)) == layers


def test_a_weight_that_scales_by_its_history_is_not_cached() -> None:
    model = net("delayed")
    with octavo.scales.cast_once(model):
        assert not cached_modules(model)
        for _ in range(2):
            assert casts_of_weights(model, lambda: backward(model, 0)) >= 6
            octavo.scales.update_scales(model)
        with torch.no_grad():
            before = model(batch())
            model.mlp.down_proj.weight.mul_(2)
            assert not torch.equal(model(batch()), before)


@pytest.mark.parametrize("skip", ["*down_proj", "*gate_proj", "right"])
def test_layers_that_are_not_fused_for_a_neighbour_are_cached_one_by_one(skip: str) -> None:
    model = converted_model(Block(), skip=(skip,))
    with octavo.scales.cast_once(model):
        assert casts_of_weights(model, lambda: backward(model, 0)) == 0
        assert is_fresh(model, skip)


@pytest.mark.slow
def test_compiled_code_sees_the_new_bytes() -> None:
    torch.compiler.reset()
    model = net()
    fresh = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    kinds = (torch.optim.AdamW, ThroughData)
    steps = [[kind(m.parameters()).step for m in (model, fresh)] for kind in kinds]  # after the compiler was loaded
    with octavo.scales.cast_once(model):
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


@pytest.mark.parametrize("compute", [parametrizations.weight_norm, partial(prune.random_unstructured, amount=0.5)])
def test_a_weight_that_is_computed_from_others_is_not_cached(compute) -> None:
    """A step changes other parameters, and compiled code would read the bytes from before it."""
    torch.compiler.reset()
    model = converted_model(nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, 64)))
    compute(model[0], name="weight")
    compiled = torch.compile(model, backend="aot_eager")
    with octavo.scales.cast_once(model):
        compiled(batch()).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        y = compiled(batch())
    assert torch.equal(y, model(batch()))


def test_a_block_a_step_is_compiled_once() -> None:
    torch.compiler.reset()
    model, graphs = net(), []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for _ in range(10):
        with octavo.scales.cast_once(model):
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
    with octavo.scales.cast_once(model):
        assert registered(model) == (before[0] + 1, before[1] + 1)
        backward(model, 0)
    assert registered(model) == before
    assert not cached_modules(model)
    with suppress(ValueError), octavo.scales.cast_once(model):
        model(torch.randn(7, WIDTH + 1))  # of another width
    assert registered(model) == before
    assert not cached_modules(model)
    sgd(model)
    loaded(model)
    assert not cached_modules(model)
    assert is_fresh(model)


def test_nested_blocks() -> None:
    model = net()
    before = registered(model)
    with octavo.scales.cast_once(model):
        for block in (octavo.scales.cast_once(model.mlp), nullcontext()):
            with block:
                model.zero_grad()
                backward(model, 0)
                through_data(model)
                assert is_fresh(model)
    assert registered(model) == before
    assert not cached_modules(model)
    in_place(model)
    assert is_fresh(model)


# ---- Inside the block of `octavo.scales.cast_once` no weight is stale, whichever way it was written


def adamw(model: Block) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True).step()


def some_layers(model: Block) -> list[nn.Linear]:
    return [model.plain, model.left, model.mlp.up_proj, model.mlp.down_proj]


def random_like(layer: nn.Linear) -> nn.Parameter:
    return nn.Parameter(torch.randn_like(layer.weight))


ROUTES: dict[str, Callable[[Block], object]] = {
    "sgd": sgd,
    "adamw, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step(),
    "closure": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2).step(
        lambda: model(batch()).square().sum()
    ),
    "adamw": adamw,
    "through data": through_data,
    "reinitialized": lambda model: [layer.reset_parameters() for layer in some_layers(model)],
    "in place": in_place,
    "a part loaded": lambda model: model.mlp.load_state_dict(SwiGLU(WIDTH, WIDTH).state_dict()),
    "swapped": lambda model: [torch.utils.swap_tensors(m.weight, random_like(m)) for m in some_layers(model)],
    "loaded": loaded,
    "loaded and assigned": lambda model: model.load_state_dict(Block().state_dict(), assign=True),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "replaced": lambda model: [setattr(m, "weight", random_like(m)) for m in some_layers(model)],
}


OTHERS = [(recipe, route) for recipe in ("tensorwise", "blockwise", "delayed") for route in list(ROUTES)[::3]]


@pytest.mark.parametrize(("recipe", "route"), [("rowwise", route) for route in ROUTES] + OTHERS)
def test_a_weight_written_inside_the_block_is_used(recipe: str, route: str) -> None:
    model = net(recipe)
    with octavo.scales.cast_once(model):
        for _ in range(2):
            backward(model, 0)
            before = model(batch().to(model.plain.weight.dtype)).detach()
            ROUTES[route](model)
            model.zero_grad()
            assert is_fresh(model)
            if route == "to bfloat16":
                break
            assert not torch.equal(model(batch()), before)
    assert is_fresh(model)


def test_weights_converted_to_another_dtype_and_back() -> None:
    """The weights are rounded to BF16 in between, and may have the same address as before."""
    for n in range(16, 400, 5):
        model = converted_model(nn.Sequential(nn.Linear(64, n, bias=False)))
        x = torch.randn(3, 64)
        with octavo.scales.cast_once(model):
            model(x)
            inside = model.to(torch.bfloat16).to(torch.float32)(x)
        assert torch.equal(inside, model(x)), n


def test_a_weight_given_for_one_call() -> None:
    model = converted_model(nn.Sequential(nn.Linear(64, 48, bias=False)))
    x, w = torch.randn(3, 64), torch.randn(48, 64)
    expected = [torch.func.functional_call(model, {"0.weight": w * 2**-i}, x) for i in range(5)]
    own = model(x)
    with octavo.scales.cast_once(model), torch.no_grad():
        for i, y in enumerate(expected):
            assert torch.equal(torch.func.functional_call(model, {"0.weight": w * 2**-i}, x), y)
            assert torch.equal(model(x), own)


@pytest.mark.parametrize("fill", ["step", "load"])
def test_bytes_stay_in_their_memory(fill: str) -> None:
    """A CUDA graph reads the addresses that it recorded."""
    model = net()
    with octavo.scales.cast_once(model):
        before = {name: (c.q.data.data_ptr(), c.q.scale.data_ptr()) for name, c in caches(model).items() if c.q}
        bytes_before = model.plain.weight_cache.q.data.float()
        backward(model, 0)
        sgd(model) if fill == "step" else loaded(model)
        assert before == {name: (c.q.data.data_ptr(), c.q.scale.data_ptr()) for name, c in caches(model).items() if c.q}
        assert not torch.equal(model.plain.weight_cache.q.data.float(), bytes_before)


def test_an_optimizer_of_another_model_may_step_between_forward_and_backward() -> None:
    """As in adversarial training."""
    model, other = net(), nn.Linear(3, 3)
    backward(model, 0)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    other(torch.randn(2, 3)).sum().backward()
    with octavo.scales.cast_once(model):
        loss = model(batch()).square().mean()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        loss.backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)


def by_hand(model: Block) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("evaluated", [False, True], ids=["", "evaluated"])
@pytest.mark.parametrize("step", [sgd, adamw, through_data, by_hand])
def test_sharded_parameters_are_not_stale(step: Callable[[Block], None], evaluated: bool) -> None:
    """After a forward pass without backward FSDP leaves the root's parameters gathered, as plain tensors."""
    model = net()
    fresh = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if evaluated:
        with torch.no_grad():
            model(batch())
    with octavo.scales.cast_once(model):
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


def test_a_model_is_pickled_inside_the_block_without_its_cache():
    model = converted_model(nn.Sequential(nn.Linear(64, 64)))
    x = torch.randn(4, 64)
    with octavo.scales.cast_once(model):
        expected = model(x)
        copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for other in copies:
        assert torch.equal(other(x), expected)
        other.load_state_dict({"0.weight": torch.zeros(64, 64), "0.bias": torch.zeros(64)})
        assert other(x).abs().max() == 0  # no stale bytes


# ---- From the forward to the backward pass a layer saves no bytes of its weight that can be computed again


def step(linear: octavo.Linear) -> tuple[Tensor, ...]:
    """y, dx and dw of one step whose input is always the same."""
    torch.manual_seed(1)
    return run(linear, torch.randn(T, K), torch.randn(T, N))


def saved_of_weight(linear: octavo.Linear, x: Tensor) -> int:
    """Bytes of the saved tensors that are as large as the weight, without the weight itself."""
    saved, w = saved_tensors(lambda: linear(x)), linear.weight
    return sum(t.nbytes for t in saved if t.numel() == w.numel() and t.data_ptr() != w.data_ptr())


def save_everything(w_q, cached, recipe, *, needs_x):
    return (None, None) if w_q is None else (w_q.data, w_q.scale)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_no_bytes_of_the_weight_are_saved(recipe: str) -> None:
    linear = converted(recipe)
    for _ in range(2):  # the second pass of `delayed` scales by its history
        assert saved_of_weight(linear, torch.randn(T, K, requires_grad=True)) == 0
        octavo.scales.update_scales(linear)


@pytest.mark.slow
@pytest.mark.parametrize("gemms", [("y",), ("dx",), ("dw",)], ids="-".join)
def test_compiled_code_saves_no_rotated_weight(gemms: tuple[str, ...]) -> None:
    """A rotation of the backward pass that did not wait for dy would be moved to the forward pass, and saved."""
    torch._dynamo.reset()
    linear = converted(replace(rowwise(), name="rotated", rotate=gemms))
    linear.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    assert saved_of_weight(linear, torch.randn(T, K, requires_grad=True)) == 0


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_gradients_are_those_of_saved_bytes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = converted(recipe)
    for grown in (1.0, 3.0):  # beyond its history the weight of `delayed` saturates
        linear.weight.data *= grown
        cast_again = step(linear)
        with monkeypatch.context() as patch:
            patch.setattr(linear_function, "_saved_w", save_everything)
            from_saved = step(linear)
        assert all(torch.equal(a, b) for a, b in zip(cast_again, from_saved, strict=True))
        octavo.scales.update_scales(linear)


@pytest.mark.parametrize("recipe", [*QUANTIZED, *(rowwise().in_bf16(gemm) for gemm in GEMMS)], ids=str)
def test_bytes_cached_by_cast_once_are_used(recipe: str | Recipe) -> None:
    linear = converted(recipe)
    with octavo.scales.cast_once(linear):
        inside = step(linear)
        assert saved_of_weight(linear, torch.randn(T, K, requires_grad=True)) in (0, N * K)
    assert all(torch.equal(a, b) for a, b in zip(inside, step(linear), strict=True))


@pytest.mark.parametrize("preset", [tensorwise, rowwise])
def test_bytes_that_were_drawn_stay_those_of_the_forward_pass(preset) -> None:
    plain = preset()
    w = replace(plain.w, rounding="stochastic")
    recipe = replace(plain, name="drawn", y=replace(plain.y, b=w), dx=replace(plain.dx, b=w))
    linear = converted(recipe, k=160, n=288)  # whose scales round dy little
    assert saved_of_weight(linear, torch.randn(T, 160, requires_grad=True)) == 288 * 160
    x = torch.eye(160, requires_grad=True)
    y = linear(x)
    (dx,) = torch.autograd.grad(y, x, torch.eye(288)[:160])
    torch.testing.assert_close(dx.t(), y.detach()[:, :160], rtol=0.02, atol=1e-6)


def test_a_frozen_input_keeps_the_scale_alone() -> None:
    recipe = replace(tensorwise(), name="drawn", dw=mxfp8().dw)
    assert saved_of_weight(converted(recipe), torch.randn(T, K)) == 0
