"""A linear layer's forward and backward pass as three eight-bit GEMMs.

The default recipe, `rowwise`. Tokens T, inputs K, outputs N; x ≈ x_q * s_x always:

    y [T,N] = x_q[T,K] @ w_q[N,K]^T    * s_x[T] * s_w[N]        both scales outside the sum
    g [T,N] = dy[T,N] * s_w[N] * m[T]  -> g_q, s_g[T]           s_w folded in before dy is quantized; s_x = m * 2^e
    dx[T,K] = g_q[T,N] @ wT_q[K,N]^T   * (s_g[T] / m[T])        wT_q: the bytes of w_q, transposed
    dw[N,K] = h_q[N,T] @ xT_q[K,T]^T   * (c_max / s_w[N])       xT_q: the bytes of x_q, transposed
              h_q = g_q^T with column t times c[t]/c_max, c = 2^e * s_g: powers of two, so only exponents move

So forward and backward see the same weight, and the backward pass needs one byte an element of x. s_g is a power of two
and the mantissa of s_x is already in g, so row scaling of x loses nothing.

Other granularities run through the same code. A tensor scale or a square block is transposed with its bytes. A tensor
in groups is quantized again along the other axis. A GEMM without casts runs in the layer's high-precision dtype.

Rotations (`octavo.recipe`): the layer rotates x along K and y back along N around the function below, which rotates w,
dw, and the operands of a rotated dw.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.nn.composite_operations import composite, read_recipe
from octavo.nn.delayed import ScaleHistory
from octavo.nn.layer_limits import differentiable_once
from octavo.nn.linear_call import Call, LinearCall, shaped
from octavo.nn.observer import observe_dy, observe_w, observe_x
from octavo.nn.scale_folding import dw_operand, quantize_folded, rescaled, transposed, weight_transposed
from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor
from octavo.numerics.rotation import scattered_signs
from octavo.ops import FoldedScales, fold_scales, quantize, quantize_scaled, quantize_transposed, rotate
from octavo.ops.checks import FLOATS
from octavo.recipe import Gemm, Recipe


def linear(x: Tensor, w: Tensor, bias: Tensor | None, call: Call, cached: QTensor | None) -> Tensor:
    """y [..., N] = x [..., K] @ w [N, K]^T + bias [N] by the recipe of `call`, differentiable.

    `cached` is w, quantized, where `octavo.cast_once` holds it.
    """
    data, scale = (None, None) if cached is None else (cached.data, cached.scale)
    y: Tensor
    if call.is_operation:
        constants = call.recipe.text, call.dtype, call.input_is_saved
        y = _linear(x, w, bias, data, scale, *constants)
    else:
        y = _Linear.apply(x, w, bias, call, data, scale)  # type: ignore[no-untyped-call]
    return y


@composite(
    "linear(Tensor x, Tensor w, Tensor? bias, Tensor? w_data, Tensor? w_scale, "
    "str recipe, ScalarType dtype, bool input_is_saved) -> Tensor"
)
def _linear(*arguments: Any) -> Any:
    *tensors, w_data, w_scale, recipe, dtype, input_is_saved = arguments
    call = LinearCall(read_recipe(recipe), dtype, input_is_saved=input_is_saved)
    return _Linear.apply(*tensors, call, w_data, w_scale)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call, w_data: Tensor | None, w_scale: Tensor | None
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.shape = x.shape
        x = x.reshape(-1, x.shape[-1])
        recipe, read_w = call.recipe, _rotated(w, call)
        # What y reads is quantized, and, where y runs in BF16, the bytes that the backward pass reads all the same.
        x_q = w_q = None
        if recipe.x is not None and (recipe.y is not None or (needs_w and recipe.quantizes_x_once)):
            x_q = _quantize(x, recipe.x, call.x_history)
        if recipe.w is not None and (recipe.y is not None or ((needs_x or needs_w) and recipe.quantizes_w_once)):
            if w_data is not None and w_scale is not None:
                w_q = QTensor(w_data, w_scale, recipe.w.fmt, recipe.w.granularity)
            else:
                w_q = _quantize_w(read_w, recipe.w, call.w_history)
        if recipe.y is None or x_q is None or w_q is None:
            y = F.linear(x.to(call.dtype), read_w.to(call.dtype), None if bias is None else bias.to(call.dtype))
        else:
            y = call.mm(recipe.y, x_q, w_q, call.dtype, bias)  # [T,K] @ [N,K]^T
        observe_x(call.observer, "x", [x], x_q, recipe.x, call.x_history)
        observe_w(call.observer, [read_w], w_q, recipe.w, call.w_history)
        ctx.call, ctx.x_dtype, ctx.bias_dtype = call, x.dtype, None if bias is None else bias.dtype
        saved_x = _saved_x(x, x_q, call) if needs_w else (None, None)
        saved_w = _saved_w(w_q, w_data, call.recipe, needs_x=needs_x) if needs_x or needs_w else (None, None)
        ctx.save_for_backward(*saved_x, *saved_w, w)
        return shaped(y, ctx.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        recipe = call.recipe
        x, s_x, w_data, s_w, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()
        folded_s_w = s_w if _by_row(recipe.dx) else None
        folded_s_x = s_x if needs_w and recipe.quantizes_x_once and _by_row(recipe.dw) else None
        g = _quantize_dy(dy, folded_s_w, folded_s_x, call) if needs_x or needs_w else None
        observe_dy(
            call.observer, [dy], [dy.shape[1]], g, recipe.dy,
            history=call.dy_history, s_w=folded_s_w, s_x=folded_s_x,
        )  # fmt: skip
        scales = None if g is None or folded_s_x is None else fold_scales(s_x, g.scale, folded_s_w)
        dx = dw = None
        if needs_x:
            dx = _dx(dy, g, scales, w_data, s_w, _rotated(w, call, dy), call).to(ctx.x_dtype).view(ctx.shape)
        if needs_w:
            dw = _rotated_back(_dw(dy, g, x, s_x, scales, folded_s_w, w.dtype, call), call)
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None, None


def _rotated(w: Tensor, call: Call, after: Tensor | None = None) -> Tensor:
    """The weight as the recipe reads it; `after` is that of `octavo.ops.transpose`."""
    w = rotate(w, after) if "y" in call.recipe.rotate else w
    return rotate(w.t(), after).t().contiguous() if "dx" in call.recipe.rotate else w


def _rotated_back(dw: Tensor, call: Call) -> Tensor:
    """The gradient of w from `dw`, that of the weight as the recipe reads it."""
    dw = rotate(dw.t()).t().contiguous() if "dx" in call.recipe.rotate else dw
    return rotate(dw) if "y" in call.recipe.rotate else dw


def _quantize_rotated(t: Tensor, cast: Cast) -> QTensor:
    """The transpose of `t` [T, R], quantized as a rotated dw reads it: tokens times signs, and rotated along T."""
    return quantize(rotate(t.t() * scattered_signs(t.shape[0], t.device).to(t.dtype)), cast)


def _quantize(t: Tensor, cast: Cast, history: ScaleHistory | None) -> QTensor:
    """Quantize by the scale of the history, or by the tensor's own amax where there is no history."""
    return quantize(t, cast) if history is None else _quantize_by(history, t, cast)[0]


