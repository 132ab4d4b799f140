"""The scales of delayed scaling, from one step to the next and from a few batches.

    training       update_scales after each optimizer step; scale_state and load_scale_state in checkpoints
                   cast_once casts each weight once a step, with any recipe
    a few batches  convert(model, "delayed") -> learn_scales    histories record amax in evaluation mode too
                                             -> seed_scales     histories begin with the amax of a calibration
                                             -> freeze_scales   scales from some batches, constant from then on
                   octavo.load(packed)       -> freeze_scales   the scheme becomes static
                   either, with scales       -> saturation      the share of the inputs that these scales clip

With constant scales an input is quantized to the same bytes in every call, whatever else is in its batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from octavo.nn.delayed import histories, load_scale_state, scale_state, update_scales, weight_amax
from octavo.nn.linear import WeightCache
from octavo.nn.module_tools import call_arguments, check_module, is_fsdp_module
from octavo.nn.parallel_weights import parallel_of
from octavo.numerics.qtensor import Cast
from octavo.ops.launching import recording_stream

__all__ = [
    "cast_once", "freeze_scales", "learn_scales", "load_scale_state", "saturation", "scale_state", "seed_scales",
    "update_scales",
]  # fmt: skip


@contextmanager
def learn_scales(model: nn.Module) -> Iterator[None]:
    """Let delayed scaling record amax values in evaluation mode too, while the block lasts.

    `octavo.scales.update_scales` turns these values into scales, as in training.

    Example:
        >>> with octavo.scales.learn_scales(model.eval()):
        ...     model(batch)
        >>> octavo.scales.update_scales(model)
    """
    with ExitStack() as stack:
        for _, history in histories(model):
            stack.callback(setattr, history, "learns_in_evaluation", history.learns_in_evaluation)
            history.learns_in_evaluation = True
        yield


def freeze_scales(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """Run `model` on some batches, and make the scales of its linear layers' inputs constant.

    A layer that was converted with the recipe `delayed` takes the scale of the largest amax of the batches, with the
    margin of the recipe, and that of its weight. These scales no longer change, not in training either.
    The layers of a packed model (`octavo.load`) become those of the scheme static: a weight with finer scales is cast
    again, with one scale. Freeze a model before it generates: CUDA graphs would keep the former scales.

    Args:
        model: converted with the recipe `delayed`, or packed.
        batches: arguments of the model: a tensor, a tuple of positional arguments, or a mapping of keywords.

    Returns:
        The scale of the input of each layer, float32 [1], by the layer's name. `octavo.packing.pack` and
        `convert_layout` write them (`input_scales`).

    Raises:
        ValueError: no layer has a scale that can be frozen, or a layer saw no batch, inf or NaN, or zeros alone.

    Example:
        >>> octavo.convert(model, "delayed")
        >>> scales = octavo.scales.freeze_scales(model, prompts)
    """
    layers = {name: layer for name, layer in _layers(model).items() if layer.freezable}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer whose scales can be frozen: octavo.convert(model, 'delayed') first, "
            "or open a packed folder with a scheme other than static"
        )
    seen = observe_inputs(model, layers, batches)
    return {name: layer.freeze_input(seen[name]) for name, layer in layers.items()}


@torch.no_grad()
def observe_inputs(model: nn.Module, layers: Mapping[str, Any], batches: Iterable[Any]) -> dict[str, Tensor]:
    """Run `model` in evaluation mode on `batches`, and return the amax of the input of each layer, float32, 0-dim.

    A ValueError if a layer saw no batch, inf or NaN, or zeros alone.
    """
    seen: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        amax = x.abs().amax().float()
        seen[name] = torch.maximum(seen[name], amax) if name in seen else amax

    _run(model, layers, note, batches)
    if missing := [name for name in layers if name not in seen]:
        raise ValueError(f"{missing[0]} ({len(missing)} such layers) saw no input: give batches that use every layer")
    if wrong := [name for name, amax in seen.items() if not bool(amax.isfinite() & (amax > 0))]:
        raise ValueError(f"the input of {wrong[0]} holds inf or NaN, or zeros alone: no scale follows from that")
    return seen


@torch.no_grad()
def saturation(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Run `model` in evaluation mode on `batches`, and count the elements of inputs that saturate.

    Args:
        model: converted with the recipe `delayed`, after a step or frozen; or packed with the scheme static.
        batches: see `freeze_scales`.

    Returns:
        The share of the elements, 0 to 1, of the input of each layer that holds its scale, by the layer's name.

    Raises:
        ValueError: no layer holds a scale of its input.

    Example:
        >>> octavo.scales.freeze_scales(model, prompts)
        >>> max(octavo.scales.saturation(model, other_prompts).values())
    """
    limits = {name: layer.input_limit for name, layer in _layers(model).items()}
    layers = {name: model.get_submodule(name) for name, limit in limits.items() if limit is not None}
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} holds a scale of its input: see octavo.scales.freeze_scales"
        )
    counts = {name: (torch.zeros((), dtype=torch.int64), 0) for name in layers}

    def note(name: str, x: Tensor) -> None:
        above, total = counts[name]
        counts[name] = above.to(x.device) + (x.abs() > limits[name]).sum(), total + x.numel()

    _run(model, layers, note, batches)
    return {name: int(above) / max(total, 1) for name, (above, total) in counts.items()}


