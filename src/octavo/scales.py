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
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from octavo.nn.delayed import histories, load_scale_state, scale_state, update_scales, weight_amax
from octavo.nn.weight_cache import cast_once

__all__ = [
    "cast_once",
    "freeze_scales",
    "learn_scales",
    "load_scale_state",
    "saturation",
    "scale_state",
    "seed_scales",
    "update_scales",
]


@runtime_checkable
class ScalesInput(Protocol):
    """A layer that scales its input by the input's own amax, or by a scale that it holds."""

    @property
    def freezable(self) -> bool:
        """Whether `freeze_input` can make the scale constant."""

    @property
    def input_limit(self) -> Tensor | None:
        """The largest magnitude, 0-dim, that does not saturate; None where the input's own amax gives the scale."""

    def freeze_input(self, amax: Tensor) -> Tensor:
        """Take the scale, float32 [1], that follows from `amax` of the input, 0-dim, from now on; return it."""


class Calibrated(Protocol):
    """A calibration (`octavo.calibration.Calibration`)."""

    @property
    def input_histories(self) -> Mapping[str, Sequence[float]]:
        """The amax of the input in each batch, oldest first, by the name of the linear layer."""


@contextmanager
def learn_scales(model: nn.Module) -> Iterator[None]:
    """Let delayed scaling record amax values in evaluation mode too, while the block lasts.

    `octavo.scales.update_scales` turns these values into scales, as in training.

    Example:
        >>> with octavo.scales.learn_scales(model.eval()):
        ...     model(batch)
        >>> octavo.scales.update_scales(model)
    """
    found = [history for _, history in histories(model)]
    before = [history.learns_in_evaluation for history in found]
    for history in found:
        history.learns_in_evaluation = True
    try:
        yield
    finally:
        for history, learned in zip(found, before, strict=True):
            history.learns_in_evaluation = learned


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

    Args:
        model: any module; its mode is as before in the end.
        layers: modules of it, by name.
        batches: see `freeze_scales`.

    Raises:
        ValueError: a layer saw no batch, inf or NaN, or zeros alone.
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


def seed_scales(model: nn.Module, calibration: Calibrated) -> None:
    """Begin the histories of delayed scaling with what a calibration saw, so that the first step has scales.

    The history of an input gets the amax of each batch of the calibration, and that of a weight its amax. A gradient
    was not seen: its first step scales dynamically.

    Args:
        model: converted with the recipe `delayed`, with the module names of the calibrated model.
        calibration: of `octavo.calibration.Calibration.load`.

    Raises:
        ValueError: no layer of `model` has a history, or the calibration lacks one. Nothing is changed.
    """
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if getattr(module, "histories", None) is not None
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no scale histories: octavo.convert(model, 'delayed') first")
    known = calibration.input_histories
    if missing := [name for name in layers if name not in known]:
        raise ValueError(f"the calibration has no amax of the input of {missing[0]} ({len(missing)} such layers)")
    for name, layer in layers.items():
        for operand, amax in (("x", known[name]), ("w", [float(weight_amax(layer.weight))])):
            if (history := layer.history_of(operand)) is not None:
                history.seed(amax)


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ScalesInput)}


def _run(
    model: nn.Module, layers: Mapping[str, Any], note: Callable[[str, Tensor], None], batches: Iterable[Any]
) -> None:
    """Run `model` in evaluation mode on `batches`, and call note(name, input) for each call of one of `layers`."""

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            if isinstance(x, Tensor) and x.numel():
                note(name, x.detach())

        return hook

    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise TypeError(f"{type(model).__name__} takes a list of batches, got {type(batches).__name__}: give [batch]")
    modes = {module: module.training for module in model.modules()}
    hooks = [layer.register_forward_pre_hook(hook_of(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        model.eval()
        for batch in batches:
            _call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)
