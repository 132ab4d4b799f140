"""Layers of which each rank has a part, as functions, for `FusableRecipe`s: activations travel as bytes and row scales.

Tokens T, of which each of R ranks has T/R between the layers; the mathematics is that of `octavo.nn.linear_function`.

    column      x_q[T/R,K] -> gathered x_q[T,K];  y[T,N/R] = x_q @ w_q^T
                g = dy * s_w * m -> g_q[T,N/R];   dx[T/R,K] = scattered sum of g_q @ w_q;  dw[N/R,K] = g_q^T @ x_q
    row         s_x[T]: the largest of the ranks';  y[T/R,N] = scattered sum of x_q[T,K/R] @ w_q^T
                g_q[T/R,N] -> gathered g_q[T,N];    dx[T,K/R] = g_q @ w_q;  dw[N,K/R] = g_q^T @ x_q

In a row-parallel layer s_w and the mantissa m of s_x are the same for all ranks, so that each can quantize
g = dy * s_w * m for its own rows before they are gathered. The results that are scattered are sums, in high precision.

A column-parallel layer saves the bytes of its own rows, and gathers them again in the backward pass. There, as in the
forward pass, ranks exchange while they compute: x_q travels during the GEMM of dx, and dx during that of dw.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.dist.tensor_parallelism.exchanges import gathered_mm, scattered_mm
from octavo.dist.tensor_parallelism.ranks import Ranks
from octavo.dist.tensor_parallelism.weights import Shards, quantize_shards
from octavo.nn.fused_input import FusedInput, Norm, NormSpec, rows, wider_first
from octavo.nn.layer_limits import differentiable_once
from octavo.nn.linear_call import FusedCall, shaped
from octavo.nn.observer import observe_dy, observe_w, observe_x
from octavo.nn.scale_folding import (
    dw_operand,
    dx_operand,
    mantissa,
    quantize_folded,
    scale_folded,
    transposed,
    weight_transposed,
)
from octavo.nn.stacked_weights import Stack, StackInfo
from octavo.numerics.qtensor import QTensor
from octavo.ops import (
    activation_backward,
    activation_quantize_scaled,
    activation_scales,
    fold_scales,
    requantize,
    row_scales,
    transpose,
)


def column(
    x: Tensor, residual: Tensor | None, norm: Norm | None, stack: Stack, call: FusedCall, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """y [T, sum of N_i / R], rows in the order of the ranks, and x + residual (x itself without a residual).

    Args:
        x, residual: [..., K], this rank's rows.
        norm: of x + residual; None feeds x itself to the layers.
        stack: this rank's part of the layers.
    """
    spec, gamma, beta = norm if norm is not None else (None, None, None)
    x, residual = wider_first(x, residual)
    result = _Column.apply(call, ranks, spec, x, residual, gamma, beta, *stack.arguments())  # type: ignore[no-untyped-call]
    y, total = result if residual is not None else (result, x)
    return y, total


def row(x: Tensor, stack: Stack, call: FusedCall, ranks: Ranks) -> Tensor:
    """This rank's rows y [T / R, N], of all rows x [T, K / R] in the order of the ranks."""
    y: Tensor = _Row.apply(call, ranks, x, *stack.arguments())  # type: ignore[no-untyped-call]
    return y