def seed_scales(model: nn.Module, calibration: Any) -> None:
    """Begin the histories of delayed scaling with amax values that are known, so that the first step has scales.

    The history of an input gets the amax of each batch of the calibration, and that of a weight its amax. A gradient
    was not seen: its first step scales dynamically.

    Args:
        model: converted with the recipe `delayed`, with the module names of the calibrated model.
        calibration: of `octavo.calibration.Calibration.load`, or `octavo.checkpoint.packed_folder.PackedTensors` of a
            folder packed with the scheme static, whose stored scales are those of the largest amax of its calibration.

    Raises:
        ValueError: no layer of `model` has a history, or the calibration lacks one. Nothing is changed.
    """
    layers: dict[str, Any] = {n: m for n, m in model.named_modules() if getattr(m, "histories", None) is not None}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no scale histories: octavo.convert(model, 'delayed') first")
    known: Mapping[str, Sequence[float]] = getattr(calibration, "input_histories", {})  # of each batch, oldest first
    if missing := [name for name in layers if name not in known]:
        raise ValueError(f"no amax of the input of {missing[0]} ({len(missing)} such) in {type(calibration).__name__}")
    for name, layer in layers.items():
        for operand, amax in (("x", known[name]), ("w", [float(weight_amax(layer.weights_to_cast()))])):
            if (history := layer.history_of(operand)) is not None:
                history.seed(amax)


def _layers(model: nn.Module) -> dict[str, Any]:
    """The layers that scale their input by its own amax, or by a scale that they hold."""
    check_module(model, "octavo.scales")
    return {name: module for name, module in model.named_modules() if hasattr(module, "freeze_input")}


def _run(
    model: nn.Module, layers: Mapping[str, Any], note: Callable[[str, Tensor], None], batches: Iterable[Any]
) -> None:
    """Run `model` in evaluation mode on `batches`, and call note(name, input) for each call of one of `layers`."""

    def see(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in (*args[:3], *map(kwargs.get, ("input", "x", "query", "key", "value"))):  # attention has three
            if isinstance(x, Tensor) and x.numel():
                note(name, x.detach())

    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise TypeError(f"{type(model).__name__} takes a list of batches, got {type(batches).__name__}: give [batch]")
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_pre_hook(partial(see, name), with_kwargs=True))
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        for batch in batches:
            args, keywords = call_arguments(batch)
            model(*args, **keywords)


