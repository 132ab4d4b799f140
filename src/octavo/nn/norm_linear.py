"""A norm that feeds linear layers: its output is quantized once, in the pass that makes it.

The module refers to a norm and to layers that other modules own, so that parameters keep their names:

    self.qkv = NormLinear(self.input_layernorm, attn.q_proj, attn.k_proj, attn.v_proj)
    (q, k, v), x = self.qkv(x, residual)

It is fused when the layers were converted with one recipe whose scales fold (`rowwise`); until then, and for other
recipes, it is the norm and the layers one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo.nn.folded import Plan
from octavo.nn.fused import NormPlan, norm_linear
from octavo.nn.linear import Linear, compute_dtype
from octavo.nn.weight_cache import WeightCache
from octavo.numerics.cast import Cast

# Root-mean-square norms of transformers: weight * x / rms(x), eps in `variance_epsilon`.
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


class NormLinear(nn.Module):
    """y_i = linear_i(norm(x + residual)).

    Args:
        norm: `nn.LayerNorm`, `nn.RMSNorm`, or a root-mean-square norm of transformers' Llama, Mistral or Qwen.
        linears: the layers that it feeds. Neither is registered here: their owner is another module.
    """

    norm: nn.Module
    linears: tuple[nn.Linear, ...]

    def __init__(self, norm: nn.Module, *linears: nn.Linear) -> None:
        super().__init__()
        for name, value in (("norm", norm), ("linears", linears)):
            object.__setattr__(self, name, value)
        self.weight_cache = WeightCache()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The outputs [..., N_i] of the layers, and x + residual [..., K] (x itself where there is none)."""
        plan, norm = shared_plan(self.linears, x), norm_of(self.norm, x)
        if plan is None or norm is None:
            total = x if residual is None else x + residual
            n = self.norm(total)
            return tuple(linear(n) for linear in self.linears), total
        rows = x.reshape(-1, x.shape[-1])
        y, total = norm_linear(
            rows,
            None if residual is None else residual.reshape(rows.shape),
            norm,
            [linear.weight for linear in self.linears],
            [linear.bias for linear in self.linears],
            kept_bytes(self.weight_cache, self.linears, plan),
            plan,
        )
        parts = torch.split(y.view(*x.shape[:-1], -1), [linear.out_features for linear in self.linears], dim=-1)
        return parts, x if residual is None else total.view(x.shape)

    def cached_weights(self) -> tuple[list[nn.Linear], Cast] | None:
        """The stacked layers and their cast, where they are fused."""
        return stacked_weights(self.linears)

    def extra_repr(self) -> str:
        return f"{type(self.norm).__name__} -> {' + '.join(str(linear.out_features) for linear in self.linears)}"


def shared_plan(linears: Sequence[nn.Module], x: Tensor) -> Plan | None:
    """The plan of layers that can run as one: all converted, with one recipe that folds; else None."""
    first = linears[0]
    if x.numel() == 0 or not isinstance(first, Linear) or not first.recipe.folds:
        return None
    if not all(isinstance(linear, Linear) and linear.recipe == first.recipe for linear in linears):
        return None
    return Plan(first.recipe, compute_dtype(x), first.emulate)


def stacked_weights(linears: Sequence[nn.Linear]) -> tuple[list[nn.Linear], Cast] | None:
    """What `cast_once` keeps for layers that run as one."""
    plan = shared_plan(linears, linears[0].weight)
    return None if plan is None or plan.recipe.y.w is None else (list(linears), plan.recipe.y.w)


def kept_bytes(cache: WeightCache, linears: Sequence[nn.Linear], plan: Plan) -> tuple[Tensor, Tensor] | None:
    """Data and scale of the stacked weights, where `cast_once` keeps them."""
    assert plan.recipe.y.w is not None
    q = cache.get([linear.weight for linear in linears], plan.recipe.y.w)
    return None if q is None else (q.data, q.scale)


def norm_of(norm: nn.Module, x: Tensor) -> tuple[NormPlan, Tensor, Tensor | None] | None:
    """What the fused functions need of a norm over the last dimension; None for a norm that they do not know."""
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        if norm.weight is None or len(norm.normalized_shape) != 1:
            return None
        if isinstance(norm, nn.LayerNorm):
            return NormPlan(norm.eps, center=True), norm.weight, norm.bias
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        return NormPlan(eps, center=False), norm.weight, None
    if type(norm).__name__ in RMS_NORMS:
        assert isinstance(norm.variance_epsilon, float)
        assert isinstance(norm.weight, Tensor)
        return NormPlan(norm.variance_epsilon, center=False), norm.weight, None
    return None