def mlp(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    activation: str,
    inner: Stack,
    outer: Stack,
    call: FusedCall,
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """y [..., K] and x + residual of `octavo.nn.fused.mlp`, of this rank's rows and its parts of the layers."""
    spec, gamma, beta = norm if norm is not None else (None, None, None)
    x, residual = wider_first(x, residual)
    result = _MLP.apply(  # type: ignore[no-untyped-call]
        call, ranks, spec, activation, x, residual, gamma, beta, *outer.arguments(), *inner.arguments()
    )
    y, *rest = result
    return y, rest[0] if rest else x


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: FusedCall,
        ranks: Ranks,
        norm: NormSpec | None,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        *layers: Tensor | None,
    ) -> Any:
        recipe = call.recipe
        stack = Stack.from_arguments(layers, recipe.w)
        given = FusedInput.of(norm, x, residual, gamma, beta, recipe.x)
        n_q_all, w_q, y = gathered_mm(
            given.q, lambda: _quantized(stack, call, ranks, cut_rows=False), recipe.y, call, ranks, bias=stack.bias()
        )  # [T,K] @ [N/R,K]^T
        observe_x(call.observer, *given.source, given.q, recipe.x)
        observe_w(call.observer, stack.weights, w_q, recipe.w)
        ctx.call, ctx.ranks, ctx.input, ctx.stack = call, ranks, given.info, StackInfo.of(stack)
        ctx.save_for_backward(given.q.data, n_q_all.scale, w_q.scale, layers[0], *given.saved, *stack.weights)
        return (y, shaped(given.total, x.shape)) if residual is not None else y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        n_data, s_n, s_w, w_data, *rest = ctx.saved_tensors
        saved, weights = rest[:5], rest[5:]
        dy = dy.contiguous()
        g = quantize_folded(dy, s_w, s_n, call.recipe.dy)
        observe_dy(call.observer, [dy], ctx.stack.sizes, g, call.recipe.dy, s_w=s_w, s_x=s_n)
        w_t = weight_transposed(weights, w_data, s_w, call.recipe.w, g.data)
        dn, dw = _column_backward(g, n_data, s_n, w_t, s_w, ctx.stack.dtype, call, ctx.ranks)
        gradients = ctx.input.gradients(dn, dtotal, saved)
        return None, None, None, *gradients, *ctx.stack.gradients(dw, ctx.stack.bias_gradient(dy))


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: FusedCall, ranks: Ranks, x: Tensor, *layers: Tensor | None) -> Tensor:
        recipe = call.recipe
        stack = Stack.from_arguments(layers, recipe.w)
        w_q = _quantized(stack, call, ranks, cut_rows=True)
        x_q = requantize([x], ranks.largest(row_scales([x], recipe.x)), recipe.x)
        y = _biased(ranks.done(scattered_mm(x_q, w_q, recipe.y, call, ranks)), stack)  # [T,K/R] @ [N,K/R]^T
        observe_x(call.observer, "x", [x], x_q, recipe.x)
        observe_w(call.observer, stack.weights, w_q, recipe.w)
        ctx.call, ctx.ranks, ctx.stack, ctx.x_dtype = call, ranks, StackInfo.of(stack), x.dtype
        ctx.save_for_backward(x_q.data, x_q.scale, w_q.scale, layers[0], *stack.weights)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        recipe = call.recipe
        x_data, s_x, s_w, w_data, *weights = ctx.saved_tensors
        dy, own_s_x = dy.contiguous(), ctx.ranks.own(s_x)
        g_own = quantize_folded(dy, s_w, own_s_x, recipe.dy)
        observe_dy(call.observer, [dy], ctx.stack.sizes, g_own, recipe.dy, s_w=s_w, s_x=own_s_x)
        g, _, dx = gathered_mm(
            g_own,
            lambda: weight_transposed(weights, w_data, s_w, recipe.w, g_own.data),
            recipe.dx,
            call,
            ctx.ranks,
            m=mantissa(s_x),
        )  # [T,N] @ [K/R,N]^T
        x_t = scale_folded(transpose(x_data, None, g_own.data))
        dw = call.mm(
            recipe.dw, dw_operand(g, fold_scales(s_x, g.scale, s_w)), x_t, ctx.stack.dtype
        )  # [N,T] @ [K/R,T]^T
        return None, None, dx.to(ctx.x_dtype), *ctx.stack.gradients(dw, ctx.stack.bias_gradient(dy))


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: FusedCall,
        ranks: Ranks,
        norm: NormSpec | None,
        activation: str,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        *layers: Tensor | None,
    ) -> Any:
        recipe = call.recipe
        outer, inner = Stack.from_arguments(layers[:4], recipe.w), Stack.from_arguments(layers[4:], recipe.w)
        given = FusedInput.of(norm, x, residual, gamma, beta, recipe.x)
        n_q_all, w_in, u = gathered_mm(
            given.q, lambda: _quantized(inner, call, ranks, cut_rows=False), recipe.y, call, ranks, bias=inner.bias()
        )  # [T,K] @ [2F/R,K]^T
        w_out = _quantized(outer, call, ranks, cut_rows=True)
        s_h = ranks.largest(activation_scales(u, activation, recipe.x))
        h_q = activation_quantize_scaled(u, activation, s_h, recipe.x)
        y = _biased(ranks.done(scattered_mm(h_q, w_out, recipe.y, call, ranks)), outer)  # [T,F/R] @ [K,F/R]^T
        observe_x(call.observer, *given.source, given.q, recipe.x)
        observe_w(call.observer, inner.weights, w_in, recipe.w)
        observe_x(call.outer_observer, activation, [u], h_q, recipe.x)
        observe_w(call.outer_observer, outer.weights, w_out, recipe.w)
        ctx.call, ctx.ranks, ctx.input, ctx.activation = call, ranks, given.info, activation
        ctx.inner, ctx.outer = StackInfo.of(inner), StackInfo.of(outer)
        scales = (n_q_all.scale, s_h, w_in.scale, w_out.scale)
        ctx.save_for_backward(
            given.q.data, u, *scales, layers[4], layers[0], *outer.weights, *given.saved, *inner.weights
        )
        return given.outputs(y)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        recipe, ranks = call.recipe, ctx.ranks
        n_data, u, s_n, s_h, s_in, s_out, in_data, out_data, w, *rest = ctx.saved_tensors
        saved, weights = rest[:5], rest[5:]
        dy = rows(dy.contiguous())
        own_s_h = ranks.own(s_h)
        g_own = quantize_folded(dy, s_out, own_s_h, recipe.dy)
        observe_dy(call.outer_observer, [dy], ctx.outer.sizes, g_own, recipe.dy, s_w=s_out, s_x=own_s_h)
        g, _, dh = gathered_mm(
            g_own,
            lambda: weight_transposed([w], out_data, s_out, recipe.w, g_own.data),
            recipe.dx,
            call,
            ranks,
            m=mantissa(s_h),
        )  # [T,K] @ [F/R,K]^T
        du, h_q, dbias = activation_backward(
            dh, u, ctx.activation, recipe.dy,
            column_scale=s_in.t(), row_scale=mantissa(s_n), h_cast=recipe.x, h_scale=s_h, biased=ctx.inner.biased,
        )  # fmt: skip
        kind = f"{ctx.activation}_gradient"
        observe_dy(call.observer, [dh, u], ctx.inner.sizes, du, recipe.dy, kind, s_w=s_in, s_x=s_n)
        h = dw_operand(g, fold_scales(s_h, g.scale, s_out))
        dw_out = call.mm(recipe.dw, h, transposed(h_q), ctx.outer.dtype)  # [K,T] @ [F/R,T]^T
        w_in_t = weight_transposed(weights, in_data, s_in, recipe.w, du.data)
        dn, dw_in = _column_backward(du, n_data, s_n, w_in_t, s_in, ctx.inner.dtype, call, ranks)
        layers = (*ctx.outer.gradients(dw_out, ctx.outer.bias_gradient(dy)), *ctx.inner.gradients(dw_in, dbias))
        return None, None, None, None, *ctx.input.gradients(dn, dtotal, saved), *layers


