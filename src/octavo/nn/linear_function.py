"""A linear layer's forward and backward pass as three eight-bit GEMMs.

The default recipe, `rowwise`. Tokens T, inputs K, outputs N; x ≈ x_q * s_x always:

    y [T,N] = x_q[T,K] @ w_q[N,K]^T    * s_x[T] * s_w[N]        both scales outside the sum
    g [T,N] = dy[T,N] * s_w[N] * m[T]  -> g_q, s_g[T]           s_w folded in before dy is quantized; s_x = m * 2^e
    dx[T,K] = g_q[T,N] @ wT_q[K,N]^T   * (s_g[T] / m[T])        wT_q: the bytes of w_q, transposed
    dw[N,K] = h_q[N,T] @ xT_q[K,T]^T   * (c_max / s_w[N])       xT_q: the bytes of x_q, transposed
              h_q = g_q^T with column t times c[t]/c_max, c = 2^e * s_g: powers of two, so only exponents move

So forward and backward see the same weight, and the backward pass needs one byte an element of x. Row scaling of x
loses nothing, because s_g is a power of two and the mantissa of s_x is already in g.

Other granularities run through the same code. A tensor scale or a square block is transposed with its bytes. A tensor
in groups is quantized again along the other axis. A GEMM without casts runs in the layer's high-precision dtype. It
reads x and w, or with `Recipe.exact_backward` the numbers that x_q and w_q stand for.

A rotated GEMM (`octavo.recipe`) quantizes its two operands for itself alone. The others read bytes without a rotation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import ops
from octavo.nn.delayed import ScaleHistory
from octavo.nn.module_tools import differentiable_once
from octavo.nn.observer import Observer, observe_dy, observe_xw
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.formats import format_of
from octavo.numerics.qtensor import ROW, TENSOR, Cast, QTensor
from octavo.numerics.scaling import quotient, scattered_signs
from octavo.ops.registration import FLOATS, define
from octavo.recipe import FusableRecipe, Gemm, Recipe

# ---- Operands of the backward GEMMs whose row scales lie along the reduction.
#
# Such a scale cannot leave the sum. It is folded into the other operand, and its own tensor then has the scale 1.


def transposed(q: QTensor, after: Tensor | None = None) -> QTensor:
    """The bytes of `q` transposed, with its scales; row scales are folded into the other operand and become 1."""
    data = ops.transpose(q.data, None, after)
    return scale_folded(data) if q.granularity == ROW else QTensor(data, q.scale.t(), q.format, q.granularity)


def scale_folded(data: Tensor) -> QTensor:
    """Bytes whose scale was folded into the other operand: theirs is 1."""
    return QTensor(data, ones(data, data.shape[0]), format_of(data.dtype), ROW)


_known_ones: dict[tuple[torch.device, int], Tensor] = {}  # by device and rows, the widths of layers


def ones(data: Tensor, rows: int) -> Tensor:
    """Scales [rows, 1] of 1 for `data`, the same tensor at each eager call: filling one takes a launch."""
    if torch.compiler.is_compiling() or type(data) is not Tensor:  # traced
        return data.new_ones((rows, 1), dtype=torch.float32)
    key = data.device, rows
    found = _known_ones.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = data.new_ones((rows, 1), dtype=torch.float32)
        if type(found) is not Tensor or (data.is_cuda and torch.cuda.is_current_stream_capturing()):
            return found  # the memory of a CUDA graph is written to again
        if data.is_cuda:  # another stream may read it next
            torch.cuda.current_stream(data.device).synchronize()
        _known_ones[key] = found
    return found


def weight_transposed(weights: list[Tensor], data: Tensor | None, s_w: Tensor, cast: Cast, after: Tensor) -> QTensor:
    """The bytes of one weight, or of several with row scales, stacked along N and transposed.

    They are the saved bytes `data`, or the weights cast again by the scale `s_w`. `after` is a tensor of the backward
    pass, before which compiled code cannot compute the result.
    """
    # Quantizing again would give the same bytes. But torch.compile merges equal calls: it would quantize once, in the
    # forward pass, and keep the bytes until the backward pass.
    if data is not None:
        return transposed(QTensor(data, s_w, cast.fmt, cast.granularity), after)
    data = ops.requantize_transposed(weights, s_w, cast, after)
    return scale_folded(data) if cast.by_row else QTensor(data, s_w.t(), cast.fmt, cast.granularity)


def quantize_folded(dy: Tensor, s_w: Tensor | None, s_x: Tensor | None, cast: Cast) -> QTensor:
    """g = dy * s_w * m, quantized, where m is the mantissa of s_x; a factor that is None is 1."""
    return ops.quantize(dy, cast, column_scale=None if s_w is None else s_w.t(), mantissa_of=s_x)


def dx_operand(g: QTensor, m: Tensor | None) -> QTensor:
    """g for dx, whose scale has no factor m: the scale of g divided by m."""
    return g if m is None else rescaled(g, quotient(g.scale, m))


def rescaled(q: QTensor, scale: Tensor) -> QTensor:
    """The bytes of `q` with another scale."""
    return QTensor(q.data, scale, q.format, q.granularity)


def dw_operand(g: QTensor, scales: ops.FoldedScales) -> QTensor:
    """h [N, T] for dw, from row-scaled g [T, N]: the bytes of g transposed, and s_w taken out of the scale."""
    # The scale of g and the exponent of s_x lie along the reduction: powers of two that move the bytes' exponents.
    h = ops.transpose(g.data, scales.shift)  # [N,T]
    scale = scales.dw if len(scales.dw) == len(h) else scales.dw.expand(len(h), 1).contiguous()
    return QTensor(h, scale, g.format, ROW)


# ---- A call of a converted layer: its arguments that are not tensors, and the GEMMs by its recipe.


R = TypeVar("R", Recipe, FusableRecipe)


@dataclass(eq=False)  # not frozen: compiled code would look up the defaults of its fields in Python at each call
class LinearCall(Generic[R]):
    """The arguments of a call that are not tensors."""

    recipe: R  # a `FusableRecipe` where the call is one of a fused module
    dtype: torch.dtype  # of y, and of the GEMMs without casts
    x_history: ScaleHistory | None = None
    w_history: ScaleHistory | None = None
    dy_history: ScaleHistory | None = None
    observer: Observer | None = None  # where statistics of the operands are recorded
    outer_observer: Observer | None = None  # in an MLP, where those of the layer after the activation are recorded
    input_is_saved: bool = False  # by another operation for its backward pass: to save x here too takes no memory
    parallel: Any = None  # a `ParallelLayer`, where ranks share the layer and a scale is that of a whole tensor
    has_backward: bool = True  # False: a forward pass under `no_grad` quantizes nothing for a backward pass
    recompute: bool = False  # of an MLP: its backward pass computes the input of the activation again

    @property
    def is_operation(self) -> bool:
        """True if Dynamo traces, and may take the passes for one operation: they use no history, observer or rank."""
        used = (self.x_history, self.w_history, self.dy_history, self.observer, self.outer_observer, self.parallel)
        return torch.compiler.is_dynamo_compiling() and all(state is None for state in used)

    def mm(self, gemm: Gemm, a: QTensor, b: QTensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a [M, R] @ b [N, R]^T + bias [N], as `gemm` accumulates it."""
        fast, emulate = gemm.fast_accumulation, self.recipe.emulate
        return ops.scaled_mm(a, b, bias=bias, out_dtype=out_dtype, fast_accumulation=fast, emulate=emulate)


