"""A norm that feeds linear layers: its output is quantized once, in the pass that makes it.

The module names a norm and layers that another module owns, so that parameters keep their names:

    self.qkv = NormLinear(self, "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    (q, k, v), x = self.qkv(x, residual)

and looks them up in each forward pass: what a library puts in their place is what runs. It is fused when the layers
were converted with one recipe whose scales fold (`rowwise`) and nobody watches them (a hook on one of them would see
nothing); until then, and for other recipes, it is the norm and the layers one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo.nn.fused import NormPlan, norm_linear
from octavo.nn.layer_limits import check_call
from octavo.nn.linear import Linear, compute_dtype
from octavo.nn.scale_folding import Plan
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast

# Root-mean-square norms of transformers: weight * x / rms(x), eps in `variance_epsilon`.
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
LONGEST_NORM = 16384  # elements of a row: beyond, the fused norm's registers spill and PyTorch's norm is faster
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NormLinear(nn.Module):
    """y_i = linear_i(norm(x + residual)).

    Args:
        owner: the module under which the others are found; it is not registered here.
        norm: dotted name below `owner` of an `nn.LayerNorm`, an `nn.RMSNorm`, or a root-mean-square norm of
            transformers' Llama, Mistral or Qwen. Another norm works, and is not fused.
        linears: dotted names of the layers that it feeds.
    """

    owner: nn.Module

    def __init__(self, owner: nn.Module, norm: str, *linears: str) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)  # not a child: it would be its own descendant
        self.names = tuple(tuple(name.split(".")) for name in (norm, *linears))
        self.weight_cache = WeightCache()

    @property
    def norm(self) -> nn.Module:
        """The norm, as it is now."""
        return _find(self.owner, self.names[0])

    @property
    def linears(self) -> list[nn.Module]:
        """The layers that it feeds, as they are now."""
        return [_find(self.owner, name) for name in self.names[1:]]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The outputs [..., N_i] of the layers, and x + residual [..., K] (x itself where there is none)."""
        fused = self.fused(x, residual)
        if fused is not None:
            return fused
        total = x if residual is None else x + residual
        n = self.norm(total)
        return tuple(linear(n) for linear in self.linears), total

    def fused(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """What `forward` returns, in one pass; None where that cannot be."""
        linears, norm = converted(self.linears), norm_of(self.norm)
        if linears is None or norm is None or x.numel() == 0:
            return None
        plan = plan_of(linears, x)
        y, total = norm_linear(
            x,
            residual,
            norm,
            [linear.weight for linear in linears],
            [linear.bias for linear in linears],
            kept_bytes(self.weight_cache, linears, plan),
            plan,
        )
        return torch.split(y, [linear.out_features for linear in linears], dim=-1), total

    def cached_weights(self) -> tuple[list[Linear], Cast] | None:
        """The stacked layers and their cast, where they are fused."""
        return None if norm_of(self.norm) is None else stacked_weights(self.linears)

    def extra_repr(self) -> str:
        norm, *linears = (".".join(name) for name in self.names)
        return f"{norm} -> {', '.join(linears)}"


def _find(owner: nn.Module, name: tuple[str, ...]) -> nn.Module:
    for part in name:
        owner = getattr(owner, part)
    return owner


def converted(linears: Sequence[nn.Module]) -> list[Linear] | None:
    """The layers, where they can run as one: all converted with one recipe that folds, and none watched; else None."""
    found = [linear for linear in linears if isinstance(linear, Linear) and not watched(linear)]
    if len(found) < len(linears) or not found[0].recipe.folds:
        return None
    return found if all(linear.recipe == found[0].recipe for linear in found) else None


def watched(module: nn.Module) -> bool:
    """Whether a call of `module` does more than its forward pass: hooks, or a `forward` put on the instance."""
    return "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in HOOKS)


def plan_of(linears: Sequence[Linear], x: Tensor) -> Plan:
    """How layers that run as one compute, for an input like `x`; an error where they cannot."""
    check_call(linears[0], x, *(linear.weight for linear in linears))
    return Plan(linears[0].recipe, compute_dtype(x), linears[0].emulate)


def stacked_weights(linears: Sequence[nn.Module]) -> tuple[list[Linear], Cast] | None:
    """What `cast_once` keeps for layers that run as one."""
    found = converted(linears)
    if found is None:
        return None
    cast = found[0].recipe.y.w
    assert cast is not None
    return found, cast


def kept_bytes(cache: WeightCache, linears: Sequence[Linear], plan: Plan) -> tuple[Tensor, Tensor] | None:
    """Data and scale of the stacked weights, where `cast_once` keeps them."""
    assert plan.recipe.y.w is not None
    q = cache.get([linear.weight for linear in linears], plan.recipe.y.w)
    return None if q is None else (q.data, q.scale)


def norm_of(norm: nn.Module) -> tuple[NormPlan, Tensor, Tensor | None] | None:
    """What the fused functions need of a norm over the last dimension; None for others, watched or long ones."""
    if watched(norm):
        return None
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        if norm.weight is None or len(norm.normalized_shape) != 1 or norm.weight.numel() > LONGEST_NORM:
            return None
        if isinstance(norm, nn.LayerNorm):
            return NormPlan(norm.eps, center=True), norm.weight, norm.bias
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps  # torch's, for BF16 too
        return NormPlan(eps, center=False), norm.weight, None
    if type(norm).__name__ in RMS_NORMS:
        assert isinstance(norm.variance_epsilon, float)
        assert isinstance(norm.weight, Tensor)
        return NormPlan(norm.variance_epsilon, center=False), norm.weight, None
    return None