def _quantize_w(w: Tensor, cast: Cast, history: ScaleHistory | None) -> QTensor:
    """Quantize a weight so that casting it again by the scale gives the same bytes.

    The bytes of a tensor that is not finite are NaN. A scale from a history does not show that, so it becomes NaN too.
    """
    if history is None:
        return quantize(w, cast)
    q, amax = _quantize_by(history, w, cast)
    return replace(q, scale=torch.where(amax.isfinite(), q.scale, torch.nan))


def _quantize_by(history: ScaleHistory, t: Tensor, cast: Cast) -> tuple[QTensor, Tensor]:
    """Quantize by the scale of the history, and record the amax [1, 1], which is also returned."""
    q, amax = quantize_scaled(t, history.scale if history.ready else quantize(t, cast).scale, cast)
    history.observe(amax)
    return q, amax


def _by_row(gemm: Gemm | None) -> bool:
    """Whether the second operand (w of dx, x of dw) has row scales, which lie along the reduction there."""
    return gemm is not None and gemm.b.by_row


def _saved_x(x: Tensor, x_q: QTensor | None, call: Call) -> tuple[Tensor, Tensor | None]:
    """x as dw needs it: x itself, its bytes and scales, or the bytes and scales of its transpose.

    x itself, with the scales of its bytes, also where another operation saves it: then it takes no memory here.
    """
    gemm = call.recipe.dw
    if gemm is None:
        return x.to(call.dtype), None
    if call.recipe.quantizes_x_once and x_q is not None:
        return x if call.input_is_saved and gemm.b.rounding == "nearest" else x_q.data, x_q.scale
    x_t = _quantize_rotated(x, gemm.b) if "dw" in call.recipe.rotate else quantize_transposed(x, gemm.b)
    return x_t.data, x_t.scale


