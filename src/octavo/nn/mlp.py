"""MLPs whose activations stay in FP8 between the GEMMs; only the input of the activation is stored in high precision.

They are plain PyTorch until their layers are converted with a fusable recipe (`rowwise`). A norm in front of the MLP,
and the residual stream around it, are computed in the same pass when they are given.
"""

from typing import Any, ClassVar, overload

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.fused import mlp
from octavo.nn.norm_linear import FusableLayers, child, find, fusable_layers, fused_call, read_norm, stack_of
from octavo.nn.observer import Observer, observer_of
from octavo.nn.parallel import parallel_of
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast


class FusedMLP(nn.Module):
    """y = outer(activate(inner(x))); with a norm, x is norm(x + residual). Base of `SwiGLU`, `GELU` and `GEGLU`."""

    activation: ClassVar[str]  # as `octavo.ops.activation_quantize` calls it
    weight_cache: WeightCache
    observer: Observer | None = None  # of the inner layers

    @property
    def inner(self) -> tuple[nn.Linear, ...]:
        raise NotImplementedError

    @property
    def outer(self) -> nn.Linear:
        raise NotImplementedError

    def activate(self, *u: Tensor) -> Tensor:
        """The activation of the outputs of the inner layers, in plain PyTorch."""
        raise NotImplementedError

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, norm: nn.Module, residual: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None) -> Any:
        """y [..., width] of x [..., width]. With a norm: y, and x + residual (x itself without a residual)."""
        if norm is None and residual is not None:
            raise ValueError("a residual needs a norm: pass both, or add it to x")
        y, total = self.run(x, norm, residual)
        return y if norm is None else (y, total)

    def forward_residual(self, x: Tensor, norm: nn.Module, residual: Tensor | None = None) -> Tensor:
        """x + residual + y: the residual stream after the MLP."""
        y, total = self.run(x, norm, residual)
        return total + y

    def run(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """y and x + residual, in one pass where that is possible."""
        parallel = parallel_of(self.inner)
        if parallel is not None:
            return parallel.mlp(self, x, norm, residual)
        layers, known_norm = self._fusable(), None if norm is None else read_norm(norm)
        if layers is None or x.numel() == 0 or (norm is not None and known_norm is None):
            total = x if residual is None else x + residual
            n = total if norm is None else norm(total)
            return self.outer(self.activate(*(linear(n) for linear in self.inner))), total
        *inner, outer = layers.linears
        call = fused_call(layers, x, observer_of(self), observer_of(outer))
        inner_stack, outer_stack = stack_of(inner, call, self.weight_cache), stack_of([outer], call, outer.weight_cache)
        return mlp(x, residual, known_norm, self.activation, inner_stack, outer_stack, call)

    def _fusable(self) -> FusableLayers | None:
        return fusable_layers((*self.inner, self.outer))

    def cached_weights(self) -> tuple[tuple[nn.Linear, ...], Cast] | None:
        """The stacked inner layers and their cast, where they are fused."""
        layers = self._fusable()
        return None if layers is None else (self.inner, layers.recipe.w)


class SwiGLU(FusedMLP):
    """y = down_proj(silu(gate_proj(x)) * up_proj(x)), with the names of transformers' Llama.

    Args:
        width: of x and y.
        mlp_width: of the hidden layer.
        bias: whether the three layers have biases.
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
        return child(self, "gate_proj"), child(self, "up_proj")

    @property
    def outer(self) -> nn.Linear:
        outer: nn.Linear = child(self, "down_proj")
        return outer

    def activate(self, *u: Tensor) -> Tensor:
        gate, up = u
        return F.silu(gate) * up


class OwnedMLP(FusedMLP):
    """An MLP of layers that another module owns, so that they keep their names. Base of `GELU` and `GEGLU`.

    Args:
        owner: the module under which the layers are found; it is not registered here.
        inner: dotted name of the layer before the activation.
        outer: dotted name of the layer after it.
    """

    owner: nn.Module

    def __init__(self, owner: nn.Module, inner: str, outer: str) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)  # not a child: it would be its own descendant
        self.names = (tuple(inner.split(".")), tuple(outer.split(".")))
        self.weight_cache = WeightCache()

    @property
    def inner(self) -> tuple[nn.Linear, ...]:
        return (find(self.owner, self.names[0]),)

    @property
    def outer(self) -> nn.Linear:
        outer: nn.Linear = find(self.owner, self.names[1])
        return outer


class GELU(OwnedMLP):
    """y = outer(gelu(inner(x))), the exact GELU."""

    activation = "gelu"

    def activate(self, *u: Tensor) -> Tensor:
        return F.gelu(u[0])


class GEGLU(OwnedMLP):
    """y = outer(up * gelu(gate)), where inner(x) is up, gate: the halves of its last dimension, as in diffusers."""

    activation = "geglu"

    def run(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if parallel_of(self.inner) is not None:
            raise ValueError(
                "tensor parallelism cuts the first layer of a GEGLU between up and gate, which are halves of its "
                "outputs: leave the layers of this MLP whole"
            )
        return super().run(x, norm, residual)

    def activate(self, *u: Tensor) -> Tensor:
        up, gate = u[0].chunk(2, dim=-1)
        return up * F.gelu(gate)
