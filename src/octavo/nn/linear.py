"""The linear layer that computes its three GEMMs by a recipe."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from octavo.nn.delayed import ScaleHistories, ScaleHistory, weight_amax
from octavo.nn.gathered_weight import GatheredWeight
from octavo.nn.layer_limits import check_call, unsupported
from octavo.nn.linear_call import LinearCall
from octavo.nn.linear_function import linear
from octavo.nn.mixed_class import mix_classes, parts_of
from octavo.nn.observer import Observer, observer_of
from octavo.nn.parallel import Parallel, ParallelLinear
from octavo.nn.precomputed import PrecomputedProjections
from octavo.nn.rotation import rotate_activations
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor
from octavo.recipe import Recipe

ROUNDED = 1 + 2.0**-23  # amax / max of a format, rounded to float32, does not clip amax


class RecipeLayer(nn.Module):
    """Base of the converted layers: computes y = x @ w^T + bias by a recipe."""

    recipe: Recipe
    name: str
    histories: ScaleHistories | None
    weight_cache: WeightCache
    input_is_saved: bool = False  # by the operation before, as attention saves its output: see `LinearCall`
    observer: Observer | None = None

    def prepare(self, recipe: Recipe, name: str, device: torch.device) -> None:
        """Set the attributes of a converted layer.

        Args:
            recipe: for each of its casts with a history the layer gets a `ScaleHistory`, as a child module.
            name: of the layer in its model, for messages.
            device: of the scale histories.
        """
        self.recipe, self.name, self.weight_cache = recipe, name, WeightCache()
        casts = {"x": recipe.x, "w": recipe.w, "dy": recipe.dy}
        histories = {
            operand: ScaleHistory(cast, cast.history, device)
            for operand, cast in casts.items()
            if cast is not None and cast.history is not None
        }
        self.histories = ScaleHistories(histories) if histories else None

    def history_of(self, operand: str) -> ScaleHistory | None:
        """The history of "x", "w" or "dy", if its scale comes from one."""
        return None if self.histories is None else self.histories.of(operand)

    def release(self) -> None:
        """Delete the attributes that `prepare` set."""
        for name in ("recipe", "name", "weight_cache", "histories"):
            delattr(self, name)
        self.__dict__.pop("input_is_saved", None)

    def compute(self, x: Tensor, w: Tensor, bias: Tensor | None, cached: QTensor | None) -> Tensor:
        """y [..., N] of x [..., K] and w [N, K] with any strides; `cached` is w, quantized, if there is a cache."""
        check_call(self, x, w)
        dtype = compute_dtype(x)
        if isinstance(w, GatheredWeight) and (x.numel() == 0 or self.recipe.w is None):
            w = w.dequantize()
        if x.numel() == 0:
            return F.linear(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype))
        rotate = self.recipe.rotate
        if "y" in rotate:
            x = rotate_activations(x)  # and w where it is cast, so that a rotated w is not saved for the backward pass
        histories = (self.history_of("x"), self.history_of("w"), self.history_of("dy"))
        saved = self.input_is_saved and "y" not in rotate
        call = LinearCall(self.recipe, dtype, *histories, observer_of(self), input_is_saved=saved)
        if "dx" not in rotate:
            return linear(x, w, bias, call, cached)
        y = rotate_activations(linear(x, w, None, call, cached))  # as w was, along N; and so will be dy
        return (y if bias is None else y + bias).to(dtype)

    @property
    def freezable(self) -> bool:
        """Whether y scales its input, as it comes, by a history."""
        return self.recipe.y is not None and self.recipe.y.a.history is not None and not self.recipe.rotates_w

    @property
    def input_limit(self) -> Tensor | None:
        """The largest magnitude of x, 0-dim, that the scale of its history holds; None without such a scale."""
        x = self.history_of("x") if self.freezable else None
        return None if x is None or not x.ready else x.scale.view(()) * x.cast.fmt.max * ROUNDED

    def freeze_input(self, amax: Tensor) -> Tensor:
        """Make the scales of x and w constant: x's from `amax`, 0-dim, and w's from the weight. Returns x's, [1]."""
        weight: Any = self.weight
        for operand, largest in (("x", amax), ("w", weight_amax(weight))):
            if (history := self.history_of(operand)) is not None:
                history.seed([float(largest)])
                history.frozen = True
        x = self.history_of("x")
        assert x is not None  # the layer is freezable
        return x.scale.view(1).clone()

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by `torch.jit.script` before it reads the module."""
        raise unsupported("torch.jit.script (torch.compile and torch.export take them)")

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"recipe={self.recipe.name}")))


class Linear(RecipeLayer, nn.Linear):
    """`nn.Linear` that computes y, dx and dw by its recipe. Same parameters, same `state_dict`.

    Made from an `nn.Linear` by `octavo.convert`. Input [..., K] of any rank, zero rows included; output [..., N] in the
    autocast dtype, or in that of the input outside autocast; gradients in the dtypes of input and parameters.
    """

    parallel: Parallel | None = None  # set where each rank has a part of the layer

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "octavo.Linear is made of an nn.Linear: make a model of nn.Linear, and call octavo.convert(model)"
        )

    def forward(self, x: Tensor | PrecomputedProjections) -> Tensor:
        if isinstance(x, PrecomputedProjections):
            return x.output_of(self)
        if self.parallel is not None:
            return self.parallel.linear(self, x)
        cached = None if x.numel() == 0 else self.quantized_weight(self.weight)
        return self.compute(x, self.weight, self.bias, cached)

    def quantized_weight(self, w: Tensor) -> QTensor | None:
        """The weight, or this rank's part `w` of it, where FSDP2 has gathered or `octavo.cast_once` cached it so."""
        if isinstance(w, GatheredWeight):
            history = self.history_of("w")
            if history is not None and self.weight_cache.amax is not None:
                history.observe(self.weight_cache.amax)
            return self.weight_cache.gathered
        cast = self.recipe.repeatable_w
        return None if cast is None else self.weight_cache.get([w], cast)

    def cached_weights(self) -> tuple[list[nn.Linear], Cast] | None:
        """This layer and the cast of its weight, if `octavo.cast_once` can cache it."""
        cast = self.recipe.repeatable_w
        if self.parallel is not None and self.recipe.fusable is None:
            return None
        return None if cast is None else ([self], cast)


