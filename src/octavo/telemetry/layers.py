"""The layers of a model that are watched, where each records its operands, and how its GEMMs run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.nn.attention import MultiheadAttention, input_weights
from octavo.nn.backends import gemm_backends, grouped_backends
from octavo.nn.conv1d import is_conv1d, shape_of
from octavo.nn.linear import RecipeLayer
from octavo.nn.mlp import FusedMLP
from octavo.nn.module_class import class_name
from octavo.nn.norm_linear import NormLinear
from octavo.nn.observer import ExpertObserver, Observer
from octavo.ops import Backend
from octavo.recipe import Recipe
from octavo.telemetry.experts import ExpertStack, expert_stacks
from octavo.telemetry.schema import OPERANDS, GemmRun, WatchedLayer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_GEMM_OF = {"y": "x", "dx": "dy", "dw": "dy", "recomputation": "x"}  # the operand whose record shows that a GEMM ran


@dataclass(frozen=True, eq=False)
class Place:
    """A module that records operands, and the layers whose weights it reads: several where it runs them as one GEMM."""

    name: str
    module: Any
    layers: tuple[int, ...]


class Layers:
    """The linear layers of a model, by number, and the observers of those that were converted.

    Attributes:
        modules: `nn.Linear`, transformers' `Conv1D`, converted layers (convolutions and attentions too), and stacks of
            experts' matrices.
        names: without the prefixes of wrappers.
        places: of each converted layer its own, and of each fused module one more.
    """

    def __init__(self, model: nn.Module) -> None:
        found: dict[str, Any] = {_plain(name): m for name, m in model.named_modules() if _is_linear(m)}
        found |= {_plain(name): stack for name, stack in expert_stacks(model).items()}
        self.names = list(found)
        self.modules: list[Any] = list(found.values())
        numbers = {id(module): i for i, module in enumerate(self.modules)}
        converted = [i for i, module in enumerate(self.modules) if recipe_of(module) is not None]
        self.places = [Place(self.names[i], self.modules[i], (i,)) for i in converted]
        for name, fused, linears in _fused(model):
            if all(isinstance(linear, RecipeLayer) for linear in linears):
                self.places.append(Place(_plain(name), fused, tuple(numbers[id(linear)] for linear in linears)))

        again = {id(m) for block in model.modules() if _is_recomputed_by_compiler(block) for m in block.modules()}
        owners = [m.module if isinstance(m, ExpertStack) else m for m in self.modules]
        self._compiled = [{"recomputed"} if id(owner) in again else set() for owner in owners]

    def attach(self, device: torch.device) -> None:
        """Give each place an observer.

        Raises:
            ValueError: the model is watched already.
        """
        if any(place.module.observer is not None for place in self.places):
            raise ValueError("the model is watched already: close the other octavo.watch first")
        for place in self.places:
            if isinstance(place.module, ExpertStack):
                place.module.attach(device)
            else:
                place.module.observer = Observer(len(place.layers), device)

    def detach(self) -> None:
        for place in self.places:
            if isinstance(place.module, ExpertStack):
                place.module.detach()
            else:
                place.module.__dict__.pop("observer", None)

    @property
    def experts(self) -> list[tuple[int, ExpertObserver]]:
        """The observer of each stack of experts that is recorded, with the number of its layer."""
        stacks = ((place.layers[0], place.module.observer) for place in self.places)
        return [(layer, observer) for layer, observer in stacks if isinstance(observer, ExpertObserver)]

    @property
    def stacks(self) -> list[tuple[int, ExpertStack]]:
        """All stacks of experts' matrices, with the numbers of their layers."""
        return [(i, module) for i, module in enumerate(self.modules) if isinstance(module, ExpertStack)]

    @property
    def stats(self) -> list[Tensor]:
        """The statistics of all places."""
        observers = [place.module.observer for place in self.places]
        return [stats for observer in observers for stats in (observer.forward, observer.backward)]

    def operands(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """For each operand of each converted layer: the layer, the operand, and where its statistics are.

        Returns:
            layers and operands [n], and the rows [n, 2] of the concatenated `stats`: those of the layer's own place and
            of the fused module's. -1 for none.
        """
        rows: dict[tuple[int, int], list[int]] = {}
        start = 0
        for place in self.places:
            count = len(place.layers)
            for i, layer in enumerate(place.layers):
                for operand, slot in enumerate((0, 1 + i, 1 + count + i)):  # the layers share x
                    rows.setdefault((layer, operand), []).append(start + slot)
            start += 1 + 2 * count
        keys = sorted(rows)
        places = [(*rows[key], -1)[:2] for key in keys]
        shape = (len(keys), 2)
        return (*np.array(keys, int).reshape(shape).T, np.array(places, int).reshape(shape))

    def sizes(self) -> np.ndarray[Any, Any]:
        """The number of elements of each weight, of which this rank may hold a part."""
        return np.array([weight_of(module).numel() for module in self.modules], float)

    def describe(self, dtype: torch.dtype, seen: Sequence[set[str]]) -> list[WatchedLayer]:
        """The layers as they run.

        Args:
            dtype: of GEMMs that are not quantized.
            seen: for each layer the operands that were recorded, and "recomputed" where its forward pass ran twice in a
                step. Of compiled code only that it is checkpointed is known.
        """
        fused = {layer: place.name for place in self.places if len(place.layers) > 1 for layer in place.layers}
        return [
            self._describe(i, _name_of(dtype), seen[i] | self._compiled[i], fused.get(i))
            for i in range(len(self.modules))
        ]

    def _describe(self, i: int, dtype: str, seen: set[str], fused: str | None) -> WatchedLayer:
        module: Any = self.modules[i]
        recipe = recipe_of(module)
        casts = {operand: getattr(recipe, operand, None) for operand in OPERANDS}
        return WatchedLayer(
            self.names[i],
            class_name(module.module if isinstance(module, ExpertStack) else module),
            _shape(module),
            "" if recipe is None else recipe.name,
            {operand: dtype if cast is None else cast.format for operand, cast in casts.items()},
            {operand: "" if cast is None else cast.granularity.name for operand, cast in casts.items()},
            dict(_gemms(module, dtype, seen, fused)),
            module.count if isinstance(module, ExpertStack) else 0,
        )


def _gemms(module: Any, dtype: str, seen: set[str], fused: str | None) -> Iterator[tuple[str, GemmRun]]:
    """The GEMMs of a layer that ran. For a layer that was not converted no operand is recorded: all are listed."""
    recipe = recipe_of(module)
    if recipe is None:
        for name in ("y", "dx", "dw"):
            yield name, GemmRun(dtype, "torch", "the layer was not converted")
        return
    weight = weight_of(module)
    backends = _backends(module, recipe, weight.device)
    for name, operand in _GEMM_OF.items():
        ran = "recomputed" in seen if name == "recomputation" else operand in seen
        if not ran or (name == "dw" and not weight.requires_grad):
            continue
        backend = backends["y" if name == "recomputation" else name]
        if backend.name == "bf16":
            yield name, GemmRun(dtype, "torch", backend.reason)
            continue
        kernel = "emulated" if backend.name == "none" and recipe.emulate else backend.name
        yield name, GemmRun("fp8", kernel, f"{backend.reason}; in {fused}" if fused else backend.reason)


def _backends(module: Any, recipe: Recipe, device: torch.device) -> dict[str, Backend]:
    """The backends of y, dx and dw. A layer that was moved to BF16 while it trained has the recipe bf16."""
    backends = gemm_backends(recipe, device)
    return backends | grouped_backends(recipe, device) if isinstance(module, ExpertStack) else backends


def recipe_of(module: Any) -> Recipe | None:
    """The recipe of a converted layer, or of a stack of experts in FP8; None for another module."""
    return module.recipe if isinstance(module, RecipeLayer | ExpertStack) else None


def weight_of(module: Any) -> nn.Parameter:
    """The weight of a layer; of an attention with separate input projections, that of the queries."""
    if isinstance(module, MultiheadAttention):
        return next(iter(input_weights(module).values()))
    weight: nn.Parameter = module.weight
    return weight


def _shape(module: Any) -> tuple[int, int]:
    """N outputs and K inputs."""
    if is_conv1d(module):
        return shape_of(module)
    weight = weight_of(module)
    if isinstance(module, ExpertStack):
        return weight.shape[0] * weight.shape[1], weight.shape[2]
    return weight.shape[0], weight.shape[1:].numel()


def gate_and_up(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The gate and up layers of each SwiGLU, by the names of transformers' Llama."""
    pairs = [(getattr(m, "gate_proj", None), getattr(m, "up_proj", None)) for m in model.modules()]
    return [(gate, up) for gate, up in pairs if isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)]


def _fused(model: nn.Module) -> Iterator[tuple[str, nn.Module, Sequence[nn.Module]]]:
    """The modules that may run several layers as one GEMM, and these layers."""
    for name, module in model.named_modules():
        if isinstance(module, NormLinear):
            yield name, module, module.linears
        elif isinstance(module, FusedMLP):
            yield name, module, module.inner


def _is_recomputed_by_compiler(module: Any) -> bool:
    """Whether a module is compiled, and checkpointed inside of the compiled code."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled and bool(getattr(module, "activation_checkpointing", False))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, RecipeLayer | nn.Linear) or is_conv1d(module)


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype))