Call = LinearCall[Recipe]
FusedCall = LinearCall[FusableRecipe]


def rows(x: Any) -> Any:
    """x [..., K] as [T, K]; None for None.

    The sizes are not read: where they vary, compiled code may take a stride of dy for one in the backward pass.
    """
    return None if x is None else x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def shaped(y: Tensor, shape: torch.Size) -> Tensor:
    """y [T, N], which was computed here, as an output [..., N] for an input of `shape`. FSDP warns of a view."""
    return torch.ops.aten._unsafe_view(y, (*shape[:-1], y.shape[1]))


# ---- Layers as operations of PyTorch's dispatcher, for torch.compile.
#
# Dynamo traces an autograd function as Python code, forward and backward, in each layer, which takes it long. It does
# not trace into operations, so compiled code calls an operation in place of the function. AOTAutograd runs its code, so
# the graph that is compiled has the operations of the function. A string stands for the recipe (`Recipe.text`).
#
# A function that writes to a history of delayed scaling or to an observer is still traced. Both are written to in the
# backward pass too, where PyTorch would take them for saved tensors that may not change.


def composite(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the operation `octavo::` of this schema, and return what calls the operation."""
    return partial(define, schema, key="CompositeImplicitAutograd")


read_recipe = cache(Recipe.from_json)


# ---- A linear layer's forward and backward pass as three eight-bit GEMMs.


def linear(x: Tensor, w: Tensor, bias: Tensor | None, call: Call, cached: QTensor | None) -> Tensor:
    """y [..., N] = x [..., K] @ w [N, K]^T + bias [N], differentiable; `cached` is w, quantized, where it is held."""
    data, scale = (None, None) if cached is None else (cached.data, cached.scale)
    if call.is_operation:
        return _linear(x, w, bias, data, scale, call.recipe.text, call.dtype, call.input_is_saved)
    recorded = call.x_history, call.w_history, call.observer  # what these see of x and w does not depend on gradients
    call.has_backward = torch.is_grad_enabled() or any(each is not None for each in recorded)
    return _Linear.apply(x, w, bias, call, data, scale)  # type: ignore[no-untyped-call]


@composite(
    "linear(Tensor x, Tensor w, Tensor? bias, Tensor? w_data, Tensor? w_scale, "
    "str recipe, ScalarType dtype, bool input_is_saved) -> Tensor"
)
def _linear(*arguments: Any) -> Any:
    *tensors, w_data, w_scale, recipe, dtype, input_is_saved = arguments
    call = LinearCall(read_recipe(recipe), dtype, input_is_saved=input_is_saved, has_backward=torch.is_grad_enabled())
    return _Linear.apply(*tensors, call, w_data, w_scale)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call, w_data: Tensor | None, w_scale: Tensor | None
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2] if call.has_backward else (False, False)
        ctx.shape = x.shape
        x = rows(x)
        recipe = call.recipe
        # What y reads is quantized, and, where y runs in BF16 or is rotated, the bytes that the backward pass reads.
        shared = recipe.y is not None and "y" not in recipe.rotate
        x_q = w_q = held = None
        if w_data is not None and w_scale is not None and recipe.w is not None:
            held = QTensor(w_data, w_scale, recipe.w.fmt, recipe.w.granularity)
        if recipe.x is not None and (shared or (needs_w and recipe.quantizes_x_once)):
            x_q = _quantize(x, "x", recipe.x, call, call.x_history)
        backward_reads_w = (needs_x or needs_w) and recipe.quantizes_w_once and not _for_dx(w)
        if recipe.w is not None and (shared or backward_reads_w):
            w_q = _quantize(w, "w", recipe.w, call, call.w_history) if held is None else held
        read_x, read_w, a, b = x, w, x_q, w_q
        if recipe.y is not None and not shared:
            read_x, read_w = ops.rotate(x), w if _for_dx(w) else ops.rotate(w)
            a = _quantize(read_x, "x", recipe.y.a, call)
            b = held if _for_dx(w) else _quantize(read_w, "w", recipe.y.b, call)
        if recipe.y is None or a is None or b is None:
            y = F.linear(x.to(call.dtype), w.to(call.dtype), None if bias is None else bias.to(call.dtype))
        else:
            y = call.mm(recipe.y, a, b, call.dtype, bias)  # [T,K] @ [N,K]^T
        observe_xw(call.observer, "x", [read_x], a, [read_w], b, recipe, call.x_history, call.w_history)
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
        dy = rows(dy).contiguous()
        folded_s_w = s_w if _by_row(recipe.dx) else None
        folded_s_x = s_x if needs_w and recipe.quantizes_x_once and _by_row(recipe.dw) else None
        g = _quantize_dy(dy, folded_s_w, folded_s_x, call) if needs_x or needs_w else None
        scales = None if g is None or folded_s_x is None else ops.fold_scales(s_x, g.scale, folded_s_w)
        dx = dw = None
        if needs_x and recipe.dx is not None and "dx" in recipe.rotate:
            read_dy = ops.rotate(dy)
            a = _quantize(read_dy, "dy", recipe.dx.a, call)
            w_t = _quantize(ops.rotate(w.t(), dy), "w", recipe.dx.b, call)
            dx = call.mm(recipe.dx, a, w_t, call.dtype)  # [T,N] @ [K,N]^T
            observe_dy(call.observer, [read_dy], [dy.shape[1]], a, recipe.dy, s_w=None, s_x=None)
        else:
            if needs_x:
                dx_g = g if g is None or scales is None else rescaled(g, scales.dx)
                dx = _dx(dy, dx_g, w_data, s_w, w, call)
            observe_dy(
                call.observer, [dy], [dy.shape[1]], g, recipe.dy,
                history=call.dy_history, s_w=folded_s_w, s_x=folded_s_x,
            )  # fmt: skip
        dx = None if dx is None else dx.to(ctx.x_dtype).view(ctx.shape)
        if needs_w:
            dw = _dw(dy, g, x, s_x, scales, folded_s_w, w.dtype, call)
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None, None


def _quantize_rotated(t: Tensor, cast: Cast) -> QTensor:
    """The transpose of `t` [T, R], quantized as a rotated dw reads it: tokens times signs, and rotated along T."""
    return ops.quantize(ops.rotate(t.t() * scattered_signs(t.shape[0], t.device).to(t.dtype)), cast)


def _quantize(t: Tensor, operand: str, cast: Cast, call: Call, history: ScaleHistory | None = None) -> QTensor:
    """Quantize x, w or dy by the scale of the history, which records its amax.

    Without a scale there, the scale is that of the tensor's own amax: of the parts that ranks have of it together.
    Casting a weight again by the scale gives the same bytes.
    """
    is_part = call.parallel is not None and operand in call.parallel.parts and cast.granularity == TENSOR
    if history is None and not is_part:
        return ops.quantize(t, cast)
    if history is not None and history.ready:
        scale = history.scale
    else:
        scale = ops.quantize(t, cast).scale
        scale = call.parallel.ranks.largest(scale) if is_part else scale
    q, amax = ops.quantize_scaled(t, scale, cast)
    if history is None:
        return q
    history.observe(amax)
    # The bytes of a tensor that is not finite are NaN, which a scale from a history does not show.
    return replace(q, scale=torch.where(amax.isfinite(), q.scale, torch.nan)) if operand == "w" else q


def _by_row(gemm: Gemm | None) -> bool:
    """True if the second operand (w of dx, x of dw) has row scales, which lie along the reduction there."""
    return gemm is not None and gemm.b.by_row


def _saved_x(x: Tensor, x_q: QTensor | None, call: Call) -> tuple[Tensor, Tensor | None]:
    """x as dw needs it: x itself, its bytes and scales, or the bytes and scales of its transpose."""
    gemm = call.recipe.dw
    if call.recipe.exact_backward and x_q is not None:
        return x_q.data, x_q.scale
    if gemm is None:
        return x.to(call.dtype), None
    if call.recipe.quantizes_x_once and x_q is not None:
        return x if call.input_is_saved and gemm.b.rounding == "nearest" else x_q.data, x_q.scale
    x_t = _quantize_rotated(x, gemm.b) if "dw" in call.recipe.rotate else ops.quantize_transposed(x, gemm.b)
    return x_t.data, x_t.scale


def _saved_w(
    w_q: QTensor | None, cached: Tensor | None, recipe: Recipe, *, needs_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Bytes and scale of w for the backward pass, which has w itself too; None for those it can do without."""
    if w_q is not None and recipe.w is not None and recipe.quantizes_w_once:
        # Bytes rounded to nearest are, unless they are cached: then to save them takes no memory.
        computed_again = not needs_x or (cached is None and recipe.w.rounding == "nearest")
        return None if computed_again else w_q.data, w_q.scale
    return None, None


def _quantize_dy(dy: Tensor, s_w: Tensor | None, s_x: Tensor | None, call: Call) -> QTensor | None:
    """g as in `quantize_folded`, by the cast of dy; None where no GEMM reads it."""
    cast = call.recipe.dy
    for_dw = cast is not None and cast.bytes_serve_both and "dw" not in call.recipe.rotate
    if cast is None or not (for_dw or (call.recipe.dx is not None and "dx" not in call.recipe.rotate)):
        return None
    if s_w is None and s_x is None:
        return _quantize(dy, "dy", cast, call, call.dy_history)
    return quantize_folded(dy, s_w, s_x, cast)


def _for_dx(w: Tensor) -> tuple[Tensor, ...]:
    """The bytes and the scale of a weight that FSDP2 has gathered for dx apart from those for y; or nothing."""
    return w.for_dx if isinstance(w, GatheredWeight) else ()


def _dx(dy: Tensor, g: QTensor | None, w_data: Tensor | None, s_w: Tensor, w: Tensor, call: Call) -> Tensor:
    gemm, cast = call.recipe.dx, call.recipe.w
    if call.recipe.exact_backward and cast is not None:
        w_t = weight_transposed([w], w_data, s_w, cast, dy)
        wide = w_t.data.float() * s_w.t() if cast.by_row else w_t.dequantize()  # [K,N]
        return dy.to(call.dtype) @ wide.to(call.dtype).t()  # [T,N] @ [N,K]
    if g is None or gemm is None:
        return dy.to(call.dtype) @ w.to(call.dtype)  # [T,N] @ [N,K]
    if for_dx := _for_dx(w):
        data, scale = (ops.transpose(t, None, g.data) for t in for_dx)
        w_t = QTensor(data, scale, gemm.b.fmt, gemm.b.granularity)
    elif call.recipe.quantizes_w_once:
        w_t = weight_transposed([w], w_data, s_w, gemm.b, g.data)
    else:
        w_t = ops.quantize_transposed(w, gemm.b)
    return call.mm(gemm, g, w_t, call.dtype)  # [T,N] @ [K,N]^T


def _dw(
    dy: Tensor,
    g: QTensor | None,
    x: Tensor,
    s_x: Tensor,
    scales: ops.FoldedScales | None,
    s_w: Tensor | None,
    dtype: torch.dtype,
    call: Call,
) -> Tensor:
    recipe, gemm = call.recipe, call.recipe.dw
    if recipe.exact_backward and recipe.x is not None:
        x = QTensor(x, s_x, recipe.x.fmt, recipe.x.granularity).dequantize(call.dtype)
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
        dy_t = ops.quantize_transposed(dy, gemm.a)
    return call.mm(gemm, dy_t, x_t, dtype)  # [N,T] @ [K,T]^T
