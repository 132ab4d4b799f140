"""A norm and the linear layers that it feeds, and a whole MLP, each as one function, for `FusableRecipe`s.

Each operation that computes a GEMM's operand also quantizes it. A norm writes only the bytes of its output, and so does
an activation. The gradient of an activation is quantized in the pass that computes it. Tokens T, width K, F columns
inside the MLP:

    norm+linear   n_q = quantize(norm(x + residual));  y[T,N] = n_q @ w_q^T,  w of several layers stacked along N
    MLP           n_q as above, or quantize(x);  u[T,2F] = n_q @ w_in_q^T;  h_q = quantize(silu(gate) * up)
                  y[T,K] = h_q @ w_out_q^T
    backward      g_q from dy;  dh = g_q @ w_out_q;  du_q = quantize(activation'(u) * dh);  dn = du_q @ w_in_q
                  dx = norm'(dn) + the gradient of the residual stream

x + residual is computed in the norm's pass, and its gradient is added in the norm's backward pass. Saved for backward
are x + residual and u; the bytes of n, h and w are computed again.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.nn.composite_operations import composite, read_recipe
from octavo.nn.fused_input import FusedInput, Norm, NormSpec, rows, wider_first
from octavo.nn.layer_limits import differentiable_once
from octavo.nn.linear_call import FusedCall, LinearCall
from octavo.nn.observer import observe_dy, observe_w, observe_x
from octavo.nn.scale_folding import (
    dw_operand,
    mantissa,
    quantize_folded,
    rescaled,
    transposed,
    weight_transposed,
)
from octavo.nn.stacked_weights import Stack, StackInfo
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops import activation_backward, activation_quantize, fold_scales
from octavo.recipe import FusableRecipe


def norm_linear(x: Tensor, residual: Tensor | None, norm: Norm, stack: Stack, call: FusedCall) -> tuple[Tensor, Tensor]:
    """y [..., sum of N_i] of the stacked layers, and x + residual [..., K] (x itself without a residual).

    Args:
        x, residual: [..., K].
        norm: of x + residual.
        stack: the layers that the norm feeds.
    """
    spec, gamma, beta = norm
    x, residual = wider_first(x, residual)
    tensors = x, residual, gamma, beta
    if call.is_operation:
        constants = spec.eps, spec.center, call.recipe.text, call.dtype
        result = _norm_linear(*tensors, stack.arguments(), *constants)
    else:
        result = _NormLinear.apply(call, spec, *tensors, *stack.arguments())  # type: ignore[no-untyped-call]
    y, *rest = result
    return y, rest[0] if rest else x


@composite(
    "norm_linear(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, Tensor?[] layers, "
    "float eps, bool center, str recipe, ScalarType dtype) -> Tensor[]"
)
def _norm_linear(*arguments: Any) -> Any:
    *tensors, layers, eps, center, recipe, dtype = arguments
    call, norm = LinearCall(_fusable(recipe), dtype), NormSpec(eps, center)
    return _NormLinear.apply(call, norm, *tensors, *layers)  # type: ignore[no-untyped-call]


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: FusedCall,
        norm: NormSpec,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        beta: Tensor | None,
        *layers: Tensor | None,
    ) -> Any:
        recipe = call.recipe
        stack = Stack.from_arguments(layers, recipe.w)
        given = FusedInput.of(norm, x, residual, gamma, beta, recipe.x)
        n_q, w_q = given.q, stack.quantize(recipe.w)
        y = call.mm(recipe.y, n_q, w_q, call.dtype, stack.bias())  # [T,K] @ [N,K]^T
        observe_x(call.observer, *given.source, n_q, recipe.x)
        observe_w(call.observer, stack.weights, w_q, recipe.w)
        ctx.call, ctx.input, ctx.stack = call, given.info, StackInfo.of(stack)
        ctx.save_for_backward(n_q.scale, w_q.scale, layers[0], *given.saved, *stack.weights)
        return given.outputs(y)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        recipe = call.recipe
        s_n, s_w, w_data, *rest = ctx.saved_tensors
        saved, weights = rest[:5], rest[5:]
        dy = rows(dy.contiguous())
        g = quantize_folded(dy, s_w, s_n, recipe.dy)
        db = ctx.stack.bias_gradient(dy)
        observe_dy(call.observer, [dy], ctx.stack.sizes, g, recipe.dy, s_w=s_w, s_x=s_n)
        w_t = weight_transposed(weights, w_data, s_w, recipe.w, g.data)
        scales = fold_scales(s_n, g.scale, s_w)
        dn = call.mm(recipe.dx, rescaled(g, scales.dx), w_t, call.dtype)  # [T,N] @ [K,N]^T
        n_t = ctx.input.bytes_transposed(saved, s_n, recipe.x)
        dw = call.mm(recipe.dw, dw_operand(g, scales), n_t, ctx.stack.dtype)  # [N,T] @ [K,T]^T
        return None, None, *ctx.input.gradients(dn, dtotal, saved), *ctx.stack.gradients(dw, db)


def mlp(
    x: Tensor, residual: Tensor | None, norm: Norm | None, activation: str, inner: Stack, outer: Stack, call: FusedCall
) -> tuple[Tensor, Tensor]:
    """y [..., K] of a two-layer MLP, and x + residual [..., K] (x itself without a residual).

    Args:
        x: [..., K].
        residual: [..., K], only with a norm.
        norm: of x + residual; None feeds x itself to the first layer.
        activation: "swiglu", "geglu" or "gelu", as in `octavo.ops.activation_quantize`.
        inner: the layers before the activation.
        outer: the layer after it.
    """
    spec, gamma, beta = norm if norm is not None else (None, None, None)
    x, residual = wider_first(x, residual)
    tensors, layers = (x, residual, gamma, beta), (*outer.arguments(), *inner.arguments())
    if call.is_operation:
        norm_constants = (None, False) if spec is None else (spec.eps, spec.center)
        result = _mlp(*tensors, layers, *norm_constants, activation, call.recipe.text, call.dtype)
    else:
        result = _MLP.apply(call, spec, activation, *tensors, *layers)  # type: ignore[no-untyped-call]
    y, *rest = result
    return y, rest[0] if rest else x


@composite(
    "mlp(Tensor x, Tensor? residual, Tensor? gamma, Tensor? beta, Tensor?[] layers, "
    "float? eps, bool center, str activation, str recipe, ScalarType dtype) -> Tensor[]"
)
def _mlp(*arguments: Any) -> Any:
    *tensors, layers, eps, center, activation, recipe, dtype = arguments
    call, norm = LinearCall(_fusable(recipe), dtype), None if eps is None else NormSpec(eps, center)
    return _MLP.apply(call, norm, activation, *tensors, *layers)  # type: ignore[no-untyped-call]


def _fusable(text: str) -> FusableRecipe:
    recipe = read_recipe(text).fusable
    assert recipe is not None  # the layers were fused by it
    return recipe


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: FusedCall,
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
        n_q = given.q
        w_in, w_out = inner.quantize(recipe.w), outer.quantize(recipe.w)
        u = call.mm(recipe.y, n_q, w_in, call.dtype, inner.bias())  # [T,K] @ [2F,K]^T
        h_q = activation_quantize(u, activation, recipe.x)
        y = call.mm(recipe.y, h_q, w_out, call.dtype, outer.bias())  # [T,F] @ [K,F]^T
        observe_x(call.observer, *given.source, n_q, recipe.x)
        observe_w(call.observer, inner.weights, w_in, recipe.w)
        observe_x(call.outer_observer, activation, [u], h_q, recipe.x)
        observe_w(call.outer_observer, outer.weights, w_out, recipe.w)
        ctx.call, ctx.input, ctx.activation = call, given.info, activation
        ctx.inner, ctx.outer = StackInfo.of(inner), StackInfo.of(outer)
        n_data = n_q.data if norm is None else None
        scales = (n_q.scale, h_q.scale, w_in.scale, w_out.scale)
        ctx.save_for_backward(n_data, u, *scales, layers[4], layers[0], *outer.weights, *given.saved, *inner.weights)
        return given.outputs(y)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        recipe = call.recipe
        n_data, u, s_n, s_h, s_in, s_out, in_data, out_data, w, *rest = ctx.saved_tensors
        saved, weights = rest[:5], rest[5:]
        dy = rows(dy.contiguous())
        g = quantize_folded(dy, s_out, s_h, recipe.dy)
        observe_dy(call.outer_observer, [dy], ctx.outer.sizes, g, recipe.dy, s_w=s_out, s_x=s_h)
        w_out_t = weight_transposed([w], out_data, s_out, recipe.w, g.data)
        scales = fold_scales(s_h, g.scale, s_out)
        dh = call.mm(recipe.dx, rescaled(g, scales.dx), w_out_t, call.dtype)  # [T,K] @ [F,K]^T
        du, h_q, dbias = activation_backward(
            dh, u, ctx.activation, recipe.dy,
            column_scale=s_in.t(), row_scale=mantissa(s_n), h_cast=recipe.x, h_scale=s_h, biased=ctx.inner.biased,
        )  # fmt: skip
        kind = f"{ctx.activation}_gradient"
        observe_dy(call.observer, [dh, u], ctx.inner.sizes, du, recipe.dy, kind, s_w=s_in, s_x=s_n)
        dw_out = call.mm(recipe.dw, dw_operand(g, scales), transposed(h_q), ctx.outer.dtype)  # [K,T] @ [F,T]^T
        w_in_t = weight_transposed(weights, in_data, s_in, recipe.w, du.data)
        scales = fold_scales(s_n, du.scale, s_in)
        dn = call.mm(recipe.dx, rescaled(du, scales.dx), w_in_t, call.dtype)  # [T,2F] @ [K,2F]^T
        if n_data is None:
            n_t = ctx.input.bytes_transposed(saved, s_n, recipe.x)
        else:
            n_t = transposed(QTensor(n_data, s_n, recipe.x.fmt, ROW))
        dw_in = call.mm(recipe.dw, dw_operand(du, scales), n_t, ctx.inner.dtype)  # [2F,T] @ [K,T]^T
        layers = (*ctx.outer.gradients(dw_out, ctx.outer.bias_gradient(dy)), *ctx.inner.gradients(dw_in, dbias))
        return None, None, None, *ctx.input.gradients(dn, dtotal, saved), *layers
