"""Two ways to compute a model, compared layer by layer.

    octavo verify    each layer of MODEL and the packed one, given the same inputs                          y
    octavo.check     each call of a layer, and the products of its dequantized weight                       y, dx
    two models       the layers of both that have one name, as both run (`layer_errors`)                    y
    a training step  each tensor of each layer, and finite numbers (`octavo.train.supervision`)             x, y, dy, dx

The first two call a layer by itself, so an error is of that layer alone. Where two models run, an error goes on to all
later layers, and the first one in the order of the calls tells where it comes from.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from octavo.evaluation.metrics import energies, sqnr


@dataclass
class LayerError:
    """The error of one tensor of a layer, summed over calls, against a reference."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, expected: Tensor, found: Tensor) -> None:
        signal, noise = energies(expected, found)
        self.signal, self.noise = self.signal + signal, self.noise + noise

    @property
    def sqnr(self) -> float:
        """In dB; inf where both are equal."""
        return sqnr(self.signal, self.noise)


def with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have parameters of their own, or a packed weight, by name."""
    own = {name: (*m.parameters(recurse=False), m._buffers.get("weight")) for name, m in model.named_modules()}
    return {name: model.get_submodule(name) for name, tensors in own.items() if any(t is not None for t in tensors)}


def layer_errors(
    reference: nn.Module,
    other: nn.Module,
    run: Callable[[nn.Module], object],
    choose: Callable[[nn.Module], dict[str, nn.Module]] = with_parameters,
) -> Iterator[tuple[str, LayerError]]:
    """The error of y of each layer that both models call by one name, in the order of the reference's calls.

    `run` computes a forward pass of the model that it is given, and `choose` gives the modules to compare: by default
    those `with_parameters`. The outputs of both models stay in memory.
    """
    expected, found = (_outputs(model, run, choose(model)) for model in (reference, other))
    for name, calls in expected.items():
        pairs = list(zip(calls, found.get(name, ()), strict=False))
        if pairs and all(ours.shape == theirs.shape for ours, theirs in pairs):
            error = LayerError()
            for ours, theirs in pairs:
                error.add(ours, theirs.to(ours.device))
            yield name, error


def _outputs(
    model: nn.Module, run: Callable[[nn.Module], object], modules: dict[str, nn.Module]
) -> dict[str, list[Tensor]]:
    outputs: dict[str, list[Tensor]] = {}

    def see(call: Call, tensor: str, value: Tensor) -> None:
        if tensor == "y" and value.is_floating_point():
            outputs.setdefault(call.name, []).append(value.detach().clone())  # a later operation may change it in place

    with seen_calls(modules, see):
        run(model)
    return outputs


# ---- The tensors of each call of a layer, as a forward and backward pass computes them.


@dataclass(eq=False)
class Call:
    """One call of a layer, of which dx comes after dy, if both come."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]  # until y has come


See = Callable[[Call, str, Tensor], None]
"""the call, the name of the tensor (x, y, dy or dx), and its value"""


@contextmanager
def seen_calls(modules: dict[str, nn.Module], see: See) -> Iterator[None]:
    """Within the block `see` is given x, y, dy and dx of each call of the modules."""
    calls: dict[str, Call] = {}  # the last one of each module

    def before(name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        calls[name] = call = Call(name, module, args)
        for x in args:
            if isinstance(x, Tensor):
                see(call, "x", x)
        # A view for each module, so that its dx is not the sum over all modules that read x.
        call.args = tuple(follow(call, "dx", x.view_as(x)) if has_gradient(x) else x for x in args)
        return call.args

    def after(name: str, module: nn.Module, args: Any, y: Any) -> None:
        call = calls[name]
        output = y[0] if isinstance(y, tuple) and y else y
        if isinstance(output, Tensor):
            see(call, "y", output)
            follow(call, "dy", output)
        call.args = ()

    def follow(call: Call, tensor: str, value: Tensor) -> Tensor:
        """`value`, whose gradient is seen when it is computed."""
        if has_gradient(value):
            value.register_hook(lambda gradient: see(call, tensor, gradient))  # type: ignore[no-untyped-call]
        return value

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(before, name)))
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        yield


def has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
