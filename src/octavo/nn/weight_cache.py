"""Weights are cast once an optimizer step, not once a micro-batch: their bytes, kept while they stand still.

    with octavo.cast_once(model):        # around an accumulation, or around the whole training loop
        for batch in micro_batches: ...

Outside the block every forward pass casts the weights anew and nothing can be stale. Inside it the bytes are made again
after each step of any torch optimizer and each `load_state_dict` of the model, in the same memory, so that compiled
code and CUDA graphs see them too; and an eager forward pass looks whether a weight was replaced, moved or written in
place since. Sharded parameters (DTensor: FSDP2, tensor parallel) are not kept: their bytes come and go beneath a
parameter that looks the same. Writes that leave no trace are not seen inside the
block: through `.data` by something that is no optimizer, through memory that the weight shares (`w.detach().numpy()`),
and in place where compiled code runs, which does not look. Leave the block, write, and enter it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops import quantize, quantize_stack


class WeightCache:
    """The bytes of weights that are stacked along their rows, or nothing."""

    def __init__(self) -> None:
        self.q: QTensor | None = None
        self.seen: list[Tensor] = []
        self.key: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: Any) -> WeightCache:
        """An empty one: no block watches the copy of a model."""
        return WeightCache()

    def get(self, weights: Sequence[Tensor], cast: Cast) -> QTensor | None:
        """The bytes of `weights`, if they are kept; made again if a weight is not what it was."""
        if self.q is not None and not torch.compiler.is_compiling() and _key(weights) != self.key:
            self.fill(weights, cast)
        return self.q

    @torch.no_grad()
    def fill(self, weights: Sequence[Tensor], cast: Cast) -> None:
        """Cast `weights`, into the memory that holds their bytes if there is some."""
        if any(hasattr(w, "device_mesh") for w in weights):
            self.clear()
            return
        q = _cast(weights, cast)
        if self.q is None or (self.q.shape, self.q.data.device) != (q.shape, q.data.device):
            self.q = q
        else:
            self.q.data.copy_(q.data)
            self.q.scale.copy_(q.scale)
        # What was cast stays allocated until the next look: so other weights cannot lie at its address.
        self.seen, self.key = [w.detach() for w in weights], _key(weights)

    def clear(self) -> None:
        """Keep nothing."""
        self.q, self.seen, self.key = None, [], ()


def _cast(weights: Sequence[Tensor], cast: Cast) -> QTensor:
    if cast.granularity == ROW:
        return quantize_stack(weights, cast)
    (w,) = weights  # only row scales stack
    return quantize(w, cast)


def _key(weights: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((id(w), w._version, w.data_ptr(), w.dtype) for w in weights)


@runtime_checkable
class Caches(Protocol):
    """A module that can keep the bytes of weights."""

    weight_cache: WeightCache

    def cached_weights(self) -> tuple[Sequence[nn.Linear], Cast] | None:
        """The layers whose weights it would keep, and their cast; None if it casts none now."""


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Keep the eight-bit bytes of `model`'s weights from one optimizer step to the next, while the block lasts.

    Costs one byte a weight. See the module's text for what is noticed.
    """
    caches = _caches(model)

    def refresh(*_: Any) -> None:
        for cache, linears, cast in caches:
            cache.fill([linear.weight for linear in linears], cast)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for cache, linears, cast in caches:
            if any(id(linear.weight) in held for linear in linears):
                cache.fill([linear.weight for linear in linears], cast)

    refresh()
    loaded = model.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]
    hooks = [register_optimizer_step_post_hook(stepped), loaded]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for cache, _, _ in caches:
            cache.clear()


def _caches(model: nn.Module) -> list[tuple[WeightCache, Sequence[nn.Linear], Cast]]:
    """What is to be kept: stacks first, then the layers that are in none; nothing that FSDP manages."""
    found: list[tuple[WeightCache, Sequence[nn.Linear], Cast]] = []
    taken = {id(layer) for module in model.modules() if shards(module) for layer in module.modules()}
    owners = [module for module in model.modules() if isinstance(module, Caches)]
    for module in sorted(owners, key=lambda owner: isinstance(owner, nn.Linear)):
        wanted = module.cached_weights()
        if wanted is not None and not taken.intersection(map(id, wanted[0])):
            found.append((module.weight_cache, *wanted))
            taken.update(map(id, wanted[0]))
    return found


def shards(module: nn.Module) -> bool:
    """Whether FSDP manages this module, by the name of its class: to import FSDP takes long."""
    return any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(module).__mro__)
