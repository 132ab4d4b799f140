"""MLPs that never leave eight bits between their layers but where an activation must be formed.

They own their layers, under the names that transformers' Llama has, and are plain PyTorch until they are converted with
a recipe whose scales fold (`rowwise`). A norm in front of the MLP, and the residual stream around it, join the same
pass when they are given to `forward`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.fused import mlp
from octavo.nn.linear import Linear
from octavo.nn.norm_linear import converted, kept_bytes, norm_of, plan_of, stacked_weights
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast


class SwiGLU(nn.Module):
    """y = down_proj(silu(gate_proj(x)) * up_proj(x)); with a norm, x is norm(x + residual).

    Args:
        width: of x and y.
        mlp_width: of the hidden layer.
        bias: of all three layers.
    """

    activation = "swiglu"

    def __init__(self, width: int, mlp_width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, mlp_width, bias=bias)
        self.up_proj = nn.Linear(width, mlp_width, bias=bias)
        self.down_proj = nn.Linear(mlp_width, width, bias=bias)
        self.weight_cache = WeightCache()

    @property
    def inner(self) -> tuple[nn.Linear, ...]:
        """The layers before the activation."""
        return self.gate_proj, self.up_proj

    @property
    def outer(self) -> nn.Linear:
        """The layer after it."""
        return self.down_proj

    def activate(self, *u: Tensor) -> Tensor:
        """The activation, in plain PyTorch."""
        gate, up = u
        return F.silu(gate) * up

    def forward(
        self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None, *, added: bool = False
    ) -> Any:
        """y [..., width] of x [..., width]; with a norm, y and x + residual (x itself where there is none), or their
        sum where they shall be `added`."""
        if norm is None and (residual is not None or added):
            raise ValueError("a residual needs a norm: pass both, or add it to x")
        if added:
            return self._sum(x, norm, residual)
        y, total = self._run(x, norm, residual)
        return y if norm is None else (y, total)

    def _sum(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> Tensor:
        y, total = self._run(x, norm, residual)
        return total + y

    def _run(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        linears, known = self._converted(), None if norm is None else norm_of(norm)
        if linears is None or x.numel() == 0 or (norm is not None and known is None):
            total = x if residual is None else x + residual
            n = total if norm is None else norm(total)
            y: Tensor = self.outer(self.activate(*(linear(n) for linear in self.inner)))
            return y, total
        *inner, outer = linears
        plan = plan_of(linears, x)
        return mlp(
            x,
            residual,
            known,
            self.activation,
            (
                [linear.weight for linear in inner],
                [linear.bias for linear in inner],
                kept_bytes(self.weight_cache, inner, plan),
            ),
            (outer.weight, outer.bias, kept_bytes(outer.weight_cache, (outer,), plan)),
            plan,
        )

    def _converted(self) -> list[Linear] | None:
        return converted((*self.inner, self.outer))

    def cached_weights(self) -> tuple[list[Linear], Cast] | None:
        """The stacked inner layers and their cast, where they are fused."""
        return None if self._converted() is None else stacked_weights(self.inner)


class GELU(SwiGLU):
    """y = outer(gelu(inner(x))), the exact GELU; with a norm, x is norm(x + residual).

    As with `NormLinear`, another module owns the layers, so that parameters keep their names.

    Args:
        owner: the module under which the layers are found; it is not registered here.
        inner: name of the layer before the activation.
        outer: name of the layer after it.
    """

    activation = "gelu"
    owner: nn.Module

    def __init__(self, owner: nn.Module, inner: str, outer: str) -> None:
        nn.Module.__init__(self)
        object.__setattr__(self, "owner", owner)  # not a child: it would be its own descendant
        self.names = (inner, outer)
        self.weight_cache = WeightCache()

    @property
    def inner(self) -> tuple[nn.Linear, ...]:
        return (getattr(self.owner, self.names[0]),)

    @property
    def outer(self) -> nn.Linear:
        outer: nn.Linear = getattr(self.owner, self.names[1])
        return outer

    def activate(self, *u: Tensor) -> Tensor:
        return F.gelu(u[0])
