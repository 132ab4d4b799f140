"""Weights of which there is more than the parameter: cast bytes that are kept, gathered, or divided among ranks.

Cast weights once an optimizer step instead of once a micro-batch, by caching their quantized bytes.

    with octavo.scales.cast_once(model):        # around an accumulation, or around the whole training loop
        for batch in micro_batches: ...

Outside the block every forward pass casts the weights, so nothing can be stale. Inside it the weights are cast again
after each step of any torch optimizer and each `load_state_dict` of the model. The new bytes go into the same memory,
so that compiled code and CUDA graphs read them too. An eager forward pass also checks whether a weight was replaced,
moved or written in place since. The parameters that FSDP2 shards are not cached: their memory is freed and
filled again while the parameter looks the same. `octavo.distributed.fp8_all_gather` casts those once a step too.

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

from octavo.nn.module_tools import PrecomputedProjections, check_module, is_fsdp_module
from octavo.numerics.formats import format_of
from octavo.numerics.qtensor import Cast, QTensor, parse_granularity
from octavo.ops import quantize, quantize_stack


class WeightCache:
    """A cache for the quantized weights of one layer, or of several that are stacked along their rows.

    Attributes:
        q: what `octavo.scales.cast_once` has cached.
        gathered: what FSDP2 has gathered, where `octavo.distributed.fp8_all_gather` makes it gather quantized weights.
        Valid
            while the weights are `GatheredWeight`s; at other times its memory is freed.
        amax: [1, 1], the amax of this rank's part of the gathered weight, where a history records it.
    """

    def __init__(self) -> None:
        self.q: QTensor | None = None
        self.gathered: QTensor | None = None
        self.amax: Tensor | None = None
        self.cast_weights: list[Tensor] = []
        self.key: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        """Copied and pickled as an empty cache: no block of `cast_once` refreshes the copy of a model."""
        return WeightCache, ()

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
    writes through `.data` or shared memory are not noticed.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> with octavo.scales.cast_once(model):
        ...     for micro_batches in steps:
        ...         for x, y in micro_batches:
        ...             loss(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    check_module(model, "cast_once")
    caches = _caches(model)

    def refresh_after_step(optimizer: Optimizer, *_: Any) -> None:
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        _fill([stack for stack in caches if any(id(linear.weight) in updated for linear in stack[1])])

    refresh = _Refresh(caches)
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


class _Refresh:
    """The hook of a model that fills its caches. In a copy of the model, pickled or not, it does nothing."""

    def __init__(self, caches: Sequence[CachedStack] = ()) -> None:
        self.caches = caches

    def __call__(self, *_: Any) -> None:
        _fill(self.caches)

    def __reduce__(self) -> tuple[type[_Refresh], tuple[()]]:
        return _Refresh, ()


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


# ---- The unsharded weight of a layer, as `octavo.distributed.fp8_all_gather` makes FSDP2 gather it: quantized.
#
# FSDP2 registers it as the layer's parameter while the layer runs. To autograd it is a tensor [N, K] of the parameter's
# dtype, so the gradient of the weight has that dtype. It has no numbers of that dtype: only the bytes and scales exist,
# in memory that FSDP2 frees and fills again.


_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_RESHAPES = {torch.ops.aten.as_strided.default, torch.ops.aten.view.default}
_FACTORIES = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.new_zeros.default,
}


class GatheredWeight(Tensor):
    """A quantized weight [N, K] that looks to autograd like a tensor of `dtype`.

    Args:
        data: the bytes [N, K], contiguous.
        scale: in the shape of the granularity.
        dtype: of the parameter.
        granularity: the name of the scales' granularity.
    """

    data_bytes: Tensor
    scale: Tensor
    granularity: str

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype, granularity: str) -> GatheredWeight:
        make: Any = torch.Tensor._make_wrapper_subclass
        w: GatheredWeight = make(cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device)
        return w

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype, granularity: str) -> None:
        self.data_bytes, self.scale, self.granularity = data, scale, granularity

    def dequantize(self) -> Tensor:
        """The weight [N, K] as numbers of its dtype, differentiable: the gradient of the result is the weight's."""
        wide: Tensor = _Dequantize.apply(self)  # type: ignore[no-untyped-call]
        return wide

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # AOTAutograd prints weights that have no bytes now.
        return f"GatheredWeight({list(self.shape)}, {self.dtype}, by {self.granularity})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, str]]:
        return ["data_bytes", "scale"], (self.dtype, self.granularity)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[torch.dtype, str], size: Any, stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["data_bytes"], inner["scale"], *context)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        w = args[0]
        if func in _ALIASES or (func in _RESHAPES and tuple(args[1]) == tuple(w.shape)):
            return GatheredWeight(w.data_bytes, w.scale, w.dtype, w.granularity)
        if func in _FACTORIES:
            like = torch.empty(w.shape, dtype=w.dtype, device=w.device)
            return func(like, *args[1:], **(kwargs or {}))
        raise NotImplementedError(
            f"{func} of a weight that was gathered in eight bits: it has no numbers of {w.dtype}. Take "
            "weight.dequantize(), or the sharded parameter outside of the forward and backward pass"
        )


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: GatheredWeight) -> Tensor:
        q = QTensor(w.data_bytes, w.scale, format_of(w.data_bytes.dtype), parse_granularity(w.granularity))
        return q.dequantize(w.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


# ---- Linear layers of which each rank of a mesh has a part: tensor parallelism.
#
# `octavo.distributed.ColumnParallel` and `RowParallel` give such a layer the attribute `parallel`, which computes it
# together with the other ranks, before and after `octavo.convert`. This module is all that layers know of other ranks.


class Parallel(Protocol):
    """The computation of a layer of which each rank has a part."""

    def linear(self, layer: Any, x: Tensor) -> Tensor:
        """The output of `layer`, an `nn.Linear`, converted or not."""

    def norm_linear(self, module: Any, x: Tensor, residual: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """`NormLinear.forward` of a module whose layers are computed so."""

    def mlp(self, module: Any, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`FusedMLP.run` of a module whose inner layers are computed so."""

    def quantize(self, stacks: Sequence[tuple[Sequence[nn.Linear], Cast]]) -> list[QTensor]:
        """This rank's parts of the weights of each stack of parallel layers, by a cast of row scales."""


class ParallelLinear(nn.Linear):
    """An `nn.Linear` of which each rank has a part, not converted."""

    parallel: Parallel

    def forward(self, x: Tensor | PrecomputedProjections) -> Tensor:
        return x.output_of(self) if isinstance(x, PrecomputedProjections) else self.parallel.linear(self, x)


def parallel_of(layers: Sequence[nn.Module]) -> Parallel | None:
    """The computation of layers that share an input; None for layers that each rank has whole.

    Raises:
        ValueError: some of them are parallel and others are not.
    """
    ways = {layer.__dict__.get("parallel") for layer in layers}
    if len(ways) > 1:
        raise ValueError(
            "layers that share an input must be parallelized together: give the style "
            f"octavo.distributed.ColumnParallel to each of {', '.join(map(str, layers))}"
        )
    way: Parallel | None = ways.pop()
    return way
