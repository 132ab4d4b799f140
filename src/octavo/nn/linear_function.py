"""A linear layer's forward and backward as three eight-bit GEMMs, each tensor quantized once where that serves.

The default recipe, `rowwise`. Tokens T, inputs K, outputs N; x ≈ x_q * s_x always:

    y [T,N] = x_q[T,K] @ w_q[N,K]^T    * s_x[T] * s_w[N]        both scales outside the sum
    g [T,N] = dy[T,N] * s_w[N] * m[T]  -> g_q, s_g[T]           s_w folded in before dy is quantized; s_x = m * 2^e
    dx[T,K] = g_q[T,N] @ wT_q[K,N]^T   * (s_g[T] / m[T])        wT_q: the bytes of w_q, transposed
    dw[N,K] = h_q[N,T] @ xT_q[K,T]^T   * (c_max / s_w[N])       xT_q: the bytes of x_q, transposed
              h_q = g_q^T with column t times c[t]/c_max, c = 2^e * s_g: powers of two, so only exponents move

so forward and backward see the same weight, and the backward pass keeps one byte an element of x. s_g is a power of two
and the mantissa of s_x is in g already: x itself is scaled exactly as row scaling does it. Other granularities take
the same road: a tensor scale or a square block transposes with its bytes, groups are quantized again along the other
axis, and a GEMM without casts runs in the layer's high-precision dtype.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.nn.delayed import ScaleHistory
from octavo.nn.layer_limits import differentiable_once
from octavo.nn.scale_folding import Plan, folded_dw, folded_dx, folded_dy, mantissa, transposed, weight_transposed
from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops import quantize, quantize_scaled, quantize_transposed


def linear(x: Tensor, w: Tensor, bias: Tensor | None, plan: Plan, kept: QTensor | None) -> Tensor:
    """y[...,N] = x[...,K] @ w[N,K]^T + bias[N], differentiable, as `plan.recipe` says; `kept`: w, quantized before."""
    data, scale = (None, None) if kept is None else (kept.data, kept.scale)
    y: Tensor = _Linear.apply(x, w, bias, plan, data, scale)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        plan: Plan,
        w_data: Tensor | None,
        w_scale: Tensor | None,
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.shape = x.shape
        x = x.reshape(-1, x.shape[-1])
        gemm = plan.recipe.y
        x_q = w_q = None
        if gemm.x is not None and gemm.w is not None:
            x_q = _quantize(x, gemm.x, plan.x_history)
            if w_data is not None and w_scale is not None:
                w_q = QTensor(w_data, w_scale, gemm.w.fmt, gemm.w.granularity)
            else:
                w_q = _quantize_w(w, gemm.w, plan.w_history)
            y = plan.mm(gemm, x_q, w_q, plan.dtype, bias)  # [T,K] @ [N,K]^T
        else:
            y = F.linear(x.to(plan.dtype), w.to(plan.dtype), None if bias is None else bias.to(plan.dtype))
        ctx.plan, ctx.x_dtype, ctx.bias_dtype = plan, x.dtype, None if bias is None else bias.dtype
        kept_x = _keep_x(x, x_q, plan) if needs_w else (None, None)
        kept_w = _keep_w(w_q, w_data, plan, needs_x=needs_x) if needs_x or needs_w else (None, None)
        ctx.save_for_backward(*kept_x, *kept_w, w)
        # FSDP warns of an output that is a view.
        shaped: Tensor = torch.ops.aten._unsafe_view(y, (*ctx.shape[:-1], y.shape[1]))
        return shaped

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        x, s_x, w_data, s_w, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()
        fold_w = s_w if _by_row(plan.recipe.dx.w) else None
        m = mantissa(s_x) if needs_w and _by_row(plan.recipe.dw.x) else None
        g = _quantize_dy(dy, fold_w, m, plan) if needs_x or needs_w else None
        dx = dw = None
        if needs_x:
            dx = _dx(dy, g, m, w_data, s_w, w, plan).to(ctx.x_dtype).view(ctx.shape)
        if needs_w:
            dw = _dw(dy, g, x, s_x, fold_w, w.dtype, plan)
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None, None


def _quantize(t: Tensor, cast: Cast, history: ScaleHistory | None) -> QTensor:
    """Quantize by the operand's history where it keeps one, else by its own amax."""
    return quantize(t, cast) if history is None else _quantize_by(history, t, cast)[0]


