"""A norm that feeds linear layers, whose output is quantized once, in the pass that computes it.

The module refers by name to a norm and layers that another module owns, so that parameters keep their names:

    self.qkv = NormLinear(self, "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    (q, k, v), x = self.qkv(x, residual)

and looks them up in each forward pass, so that it runs whatever a library puts in their place. The pass is fused when
all layers were converted with one fusable recipe (`Recipe.fusable`: `rowwise`) and none has a hook, which would not be
called. Otherwise the norm and the layers run one after the other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.nn.fused import norm_linear
from octavo.nn.fused_input import Norm, NormSpec
from octavo.nn.layer_limits import check_call
from octavo.nn.linear import Linear, compute_dtype
from octavo.nn.linear_call import FusedCall, LinearCall
from octavo.nn.observer import Observer, observer_of
from octavo.nn.parallel import parallel_of
from octavo.nn.stacked_weights import Stack
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast
from octavo.recipe import FusableRecipe

# Root-mean-square norms of transformers: weight * x / rms(x), eps in `variance_epsilon`.
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
LONGEST_NORM = 16384  # elements of a row: beyond, the registers of the fused norm spill, and PyTorch's norm is faster
LONGEST_TRAINED_LAYER_NORM = 8192  # the backward pass holds the gradient of the bias too


class NormLinear(nn.Module):
    """y_i = linear_i(norm(x + residual)).

    Args:
        owner: the module under which the others are found; it is not registered here.
        norm: dotted name below `owner` of an `nn.LayerNorm`, an `nn.RMSNorm`, or a root-mean-square norm of
            transformers' Llama, Mistral or Qwen. Other norms work too, but are not fused.
        linears: dotted names below `owner` of the layers that the norm feeds.
    """

    owner: nn.Module
    observer: Observer | None = None

    def __init__(self, owner: nn.Module, norm: str, *linears: str) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)  # not a child: it would be its own descendant
        self.names = tuple(tuple(name.split(".")) for name in (norm, *linears))
        self.weight_cache = WeightCache()

    @property
    def norm(self) -> nn.Module:
        norm: nn.Module = find(self.owner, self.names[0])
        return norm

    @property
    def linears(self) -> list[nn.Module]:
        return [find(self.owner, name) for name in self.names[1:]]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The outputs [..., N_i] of the layers, and x + residual [..., K] (x itself without a residual)."""
        parallel = parallel_of(self.linears)
        if parallel is not None:
            return parallel.norm_linear(self, x, residual)
        outputs = self.fused(x, residual)
        if outputs is not None:
            return outputs
        total = x if residual is None else x + residual
        n = self.norm(total)
        return tuple(linear(n) for linear in self.linears), total

    def fused(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """The outputs of `forward`, computed in one pass; None where the norm or the layers cannot be fused."""
        layers, norm = fusable_layers(self.linears), read_norm(self.norm)
        if layers is None or norm is None or x.numel() == 0:
            return None
        call = fused_call(layers, x, observer_of(self))
        y, total = norm_linear(x, residual, norm, stack_of(layers.linears, call, self.weight_cache), call)
        return torch.split(y, [linear.out_features for linear in layers.linears], dim=-1), total

    def cached_weights(self) -> tuple[Sequence[nn.Linear], Cast] | None:
        """The stacked layers and their cast, where they are fused."""
        layers = fusable_layers(self.linears)
        return None if layers is None or read_norm(self.norm) is None else (layers.linears, layers.recipe.w)

    def extra_repr(self) -> str:
        norm, *linears = (".".join(name) for name in self.names)
        return f"{norm} -> {', '.join(linears)}"


def find(owner: nn.Module, name: tuple[str, ...]) -> Any:
    """The submodule of `owner` with the dotted name whose parts are `name`."""
    for part in name:
        owner = child(owner, part)
    return owner


def child(module: nn.Module, name: str) -> Any:
    """getattr(module, name) for a submodule, in a fourth of the time: Python first looks for another attribute, and
    raises and catches an exception."""
    found = module._modules.get(name)
    return getattr(module, name) if found is None else found


class FusableLayers(NamedTuple):
    """Converted layers that can run as one, and their recipe."""

    linears: Sequence[Linear]
    recipe: FusableRecipe


def fusable_layers(modules: Sequence[nn.Module]) -> FusableLayers | None:
    """The layers, if they can run as one: all converted with the same fusable recipe, and none watched."""
    linears = [module for module in modules if isinstance(module, Linear) and not watched(module)]
    if len(linears) < len(modules):
        return None
    first = linears[0].recipe  # mostly that of all layers: torch.compile takes long to trace a comparison of recipes
    if not all(linear.recipe is first or linear.recipe == first for linear in linears):
        return None
    recipe = first.fusable
    return None if recipe is None else FusableLayers(linears, recipe)


def watched(module: nn.Module) -> bool:
    """Whether a call of `module` does more than its class's forward: it has hooks, or a `forward` of its own."""
    own = module.__dict__
    return "forward" in own or bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def fused_call(
    layers: FusableLayers, x: Tensor, observer: Observer | None, outer_observer: Observer | None = None
) -> FusedCall:
    """The call of layers that run as one, for the input `x`; raises the errors of `check_call`."""
    check_call(layers.linears[0], x, *(linear.weight for linear in layers.linears))
    return LinearCall(layers.recipe, compute_dtype(x), observer=observer, outer_observer=outer_observer)


def stack_of(linears: Sequence[Linear], call: FusedCall, cache: WeightCache) -> Stack:
    """The parameters of the layers, with the bytes that `cache` has for them."""
    weights = [linear.weight for linear in linears]
    return Stack(weights, [linear.bias for linear in linears], cache.get(weights, call.recipe.w))


def read_norm(norm: nn.Module, *, backward: bool = True) -> Norm | None:
    """The norm as the fused functions take it; None if it is of an unknown kind, too long, or watched.

    Without a backward pass, longer layer norms are fused.
    """
    if watched(norm):
        return None
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        longest = LONGEST_TRAINED_LAYER_NORM if backward and isinstance(norm, nn.LayerNorm) else LONGEST_NORM
        if norm.weight is None or len(norm.normalized_shape) != 1 or norm.weight.numel() > longest:
            return None
        if isinstance(norm, nn.LayerNorm):
            return NormSpec(norm.eps, center=True), norm.weight, norm.bias
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps  # torch's default, for BF16 too
        return NormSpec(eps, center=False), norm.weight, None
    if type(norm).__name__ in RMS_NORMS:
        rms_norm: Any = norm
        weight = norm._parameters.get("weight")  # as in `child`
        return NormSpec(rms_norm.variance_epsilon, center=False), rms_norm.weight if weight is None else weight, None
    return None