def _saved_w(
    w_q: QTensor | None, cached: Tensor | None, recipe: Recipe, *, needs_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Bytes and scale of w for the backward pass, which has w itself too; None for those it can do without.

    Bytes rounded to nearest are computed again from w and the scale, unless they are cached: then to save them takes no
    memory. Where dx casts w along its other axis, neither bytes nor scale are read.
    """
    if w_q is not None and recipe.w is not None and recipe.quantizes_w_once:
        computed_again = not needs_x or (cached is None and recipe.w.rounding == "nearest")
        return None if computed_again else w_q.data, w_q.scale
    return None, None


def _quantize_dy(dy: Tensor, s_w: Tensor | None, s_x: Tensor | None, call: Call) -> QTensor | None:
    """g as in `quantize_folded`, by the cast of dy; None where no GEMM reads it."""
    cast = call.recipe.dy
    for_dw = cast is not None and cast.bytes_serve_both and "dw" not in call.recipe.rotate
    if cast is None or (call.recipe.dx is None and not for_dw):
        return None
    if s_w is None and s_x is None:
        return _quantize(dy, cast, call.dy_history)
    return quantize_folded(dy, s_w, s_x, cast)


def _dx(
    dy: Tensor,
    g: QTensor | None,
    scales: FoldedScales | None,
    w_data: Tensor | None,
    s_w: Tensor,
    w: Tensor,
    call: Call,
) -> Tensor:
    gemm = call.recipe.dx
    if g is None or gemm is None:
        return dy.to(call.dtype) @ w.to(call.dtype)  # [T,N] @ [N,K]
    if call.recipe.quantizes_w_once:
        w_t = weight_transposed([w], w_data, s_w, gemm.b, g.data)
    else:
        w_t = quantize_transposed(w, gemm.b)
    return call.mm(gemm, g if scales is None else rescaled(g, scales.dx), w_t, call.dtype)  # [T,N] @ [K,N]^T


def _dw(
    dy: Tensor,
    g: QTensor | None,
    x: Tensor,
    s_x: Tensor,
    scales: FoldedScales | None,
    s_w: Tensor | None,
    dtype: torch.dtype,
    call: Call,
) -> Tensor:
    recipe, gemm = call.recipe, call.recipe.dw
    if gemm is None:
        return (dy.to(call.dtype).t() @ x).to(dtype)  # [N,T] @ [T,K]
    if recipe.quantizes_x_once and x.dtype in FLOATS:  # x itself was saved: cast again, as a weight is
        x_t = weight_transposed([x], None, s_x, gemm.b, dy if g is None else g.data)
    elif recipe.quantizes_x_once:
        x_t = transposed(QTensor(x, s_x, gemm.b.fmt, gemm.b.granularity))
    else:
        x_t = QTensor(x, s_x, gemm.b.fmt, gemm.b.granularity)
    if "dw" in recipe.rotate:
        dy_t = _quantize_rotated(dy, gemm.a)
    elif g is not None and scales is not None:
        dy_t = dw_operand(g, scales)
    elif g is not None and gemm.a == recipe.dy and gemm.a.granularity.transposes and s_w is None:
        dy_t = transposed(g)
    else:
        dy_t = quantize_transposed(dy, gemm.a)
    return call.mm(gemm, dy_t, x_t, dtype)  # [N,T] @ [K,T]^T