def _quantize_w(w: Tensor, cast: Cast, history: ScaleHistory | None) -> QTensor:
    """Quantize a weight such that casting it again by the scale gives the same bytes.

    A tensor that is not finite has NaN for bytes, whatever the scale of its history is: its scale becomes NaN too.
    """
    if history is None:
        return quantize(w, cast)
    q, amax = _quantize_by(history, w, cast)
    return replace(q, scale=torch.where(amax.isfinite(), q.scale, torch.nan))


def _quantize_by(history: ScaleHistory, t: Tensor, cast: Cast) -> tuple[QTensor, Tensor]:
    """Quantize by the scale of a history, and note the amax [1, 1], which is returned too."""
    q, amax = quantize_scaled(t, history.scale if history.ready else quantize(t, cast).scale, cast)
    history.observe(amax)
    return q, amax


def _by_row(cast: Cast | None) -> bool:
    return cast is not None and cast.granularity == ROW


def _bytes_serve_both(cast: Cast) -> bool:
    """Whether the bytes of one quantization serve the other direction too, transposed (`octavo.recipe`)."""
    return cast.granularity == ROW or cast.granularity.transposes


def _keep_x(x: Tensor, x_q: QTensor | None, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """What dw will need of x: x itself, its bytes and row scales, or the bytes of its transpose with their scales."""
    cast = plan.recipe.dw.x
    if cast is None:
        return x.to(plan.dtype), None
    if cast == plan.recipe.y.x and x_q is not None and _bytes_serve_both(cast):
        return x_q.data, x_q.scale
    x_t = quantize_transposed(x, cast)
    return x_t.data, x_t.scale


def _keep_w(
    w_q: QTensor | None, given: Tensor | None, plan: Plan, *, needs_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What the backward pass will need of w beside w itself: its scale, and the bytes that cannot be made again.

    Bytes rounded to nearest are cast again from w, by the same scale; those that were `given` are kept elsewhere. Where
    dx casts w along its other axis, nothing of the forward pass is read.
    """
    cast = plan.recipe.dx.w
    if w_q is not None and cast is not None and cast == plan.recipe.y.w and _bytes_serve_both(cast):
        again = not needs_x or (given is None and cast.rounding == "nearest")
        return None if again else w_q.data, w_q.scale
    return None, None


def _quantize_dy(dy: Tensor, s_w: Tensor | None, m: Tensor | None, plan: Plan) -> QTensor | None:
    """g = dy * s_w * m, quantized as dx wants it; None where dx runs unquantized."""
    cast = plan.recipe.dx.dy
    if cast is None:
        return None
    if s_w is None and m is None:
        return _quantize(dy, cast, plan.dy_history)
    return folded_dy(dy, s_w, m, cast)


def _dx(
    dy: Tensor, g: QTensor | None, m: Tensor | None, w_data: Tensor | None, s_w: Tensor, w: Tensor, plan: Plan
) -> Tensor:
    gemm = plan.recipe.dx
    if g is None or gemm.w is None:
        return dy.to(plan.dtype) @ w.to(plan.dtype)  # [T,N] @ [N,K]
    if gemm.w == plan.recipe.y.w and _bytes_serve_both(gemm.w):
        w_t = weight_transposed([w], w_data, s_w, gemm.w)
    else:
        w_t = quantize_transposed(w, gemm.w)
    return folded_dx(g, m, w_t, plan)


def _dw(
    dy: Tensor, g: QTensor | None, x: Tensor, s_x: Tensor, s_w: Tensor | None, dtype: torch.dtype, plan: Plan
) -> Tensor:
    gemm, dx_gemm, y_gemm = plan.recipe.dw, plan.recipe.dx, plan.recipe.y
    if gemm.x is None or gemm.dy is None:
        return (dy.to(plan.dtype).t() @ x).to(dtype)  # [N,T] @ [T,K]
    if gemm.x.granularity == ROW:
        assert g is not None
        return folded_dw(g, transposed(QTensor(x, s_x, gemm.x.fmt, ROW)), s_x, s_w, dtype, plan)
    if g is not None and gemm.dy == dx_gemm.dy and gemm.dy.granularity.transposes and s_w is None:
        dy_t = transposed(g)
    else:
        dy_t = quantize_transposed(dy, gemm.dy)
    x_t = QTensor(x, s_x, gemm.x.fmt, gemm.x.granularity)
    if gemm.x == y_gemm.x and gemm.x.granularity.transposes:
        x_t = transposed(x_t)
    return plan.mm(gemm, dy_t, x_t, dtype)  # [N,T] @ [K,T]^T
