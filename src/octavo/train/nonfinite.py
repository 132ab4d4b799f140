"""The first number of a step that is inf or NaN: the layer, and the tensor of the layer, that had it.

The step is run again, layer by layer. Hooks look at what each layer reads and writes: x and y in the forward pass, dy
and dx in the backward pass. A layer with hooks is not fused with others, and compiled blocks run in eager mode, so the
layer is found also where the training step has no tensor of its own for it. The numbers may differ a little from those
of the fused pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.delayed import histories
from octavo.nn.expert_conversion import find_experts
from octavo.nn.experts import Experts
from octavo.nn.weight_cache import local_part
from octavo.telemetry.experts import first_matrix
from octavo.train.blocks import eager
from octavo.train.evaluation import own_random
from octavo.train.ranks import gather


@dataclass(frozen=True, order=True)
class Place:
    """The tensor of a layer that has the first number that is not finite.

    Args:
        order: of the tensors of a step, as they are computed.
        layer: the name of a module.
        tensor: "w" (any of its parameters), "x", "y", "dy", "dx" or "dw".
        expert: the number of the expert that it is of; None where that is not known.
    """

    order: int
    layer: str
    tensor: str
    expert: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.tensor} of {'' if self.expert is None else f'expert {self.expert} of '}{self.layer}"


def find_nonfinite(model: nn.Module, device: torch.device, run: Callable[[], object]) -> Place | None:
    """The first place, over all ranks; None if the step is finite. Every rank must call this.

    Weights, gradients, scale histories and the random state of the run are afterwards as they were, but the gradients
    are None.

    Args:
        model: whose weights are those at the beginning of the step.
        device: of the model.
        run: computes the forward and backward passes of the step.
    """
    search, experts = _Search(), find_experts(model)
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        search.look(owner, "w", parameter, _first_bad_matrix if owner in experts else None)
    with eager(), own_random(device), _pending_amax_restored(model), search.hooks(model):
        model.zero_grad()
        run()
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        search.look(owner, "dw", parameter.grad, _first_bad_matrix if owner in experts else None)
    model.zero_grad()
    places = [place for place in gather(search.found) if place is not None]
    return min(places, default=None)


class _Search:
    """`found` is the first place so far, of this rank."""

    def __init__(self) -> None:
        self.found: Place | None = None
        self._order = 0

    def look(self, layer: str, tensor: str, value: Any, find_expert: Callable[[Any], int] | None = None) -> None:
        """Look at a tensor, or at the part of a DTensor that lies on this rank.

        Args:
            find_expert: gives the expert of a tensor of experts that is not finite.
        """
        self._order += 1
        local = local_part(value)
        if self.found is not None or not isinstance(local, Tensor) or not local.is_floating_point():
            return
        if not local.detach().isfinite().all():  # detached: checkpointed code must save the same tensors again
            self.found = Place(self._order, layer, tensor, find_expert(value) if find_expert else None)

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Look at the tensors of all modules that compute themselves, while the block lasts."""
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if next(module.parameters(recurse=False), None) is not None:
                    hooks.enter_context(module.register_forward_pre_hook(self._before(name)))
                    hooks.enter_context(module.register_forward_hook(self._after(name)))
            yield

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            for x in args:
                self.look(name, "x", x)
            # A view for each layer, so that its dx is not the sum over all layers that read x.
            return tuple(self._watched(name, "dx", x.view_as(x)) if _differentiable(x) else x for x in args)

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, y: Any) -> None:
            of_experts = isinstance(module, Experts) and len(args) > 1
            self.look(name, "y", y, partial(_expert_of_bad_tokens, args[1]) if of_experts else None)
            self._watched(name, "dy", y)

        return hook

    def _watched(self, name: str, tensor: str, value: Any) -> Any:
        """`value`, whose gradient is looked at when it is computed."""
        if _differentiable(value):
            value.register_hook(lambda gradient: self.look(name, tensor, gradient))
        return value


def _first_bad_matrix(stack: Any) -> int:
    """The number of the first matrix of a stack [E, N, K] that is not finite."""
    return first_matrix(stack) + int(local_part(stack).detach().isfinite().flatten(1).all(1).logical_not().nonzero()[0])


def _expert_of_bad_tokens(index: Tensor, y: Tensor) -> int:
    """The expert that most of the tokens have whose output y [T, K] is not finite; of several, that with fewest others.

    Args:
        index: [T, top_k], the experts of each token.
    """
    bad = y.detach().isfinite().all(1).logical_not()
    total = index.flatten().bincount()
    found = index[bad].flatten().bincount(minlength=len(total))
    return int((found + 0.5 * found / total.clamp(min=1)).argmax())


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@contextmanager
def _pending_amax_restored(model: nn.Module) -> Iterator[None]:
    found = [(history, history.pending.clone()) for _, history in histories(model)]
    try:
        yield
    finally:
        for history, pending in found:
            history.pending.copy_(pending)
