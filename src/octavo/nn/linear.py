"""The linear layer whose three GEMMs run as a recipe says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.delayed import ScaleHistories, ScaleHistory
from octavo.nn.layer_limits import check_call, unsupported
from octavo.nn.linear_function import linear
from octavo.nn.precomputed import Branches
from octavo.nn.scale_folding import Plan
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor
from octavo.numerics.rotation import hadamard
from octavo.recipe import Recipe


class RecipeLayer(nn.Module):
    """What a converted layer has beside its parameters, and how it computes y = x @ w^T + bias by its recipe."""

    recipe: Recipe
    emulate: bool
    name: str
    histories: ScaleHistories | None
    weight_cache: WeightCache

    def prepare(self, recipe: Recipe, name: str, device: torch.device, *, emulate: bool) -> None:
        """Take a recipe, and make room for its scale histories: a child module only where the recipe keeps some.

        `name` is that of the layer in its model, for messages.
        """
        self.recipe, self.name, self.emulate, self.weight_cache = recipe, name, emulate, WeightCache()
        casts = {"x": recipe.y.x, "w": recipe.y.w, "dy": recipe.dx.dy}
        found = {operand: ScaleHistory(c, device) for operand, c in casts.items() if c is not None and c.history}
        self.histories = ScaleHistories(found) if found else None

    def release(self) -> None:
        """Drop what `prepare` gave the layer."""
        for name in ("recipe", "name", "emulate", "weight_cache", "histories"):
            delattr(self, name)

    def compute(self, x: Tensor, w: Tensor, bias: Tensor | None, kept: QTensor | None) -> Tensor:
        """y [..., N] of x [..., K] and w [N, K] with any strides; `kept` holds the bytes of w, if there are some."""
        check_call(self, x, w)
        dtype = compute_dtype(x)
        if x.numel() == 0:
            return F.linear(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype))
        if self.recipe.rotate:
            x, w = hadamard(x), hadamard(w)
        plan = Plan(self.recipe, dtype, self.emulate, self._history("x"), self._history("w"), self._history("dy"))
        return linear(x, w, bias, plan, kept)

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` calls first."""
        raise unsupported("torch.jit.script (torch.compile and torch.export take them)")

    def _history(self, operand: str) -> ScaleHistory | None:
        history = None if self.histories is None else dict(self.histories.items()).get(operand)
        assert history is None or isinstance(history, ScaleHistory)
        return history

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"recipe={self.recipe.name}")))


class Linear(RecipeLayer, nn.Linear):
    """`nn.Linear` that computes y, dx and dw as its recipe says. Same parameters, same `state_dict`.

    Made from an `nn.Linear` by `octavo.convert`. Input [..., K] of any rank, zero rows included; output [..., N] in the
    autocast dtype, or in that of the input outside autocast; gradients in the dtypes of input and parameters.
    """

    def forward(self, x: Tensor | Branches) -> Tensor:
        if isinstance(x, Branches):
            return x.output_of(self)
        wanted = self.cached_weights()
        kept = None if wanted is None or x.numel() == 0 else self.weight_cache.get([self.weight], wanted[1])
        return self.compute(x, self.weight, self.bias, kept)

    def cached_weights(self) -> tuple[list[nn.Linear], Cast] | None:
        """This layer and the cast of its weight, unless that is drawn anew, has a history, or rotates the weight."""
        cast = self.recipe.y.w
        if cast is None or cast.history or cast.rounding != "nearest" or self.recipe.rotate:
            return None
        return [self], cast


def as_recipe(linear: nn.Linear, recipe: Recipe, name: str, *, emulate: bool = False) -> Linear:
    """`linear`, called `name` in its model, changed in place into the layer that runs as `recipe` says."""
    linear.__class__ = Linear
    assert isinstance(linear, Linear)
    linear.prepare(recipe, name, linear.weight.device, emulate=emulate)
    return linear


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of y and of unquantized GEMMs: autocast's, or that of the input."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast to ask
    return torch.get_autocast_dtype(device) if on else x.dtype
