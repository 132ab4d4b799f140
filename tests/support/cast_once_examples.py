"""A small model for the tests of `octavo.scales.cast_once`, ways to write its weights, and what its caches hold."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.nn import NormLinear, SwiGLU
from octavo.nn.linear import WeightCache

CASTS = {"octavo::quantize", "octavo::quantize_stack", "octavo::quantize_scaled"}


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


def is_fresh(model: Net, *skip: str) -> bool:
    """True if the model's output is that of a new model with the same weights, outside any block."""
    dtype = model.first.weight.dtype
    fresh = Net().to(dtype)
    fresh.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
    octavo.convert(fresh, model.first.recipe, skip=skip)
    with torch.no_grad():
        return torch.equal(model(batch(dtype)), fresh(batch(dtype)))


def caches(model: nn.Module) -> dict[str, WeightCache]:
    """The caches of the modules, by name."""
    owned = {name: getattr(module, "weight_cache", None) for name, module in model.named_modules()}
    return {name: cache for name, cache in owned.items() if cache is not None}


def cached_modules(model: nn.Module) -> list[str]:
    """The modules that hold quantized weights now."""
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


def train(model: Net) -> None:
    model(batch()).square().mean().backward()


class ThroughData(torch.optim.Optimizer):
    """An optimizer that writes through `.data`, as many hand-written ones do: the parameter shows no trace of it."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-0.1)


def sgd(model: Net) -> None:
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def through_data(model: Net) -> None:
    ThroughData(model.parameters()).step()


def in_place(model: Net) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + torch.randn_like(p))


def loaded(model: Net) -> None:
    model.load_state_dict(Net().state_dict())
