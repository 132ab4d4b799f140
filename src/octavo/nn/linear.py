"""The linear layer whose three GEMMs run as a recipe says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.branches import Branches
from octavo.nn.delayed import ScaleHistory
from octavo.nn.folded import Plan
from octavo.nn.function import linear
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast
from octavo.numerics.rotation import hadamard
from octavo.recipe import Recipe


class Linear(nn.Linear):
    """`nn.Linear` that computes y, dx and dw as its recipe says. Same parameters, same `state_dict`.

    Made from an `nn.Linear` by `octavo.convert`. Input [..., K] of any rank, zero rows included; output [..., N] in the
    autocast dtype, or in that of the input outside autocast; gradients in the dtypes of input and parameters.
    """

    recipe: Recipe
    emulate: bool
    histories: nn.ModuleDict | None
    weight_cache: WeightCache

    def prepare(self, recipe: Recipe, *, emulate: bool) -> None:
        """Take a recipe, and make room for its scale histories: a child module only where the recipe keeps some."""
        self.recipe, self.emulate, self.weight_cache = recipe, emulate, WeightCache()
        casts = {"x": recipe.y.x, "w": recipe.y.w, "dy": recipe.dx.dy}
        found = {name: ScaleHistory(c, self.weight.device) for name, c in casts.items() if c is not None and c.history}
        self.histories = nn.ModuleDict(found) if found else None

    def release(self) -> None:
        """Drop what `prepare` gave the layer."""
        for name in ("recipe", "emulate", "weight_cache", "histories"):
            delattr(self, name)

    def forward(self, x: Tensor | Branches) -> Tensor:
        if isinstance(x, Branches):
            return x.output_of(self)
        dtype, w = compute_dtype(x), self.weight
        if x.numel() == 0:
            return F.linear(x.to(dtype), w.to(dtype), None if self.bias is None else self.bias.to(dtype))
        if self.recipe.rotate:
            x, w = hadamard(x), hadamard(w)
        plan = Plan(self.recipe, dtype, self.emulate, self._history("x"), self._history("w"), self._history("dy"))
        wanted = self.cached_weights()
        kept = None if wanted is None else self.weight_cache.get([w], wanted[1])
        y = linear(x.reshape(-1, x.shape[-1]), w, self.bias, plan, kept)
        return y.view(*x.shape[:-1], y.shape[-1])

    def cached_weights(self) -> tuple[list[nn.Linear], Cast] | None:
        """This layer and the cast of its weight, unless that is drawn anew, has a history, or rotates the weight."""
        cast = self.recipe.y.w
        if cast is None or cast.history or cast.rounding != "nearest" or self.recipe.rotate:
            return None
        return [self], cast

    def _history(self, operand: str) -> ScaleHistory | None:
        history = None if self.histories is None else dict(self.histories.items()).get(operand)
        assert history is None or isinstance(history, ScaleHistory)
        return history

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def as_recipe(linear: nn.Linear, recipe: Recipe, *, emulate: bool = False) -> Linear:
    """`linear`, changed in place into the layer that runs as `recipe` says."""
    linear.__class__ = Linear
    assert isinstance(linear, Linear)
    linear.prepare(recipe, emulate=emulate)
    return linear


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of y and of unquantized GEMMs: autocast's, or that of the input."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast to ask
    return torch.get_autocast_dtype(device) if on else x.dtype
