"""A norm and the linear layers that it feeds, and a whole MLP, as one function each, for recipes whose scales fold.

The producers quantize: a norm writes the bytes of its output and no other form of it, an activation likewise, and the
gradient of an activation is quantized in the pass that makes it. Tokens T, width K, F columns inside the MLP:

    norm+linear   n_q = quantize(norm(x + residual));  y[T,N] = n_q @ w_q^T,  w of several layers stacked along N
    MLP           n_q as above, or quantize(x);  u[T,2F] = n_q @ w_in_q^T;  h_q = quantize(silu(gate) * up)
                  y[T,K] = h_q @ w_out_q^T
    backward      g_q from dy;  dh = g_q @ w_out_q;  du_q = quantize(activation'(u) * dh);  dn = du_q @ w_in_q
                  dx = norm'(dn) + what came to the residual stream directly

The residual stream goes through: x + residual is formed in the norm's pass, and its gradient is added in the norm's
backward pass. What is kept for backward: x + residual, and u; the bytes of n, h and w are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.nn.layer_limits import differentiable_once
from octavo.nn.scale_folding import (
    Plan,
    folded_dw,
    folded_dx,
    folded_dy,
    folded_operand,
    mantissa,
    transposed,
    weight_transposed,
)
from octavo.nn.stacked_weights import Layers, cast_weights, stacked_biases
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops import (
    activation_backward,
    activation_quantize,
    norm_backward,
    norm_quantize,
    quantize,
    requantize_norm,
)


@dataclass(frozen=True)
class NormPlan:
    """What a norm is beside its parameters: `center` tells layer norm from the root-mean-square norm."""

    eps: float
    center: bool


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[NormPlan, Tensor, Tensor | None],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    kept: tuple[Tensor, Tensor] | None,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """y [..., sum of N] of the stacked layers, and x + residual [..., K] (x itself where there is none).

    Args:
        x, residual: [..., K].
        norm: what it is, its weight [K] and bias [K].
        weights, biases: [N_i, K] and [N_i].
        kept: data and scale of the stacked weights, quantized before; None quantizes them here.
        plan: with a recipe that folds.
    """
    how, gamma, beta = norm
    x, residual = wider_first(x, residual)
    result = _NormLinear.apply(  # type: ignore[no-untyped-call]
        plan, how, *(kept or (None, None)), x, residual, gamma, beta, *weights, *biases
    )
    y, total = result if residual is not None else (result, x)
    return y, total


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        how: NormPlan,
        w_data: Tensor | None,
        w_scale: Tensor | None,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        beta: Tensor | None,
        *parameters: Tensor | None,
    ) -> Any:
        gemm = plan.recipe.y
        assert gemm.x is not None
        assert gemm.w is not None
        shape = x.shape
        x, residual = _rows(x), _rows(residual)
        weights, biases = _split(parameters)
        total, n_q, mean, rstd = norm_quantize(x, residual, gamma, beta, how.eps, gemm.x, center=how.center)
        w_q = cast_weights(weights, w_data, w_scale, gemm.w)
        y = plan.mm(gemm, n_q, w_q, plan.dtype, stacked_biases(weights, biases))  # [T,K] @ [N,K]^T
        ctx.plan, ctx.how, ctx.layers, ctx.shape = plan, how, Layers.of(weights, biases), shape
        ctx.has_residual = residual is not None
        ctx.save_for_backward(total, mean, rstd, gamma, beta, n_q.scale, w_q.scale, w_data, *weights)
        y = y.view(*shape[:-1], -1)
        return (y, total.view(shape)) if residual is not None else y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        recipe = plan.recipe
        total, mean, rstd, gamma, beta, s_n, s_w, w_data, *weights = ctx.saved_tensors
        assert recipe.dx.dy is not None
        assert recipe.y.x is not None
        assert recipe.y.w is not None
        dy, dtotal = _rows(dy.contiguous()), _rows(dtotal)
        m = mantissa(s_n)
        g = folded_dy(dy, s_w, m, recipe.dx.dy)
        dn = folded_dx(g, m, weight_transposed(weights, w_data, s_w, recipe.y.w), plan)  # [T,N] @ [K,N]^T
        n_t = folded_operand(
            requantize_norm(total, mean if ctx.how.center else None, rstd, gamma, beta, s_n, recipe.y.x)
        )
        dw = folded_dw(g, n_t, s_n, s_w, ctx.layers.dtype, plan)  # [N,T] @ [K,T]^T
        dx, dgamma, dbeta = norm_backward(dn, total, gamma, mean, rstd, dtotal, center=ctx.how.center)
        dx = dx.view(ctx.shape)
        norm_gradients = dgamma, None if beta is None else dbeta.to(beta.dtype)
        return None, None, None, None, dx, dx if ctx.has_residual else None, *norm_gradients, *ctx.layers.split(dw, dy)


def mlp(
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[NormPlan, Tensor, Tensor | None] | None,
    activation: str,
    inner: tuple[Sequence[Tensor], Sequence[Tensor | None], tuple[Tensor, Tensor] | None],
    outer: tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None],
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """y [..., K] of a two-layer MLP, and x + residual [..., K] (x itself where there is none).

    Args:
        x: [..., K].
        residual: [..., K], only with a norm.
        norm: as in `norm_linear`; None feeds x itself to the first layer.
        activation: "swiglu" or "gelu", as in `octavo.ops.activation_quantize`.
        inner: weights, biases and `kept` (as in `norm_linear`) of the layers before the activation.
        outer: the same of the layer after it.
        plan: with a recipe that folds.
    """
    how, gamma, beta = norm if norm is not None else (None, None, None)
    weights, biases, kept_in = inner
    w, b, kept_out = outer
    x, residual = wider_first(x, residual)
    kept = (*(kept_in or (None, None)), *(kept_out or (None, None)))
    result = _MLP.apply(  # type: ignore[no-untyped-call]
        plan, how, activation, *kept, x, residual, gamma, beta, w, b, *weights, *biases
    )
    y, total = result if residual is not None else (result, x)
    return y, total


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        how: NormPlan | None,
        activation: str,
        in_data: Tensor | None,
        in_scale: Tensor | None,
        out_data: Tensor | None,
        out_scale: Tensor | None,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        w: Tensor,
        b: Tensor | None,
        *parameters: Tensor | None,
    ) -> Any:
        gemm = plan.recipe.y
        assert gemm.x is not None
        assert gemm.w is not None
        shape = x.shape
        x, residual = _rows(x), _rows(residual)
        weights, biases = _split(parameters)
        mean = rstd = None
        total = x
        if how is not None and gamma is not None:
            total, n_q, mean, rstd = norm_quantize(x, residual, gamma, beta, how.eps, gemm.x, center=how.center)
        else:
            n_q = quantize(x, gemm.x)
        w_in = cast_weights(weights, in_data, in_scale, gemm.w)
        w_out = cast_weights([w], out_data, out_scale, gemm.w)
        u = plan.mm(gemm, n_q, w_in, plan.dtype, stacked_biases(weights, biases))  # [T,K] @ [2F,K]^T
        h_q = activation_quantize(u, activation, gemm.x)
        y = plan.mm(gemm, h_q, w_out, plan.dtype, b)  # [T,F] @ [K,F]^T
        ctx.plan, ctx.how, ctx.activation, ctx.shape = plan, how, activation, shape
        ctx.inner, ctx.outer = Layers.of(weights, biases), Layers.of([w], [b])
        ctx.has_residual, ctx.x_dtype = residual is not None, x.dtype
        kept = (total, mean, rstd, gamma, beta, None) if how is not None else (*[None] * 5, n_q.data)
        scales = (n_q.scale, h_q.scale, w_in.scale, w_out.scale)
        ctx.save_for_backward(*kept, u, *scales, in_data, out_data, w, *weights)
        y = y.view(shape)
        return (y, total.view(shape)) if residual is not None else y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        recipe = plan.recipe
        total, mean, rstd, gamma, beta, n_data, u, s_n, s_h, s_in, s_out, in_data, out_data, w, *weights = (
            ctx.saved_tensors
        )
        assert recipe.dx.dy is not None
        assert recipe.y.x is not None
        assert recipe.y.w is not None
        dy, dtotal = _rows(dy.contiguous()), _rows(dtotal)
        m_h, m_n = mantissa(s_h), mantissa(s_n)
        g = folded_dy(dy, s_out, m_h, recipe.dx.dy)
        dh = folded_dx(g, m_h, weight_transposed([w], out_data, s_out, recipe.y.w), plan)  # [T,K] @ [F,K]^T
        du, h_q, wide = activation_backward(
            dh, u, ctx.activation, recipe.dx.dy,
            column_scale=s_in.t(), row_scale=m_n, h_cast=recipe.y.x, h_scale=s_h, keep=ctx.inner.biased,
        )  # fmt: skip
        dw_out = folded_dw(g, transposed(h_q), s_h, s_out, ctx.outer.dtype, plan)  # [K,T] @ [F,T]^T
        dn = folded_dx(du, m_n, weight_transposed(weights, in_data, s_in, recipe.y.w), plan)  # [T,2F] @ [K,2F]^T
        if n_data is None:
            n_t = folded_operand(
                requantize_norm(total, mean if ctx.how.center else None, rstd, gamma, beta, s_n, recipe.y.x)
            )
        else:
            n_t = transposed(QTensor(n_data, s_n, recipe.y.x.fmt, ROW))
        dw_in = folded_dw(du, n_t, s_n, s_in, ctx.inner.dtype, plan)  # [2F,T] @ [K,T]^T
        gradients = (*ctx.outer.split(dw_out, dy), *ctx.inner.split(dw_in, wide))
        if ctx.how is None:
            return *[None] * 7, dn.to(ctx.x_dtype).view(ctx.shape), None, None, None, *gradients
        dx, dgamma, dbeta = norm_backward(dn, total, gamma, mean, rstd, dtotal, center=ctx.how.center)
        dx = dx.view(ctx.shape)
        norm_gradients = dgamma, None if beta is None else dbeta.to(beta.dtype)
        return *[None] * 7, dx, dx if ctx.has_residual else None, *norm_gradients, *gradients


def _split(parameters: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor | None]]:
    half = len(parameters) // 2
    return list(parameters[:half]), list(parameters[half:])


def wider_first(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and residual, so that their sum has the dtype of the first: the one that PyTorch would give it."""
    if residual is None or residual.dtype == x.dtype:
        return x, residual
    wide = torch.promote_types(x.dtype, residual.dtype)
    return (residual, x) if residual.dtype == wide else (x.to(wide), residual)


def _rows(x: Any) -> Any:
    # Within the functions: x and the residual get one tensor as their gradient, and autograd must see that it is one,
    # or a leaf would add to the other's.
    return None if x is None else x.reshape(-1, x.shape[-1])
