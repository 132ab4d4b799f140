"""Cast weights once an optimizer step instead of once a micro-batch, by caching their quantized bytes.

    with octavo.cast_once(model):        # around an accumulation, or around the whole training loop
        for batch in micro_batches: ...

Outside the block every forward pass casts the weights, so nothing can be stale. Inside it the weights are cast again
after each step of any torch optimizer and each `load_state_dict` of the model. The new bytes go into the same memory,
so that compiled code and CUDA graphs read them too. An eager forward pass also checks whether a weight was replaced,
moved or written in place since. The parameters that FSDP2 shards are not cached: their memory is freed and
filled again while the parameter looks the same. `octavo.dist.fp8_all_gather` casts those once a step too.

Some writes leave no trace and are not noticed inside the block: through `.data` by code that is no optimizer, through
memory that the weight shares (`w.detach().numpy()`), and in place before compiled code, which does not check. For
these, leave the block, write, and enter it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from octavo.nn.gathered_weight import GatheredWeight
from octavo.nn.layer_limits import check_module
from octavo.nn.module_class import is_fsdp_module
from octavo.nn.parallel import parallel_of
from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor
from octavo.ops import quantize, quantize_stack


class WeightCache:
    """A cache for the quantized weights of one layer, or of several that are stacked along their rows.

    Attributes:
        q: what `octavo.cast_once` has cached.
        gathered: what FSDP2 has gathered, where `octavo.dist.fp8_all_gather` makes it gather quantized weights. Valid
            while the weights are `GatheredWeight`s; at other times its memory is freed.
        amax: [1, 1], the amax of this rank's part of the gathered weight, where a history records it.
    """

    def __init__(self) -> None:
        self.q: QTensor | None = None
        self.gathered: QTensor | None = None
        self.amax: Tensor | None = None
        self.cast_weights: list[Tensor] = []
        self.key: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: Any) -> WeightCache:
        """An empty cache: no block of `cast_once` refreshes the copy of a model."""
        return WeightCache()

    def get(self, weights: Sequence[Tensor], cast: Cast) -> QTensor | None:
        """The quantized `weights`, if they are gathered or cached; cast again if a weight has changed."""
        if isinstance(weights[0], GatheredWeight):
            return self.gathered
        if self.q is not None and self.is_stale(weights):
            self.fill(weights, cast)
        return self.q

    @torch.no_grad()
    def fill(self, weights: Sequence[Tensor], cast: Cast) -> None:
        """Cast `weights` and cache the bytes, in the same memory as before if they fit."""
        if any(hasattr(w, "device_mesh") for w in weights):
            self.clear()
            return
        self.store(_cast(weights, cast), weights)

    @torch.no_grad()
    def store(self, q: QTensor, weights: Sequence[Tensor]) -> None:
        """Cache the quantized `weights`, in the same memory as before if they fit."""
        if self.q is None or (self.q.shape, self.q.data.device) != (q.shape, q.data.device):
            self.q = q
        else:
            self.q.data.copy_(q.data)
            self.q.scale.copy_(q.scale)
        # These references keep the memory allocated until the next cast, so that no other weight gets its address.
        self.cast_weights, self.key = [local_part(w).detach() for w in weights], _key(weights)

    def is_stale(self, weights: Sequence[Tensor]) -> bool:
        """Whether a weight has changed since it was cached. Compiled code does not ask."""
        return not torch.compiler.is_compiling() and _key(weights) != self.key

    def clear(self) -> None:
        self.q, self.cast_weights, self.key = None, [], ()


def _cast(weights: Sequence[Tensor], cast: Cast) -> QTensor:
    if cast.by_row:
        return quantize_stack(weights, cast)
    (w,) = weights  # only row scales stack
    return quantize(w, cast)


def _key(weights: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((id(w), w._version, w.data_ptr(), w.dtype) for w in map(local_part, weights))


def local_part(t: Any) -> Tensor:
    """The part of a DTensor that this rank holds, in the same memory; any other tensor as it is."""
    part: Tensor = getattr(t, "_local_tensor", t)
    return part


@runtime_checkable
class Caches(Protocol):
    weight_cache: WeightCache

    def cached_weights(self) -> tuple[Sequence[nn.Linear], Cast] | None:
        """The layers whose weights it can cache, and their cast; None if it can cache none now."""


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Cache the quantized weights of `model` from one optimizer step to the next, while the block lasts.

    The cache takes one byte a weight. Weights that optimizers, `load_state_dict` or assignments change are cast again;
    writes through `.data` or shared memory are not noticed (`octavo.nn.weight_cache`).

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> with octavo.cast_once(model):
        ...     for micro_batches in steps:
        ...         for x, y in micro_batches:
        ...             loss(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    check_module(model, "cast_once")
    caches = _caches(model)

    def refresh(*_: Any) -> None:
        _fill(caches)

    def refresh_after_step(optimizer: Optimizer, *_: Any) -> None:
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        _fill([stack for stack in caches if any(id(linear.weight) in updated for linear in stack[1])])

    refresh()
    loaded = model.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]
    hooks = [register_optimizer_step_post_hook(refresh_after_step), loaded]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for cache, _, _ in caches:
            cache.clear()


CachedStack = tuple[WeightCache, Sequence[nn.Linear], Cast]


def _fill(caches: Sequence[CachedStack]) -> None:
    """Cast the weights of all caches; those of which each rank has a part together, with one exchange."""
    parts: list[CachedStack] = []
    for cache, linears, cast in caches:
        if parallel_of(linears) is None:
            cache.fill([linear.weight for linear in linears], cast)
        else:
            parts.append((cache, linears, cast))
    if parts:
        way = parallel_of(parts[0][1])
        assert way is not None
        quantized = way.quantize([(linears, cast) for _, linears, cast in parts])
        for (cache, linears, _), q in zip(parts, quantized, strict=True):
            cache.store(q, [linear.weight for linear in linears])


def _caches(model: nn.Module) -> list[CachedStack]:
    """The caches to fill, with layers and casts: stacks first, then other layers; none that FSDP manages."""
    caches: list[CachedStack] = []
    taken = {id(layer) for module in model.modules() if is_fsdp_module(module) for layer in module.modules()}
    owners = [module for module in model.modules() if isinstance(module, Caches)]
    for module in sorted(owners, key=lambda owner: isinstance(owner, nn.Linear)):
        cached = module.cached_weights()
        if cached is not None and not taken.intersection(map(id, cached[0])):
            caches.append((module.weight_cache, *cached))
            taken.update(map(id, cached[0]))
    return caches