# ---- Weights cast once an optimizer step instead of once a micro-batch, by caching their quantized bytes.
#
# New bytes go into the same memory, so that compiled code and CUDA graphs read them too. The parameters that FSDP2
# shards are not cached: their memory is freed and filled again while the parameter looks the same.
# `octavo.distributed.fp8_all_gather` casts those once a step too.


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Cache the quantized weights of `model` from one optimizer step to the next, while the block lasts.

    The cache takes one byte a weight. Weights that optimizers, `load_state_dict` or assignments change are cast again;
    writes through `.data` or shared memory are not noticed. On a GPU the casts after a step run as a CUDA graph.

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
    caches, recorded = cached_stacks(model), _RecordedCasts()
    # Read as here, a weight takes a tenth of the time of an attribute: each parameter may have an optimizer of its own.
    holders = [(linear._parameters, at) for at, (_, linears, _) in enumerate(caches) for linear in linears]

    def refresh_after_step(optimizer: Optimizer, *_: Any) -> None:
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        changed = {at for held, at in holders if id(held.get("weight")) in updated}
        recorded.fill([caches[at] for at in sorted(changed)])

    refresh = _Refresh(caches)
    refresh()
    with ExitStack() as stack:
        for cache, _, _ in caches:
            stack.callback(cache.clear)
        stack.enter_context(register_optimizer_step_post_hook(refresh_after_step))
        stack.enter_context(model.register_load_state_dict_post_hook(refresh))  # type: ignore[no-untyped-call]
        yield


CachedStack = tuple[WeightCache, Sequence[nn.Linear], Cast]


class _Refresh:
    """The hook of a model that fills its caches. In a copy of the model, pickled or not, it does nothing."""

    def __init__(self, caches: Sequence[CachedStack] = ()) -> None:
        self.caches = caches

    def __call__(self, *_: Any) -> None:
        _fill(self.caches)

    def __reduce__(self) -> tuple[type["_Refresh"], tuple[()]]:
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
        quantized = parallel_of(parts[0][1]).quantize([(linears, cast) for _, linears, cast in parts])
        for (cache, linears, _), q in zip(parts, quantized, strict=True):
            cache.store(q, [linear.weight for linear in linears])


class _RecordedCasts:
    """The casts of one list of caches after each optimizer step, on a GPU as a CUDA graph from the second time on: the
    256 launches of a Llama of a billion parameters take the host 8 ms."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, ...]] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def fill(self, caches: Sequence[CachedStack]) -> None:
        places = _places_on_gpu(caches)
        if not places or places != self._places:
            self._places, self._graph = places, None
            _fill(caches)
            return
        if self._graph is None:
            graph, device = torch.cuda.CUDAGraph(), caches[0][1][0].weight.device
            # Threads that pin memory, as those of data loaders do, may go on.
            recorded = torch.cuda.graph(graph, stream=recording_stream(device), capture_error_mode="thread_local")
            with torch.cuda.device(device), recorded:
                _fill(caches)
            self._graph = graph
        self._graph.replay()
        for cache, linears, _ in caches:
            torch.autograd.graph.increment_version([cache.q.data, cache.q.scale])  # type: ignore[union-attr]
            cache.note_cast([linear.weight for linear in linears])


def _places_on_gpu(caches: Sequence[CachedStack]) -> list[tuple[Any, ...]]:
    """The memory of the weights and the caches; empty if a graph cannot cast these weights."""
    devices = {linear.weight.device for _, linears, _ in caches for linear in linears}
    if len(devices) != 1 or devices.pop().type != "cuda" or torch.cuda.is_current_stream_capturing():
        return []
    places: list[tuple[Any, ...]] = []
    for cache, linears, _ in caches:
        tensors: list[Any] = [linear.weight for linear in linears]
        if cache.q is None or parallel_of(linears) is not None or any(hasattr(t, "device_mesh") for t in tensors):
            return []
        places += [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (*tensors, cache.q.data, cache.q.scale)]
    return places


def cached_stacks(model: nn.Module) -> list[CachedStack]:
    """The caches to fill, with layers and casts: stacks first, then other layers; none that FSDP manages."""
    caches: list[CachedStack] = []
    taken = {id(layer) for module in model.modules() if is_fsdp_module(module) for layer in module.modules()}
    owners: list[Any] = [module for module in model.modules() if hasattr(module, "cached_weights")]
    for module in sorted(owners, key=lambda owner: isinstance(owner, nn.Linear)):
        cached = module.cached_weights()
        if cached is None or taken.intersection(map(id, cached[0])):
            continue
        if all("weight" in layer._parameters for layer in cached[0]):  # else computed from what optimizers change
            caches.append((module.weight_cache, *cached))
            taken.update(map(id, cached[0]))
    return caches