def _column_backward(
    g: QTensor,
    n_data: Tensor,
    s_n: Tensor,
    w_t: QTensor,
    s_w: Tensor,
    w_dtype: torch.dtype,
    call: FusedCall,
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """dn [T / R, K] and dw [N / R, K] of a column-parallel layer.

    Args:
        g: [T, N / R], dy * s_w * m, quantized.
        n_data, s_n: the bytes of this rank's rows of the input, and the scales of all rows.
        w_t, s_w: the bytes of the weight, transposed, and its scales.
        w_dtype: of dw.
    """
    arriving = ranks.gather_data(n_data, g.scale)
    dn = scattered_mm(dx_operand(g, mantissa(s_n)), w_t, call.recipe.dx, call, ranks)  # [T,N/R] @ [K,N/R]^T
    h = dw_operand(g, fold_scales(s_n, g.scale, s_w))
    n_t = scale_folded(transpose(ranks.data(arriving, n_data.dtype)))
    dw = call.mm(call.recipe.dw, h, n_t, w_dtype)  # [N/R,T] @ [K,T]^T
    return ranks.done(dn), dw


def _quantized(stack: Stack, call: FusedCall, ranks: Ranks, *, cut_rows: bool) -> QTensor:
    """The quantized weights of a stack: those cached, or cast now."""
    if stack.cached is not None:
        return stack.cached
    return quantize_shards([Shards(stack.weights, call.recipe.w, cut_rows)], ranks)[0]


def _biased(y: Tensor, stack: Stack) -> Tensor:
    bias = stack.bias()
    return y if bias is None else y + bias.to(y.dtype)