def to_fp8_linear(linear: nn.Linear, recipe: Recipe, name: str) -> Linear:
    """Change `linear`, called `name` in its model, in place into a layer that computes by `recipe`."""
    layer: Any = linear
    if not isinstance(linear, Linear):
        is_output = type(linear) is NonDynamicallyQuantizableLinear  # of multi-head attention
        layer.__class__ = mix_classes(Linear, type(linear)) if is_output else Linear
    layer.prepare(recipe, name, linear.weight.device)
    converted: Linear = layer
    return converted


def convert_layer(module: nn.Module, ours: type[RecipeLayer], recipe: Recipe, name: str) -> None:
    """Change `module`, called `name` in its model, in place into a layer of the class `ours` that computes by `recipe`.

    Its class becomes a subclass of `ours` and of its own, unless an earlier conversion made it so.
    """
    layer: Any = module
    if not isinstance(module, ours):
        layer.__class__ = mix_classes(ours, type(module))
    layer.prepare(recipe, name, next(module.parameters()).device)


def restore_layer(module: Any) -> bool:
    """Give a converted layer its own class back, and return whether `module` was one. Others stay as they are."""
    ours, *theirs = parts_of(type(module))
    if not theirs and ours is Linear:  # as `to_fp8_linear` makes it of an `nn.Linear`
        theirs = [nn.Linear if module.parallel is None else ParallelLinear]
    if not theirs or not issubclass(ours, RecipeLayer):
        return False
    module.release()
    module.__class__ = theirs[0]
    return True


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of y and of unquantized GEMMs: autocast's, or that of the input."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast to ask
    return torch.get_autocast_dtype(device) if on else x.dtype
