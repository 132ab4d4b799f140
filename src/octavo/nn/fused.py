"""A norm and the linear layers that it feeds, or a whole MLP, as one function, for `FusableRecipe`s.

Each operation that computes a GEMM's operand also quantizes it. A norm writes only the bytes of its output, and so does
an activation. The gradient of an activation is quantized in the pass that computes it. Tokens T, width K, F columns
inside the MLP:

    norm+linear   n_q = quantize(norm(x + residual));  y[T,N] = n_q @ w_q^T,  w of several layers stacked along N
    MLP           n_q as above, or quantize(x);  u[T,2F] = n_q @ w_in_q^T;  h_q = quantize(silu(gate) * up)
                  y[T,K] = h_q @ w_out_q^T
    backward      g_q from dy;  dh = g_q @ w_out_q;  du_q = quantize(activation'(u) * dh);  dn = du_q @ w_in_q
                  dx = norm'(dn) + the gradient of the residual stream

x + residual is computed in the norm's pass, and its gradient is added in the norm's backward pass. Saved for backward
are x + residual and u; the bytes of n, h and w are computed again. With `LinearCall.recompute` the bytes of n are saved
in place of u, which the same GEMM computes again. Where no weight is trained there is no dw, and low-rank adapters may
be added to the GEMMs.

Where several ranks each have a part of a layer, an `Exchange` sends operands and sums results between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from octavo import ops
from octavo.nn.linear_function import (
    FusedCall,
    LinearCall,
    composite,
    dw_operand,
    quantize_folded,
    read_recipe,
    rescaled,
    rows,
    scale_folded,
    shaped,
    transposed,
    weight_transposed,
)
from octavo.nn.module_tools import Adapter, differentiable_once
from octavo.nn.observer import observe_dy, observe_xw
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import Cast, QTensor
from octavo.ops.launching import Factors

# ---- Low-rank adapters around frozen layers (LoRA), in the passes of the layers.
#
#     u[T,R] = n @ A[R,K]^T               A of layers with one input stacked: q, k, v have one product, and gate, up
#     y[T,N] = n_q @ w_q^T + u @ B[N,R]^T           B block-diagonal over these layers, times alpha / r
#     dn     = g_q @ wT_q^T + du @ A,  du = dy @ B
#     dA     = du^T @ n;  dB = dy^T @ u
#
# Adapters read tensors that are there anyway. A norm without a mean is linear in its input, n = x * rstd * gamma, so
# A * gamma reads the residual stream x, which the norm saves. The last layer of an MLP quantizes its input h, and its
# adapter reads these bytes, which the backward pass of the activation computes again. That pass gives dy of gate and up
# in eight bits only, for dx, and their adapters read these. So adapters add R saved numbers a token for the backward
# pass.
#
# The products of adapters run in the dtype of the layer, as under autocast; their sums are float32.
#
# Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).


def is_frozen(layer: Any) -> bool:
    """True if no parameter of the layer is trained, and each is whole on this rank."""
    tensors = [t for t in (layer.weight, layer.bias) if t is not None]
    return not any(t.requires_grad or isinstance(t, GatheredWeight) or hasattr(t, "device_mesh") for t in tensors)


def reads(adapters: Sequence[Sequence[Adapter]], norm: tuple[Any, ...] | None, dtype: torch.dtype) -> bool:
    """True if the adapters, if there are any, can read the input of a `Norm` in `dtype`. They cannot with the mean of
    a layer norm, nor in float16, which the products of the residual stream may exceed."""
    centered = norm is not None and norm[0].center
    return not any(adapters) or not (centered or dtype == torch.float16)


Pair = tuple[Tensor | None, Tensor | None]  # A [R, K] and B [sum of N, R] of stacked layers; None twice for no adapters
NO_PAIR: Pair = (None, None)


def stack_adapters(layers: Sequence[Sequence[Adapter]], weights: Sequence[Tensor], dtype: torch.dtype) -> Pair:
    """The pair of layers with these weights [N, K], in `dtype` and differentiable."""
    if not any(layers):
        return NO_PAIR
    blocks = []
    for adapters, w in zip(layers, weights, strict=True):
        columns = [(each.b * each.scale).to(dtype) for each in adapters]
        blocks.append(torch.cat(columns, 1) if columns else w.new_empty((w.shape[0], 0), dtype=dtype))
    a = torch.cat([each.a.to(dtype) for adapters in layers for each in adapters])
    return a, blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)  # type: ignore[no-untyped-call]


# ---- The products with A and B. Without adapters A and B are None, and so are the results.


def read_input(x: Tensor, saved: Sequence[Tensor | None], a: Tensor | None) -> Tensor | None:
    """u [T, R] of the norm of x [T, K] that was `saved` (`FusedInput.read`), or of x without a norm."""
    if a is None:
        return None
    _, _, rstd, gamma, _ = saved
    if rstd is None or gamma is None:
        return x.to(a.dtype) @ a.t()  # [T,K] @ [R,K]^T
    return ((x.to(a.dtype) @ (a * gamma).to(a.dtype).t()) * rstd).to(a.dtype)


def read_gradient(du: Tensor | None, x: Tensor | None, saved: Sequence[Tensor]) -> Tensor | None:
    """dA [R, K] of `read_input`; x is None with a norm."""
    if du is None:
        return None
    if x is not None:
        return du.t() @ x.to(du.dtype)  # [T,R]^T @ [T,K]
    total, _, rstd, gamma, _ = saved
    return ((du * rstd).to(du.dtype).t() @ total.to(du.dtype) * gamma).to(du.dtype)


def output_gradients(dy: Tensor, u: Tensor | None, b: Tensor | None) -> Pair:
    """du [T, R] and dB [N, R] of dy [T, N]."""
    return NO_PAIR if u is None or b is None else (dy @ b, dy.t() @ u)  # [T,N] @ [N,R], [T,N]^T @ [T,R]


def read_bytes(q: QTensor, a: Tensor | None) -> Tensor | None:
    """u [T, R] of q [T, K] by row, from its bytes."""
    if a is None:
        return None
    if q.format.name == "e4m3":
        return ops.weight_only_mm(a, q).t().contiguous()  # ([R,K] @ [T,K]^T)^T
    return (q.data.to(a.dtype) @ a.t() * q.scale).to(a.dtype)  # [T,K] @ [R,K]^T


LARGEST_RANK = 128  # of adapters of one input: the weight-only kernel reads the bytes once more for each 128 rows


def bytes_gradient(q: QTensor, du: Tensor | None) -> Tensor | None:
    """dA [R, K] of `read_bytes`: the scales of q multiply du."""
    if du is None:
        return None
    du_t = (du * q.scale).to(du.dtype).t()
    if q.format.name == "e4m3" and len(du_t) <= LARGEST_RANK:  # three passes over bytes, and none over a BF16 copy
        return ops.weight_only_mm(du_t, scale_folded(ops.transpose(q.data)))  # [R,T] @ [K,T]^T
    return du_t @ q.data.to(du.dtype)  # [T,R]^T @ [T,K]


def bytes_output_gradients(g: QTensor, s_w: Tensor, u: Tensor | None, b: Tensor | None) -> Pair:
    """`output_gradients` of the bytes of dy * s_w [N, 1]^T."""
    if u is None or b is None:
        return NO_PAIR
    du = read_bytes(g, (b / s_w).to(b.dtype).t().contiguous())
    by_row = bytes_gradient(g, u)
    return du, None if by_row is None else (by_row.t() / s_w).to(b.dtype)


def add(y: Tensor, u: Tensor | None, b: Tensor | None) -> None:
    """y [T, N] += u [T, R] @ B [N, R]^T."""
    if u is not None and b is not None:
        ops.add_product(y, u, b)


# ---- What the ranks exchange that each have a part of a layer (`octavo.distributed.parallel_layers`).


Gradient = tuple[QTensor, ops.FoldedScales, Tensor]  # all rows of g, the scales for dw, and dx for `Exchange.arrived`


class Exchange:
    """The exchanges of a layer's three GEMMs. This one has none: one process has the whole layer.

    An exchange gathers the rows of all ranks for an operand, scatters the rows of a result, or takes the largest of the
    ranks' row scales. An operand is sent before other work of this rank, which then waits for it.
    """

    resends_x = False  # the bytes of x travel once more for dw, so they are saved

    # How a fused module reads its norm and its layers, and runs them where it cannot fuse them.

    def check(self, module: Any) -> None:
        """Raise a ValueError where the layers that read the input of `module` cannot be parallel in this way."""

    def read_norm(self, norm: Norm) -> Norm:
        """The norm with this rank's parameters."""
        return norm

    def stack(self, linears: Sequence[Any], cast: Cast, cache: Any) -> Stack:
        """This rank's parts of the layers, with the bytes that `cache` has for them."""
        weights = [linear.weight for linear in linears]
        return Stack(weights, [linear.bias for linear in linears], cache.get(weights, cast))

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """A part of the stacked outputs y for the input x [..., K], as [..., N]."""
        return y

    def input(self, norm: Any, x: Tensor) -> Tensor:
        """All rows of the norm of this rank's rows x; without a norm, of x."""
        return x if norm is None else norm(x)

    def run(self, linear: Any, x: Tensor) -> Tensor:
        """This rank's part of the output of a layer, for all rows x."""
        return linear(x)

    # The exchanges.

    def quantize_x(self, x: Tensor, cast: Cast) -> QTensor:
        return ops.quantize(x, cast)

    def quantize_activation(self, u: Tensor, kind: str, cast: Cast) -> QTensor:
        return ops.activation_quantize(u, kind, cast)

    def quantize_w(self, weights: Sequence[Tensor], cast: Cast) -> QTensor:
        """This rank's part of the weights, stacked along N, by the scales of the whole weights."""
        return ops.quantize_stack(weights, cast)

    def send_x(self, x_q: QTensor) -> Any:
        """x_q for `y`."""
        return x_q

    def y(self, x_q: Any, w_q: QTensor, bias: Tensor | None, call: FusedCall) -> tuple[Tensor, Tensor]:
        """The scales [T, 1] of all rows that the GEMM reads, and y = x_q @ w_q^T + bias; x_q is what `send_x` gave."""
        return x_q.scale, call.mm(call.recipe.y, x_q, w_q, call.dtype, bias)

    def own(self, s_x: Tensor) -> Tensor:
        """The row scales of x for the rows of dy."""
        return s_x

    def send_g(self, g: QTensor) -> Any:
        """g for `dx`."""
        return g

    def dx(self, g: Any, w_t: QTensor, s_x: Tensor, s_w: Tensor, call: FusedCall) -> Gradient:
        """The `Gradient` with dx = g @ w_t^T; g is what `send_g` gave."""
        scales = ops.fold_scales(s_x, g.scale, s_w)
        return g, scales, call.mm(call.recipe.dx, rescaled(g, scales.dx), w_t, call.dtype)

    def arrived(self, dx: Tensor) -> Tensor:
        return dx

    def send_bytes(self, x_data: Tensor | None, g: QTensor) -> Any:
        """The saved bytes of x for `x_transposed`; g is of the backward pass, in which they must travel."""
        return x_data

    def x_transposed(self, x_data: Any, g: QTensor) -> QTensor:
        """The bytes of all rows of x, transposed, for dw; x_data is what `send_bytes` gave."""
        return scale_folded(ops.transpose(x_data))


ALONE = Exchange()
Exchanges = tuple[Exchange, Exchange]  # of the inner layers of an MLP, and of the outer one

# ---- The input of fused layers: x + residual, its norm if there is one, and the bytes of that, forward and backward.


@dataclass(frozen=True)
class NormSpec:
    """A norm without its parameters: `center` distinguishes LayerNorm from RMSNorm."""

    eps: float
    center: bool


Norm = tuple[NormSpec, Tensor, Tensor | None]  # with weight [K] and bias [K]


Saved = tuple[Tensor | None, ...]  # x + residual, mean, rstd, gamma and beta of a norm; None five times without one


@dataclass(frozen=True)
class FusedInput:
    """The facts of the input of a fused layer: its norm, its shape and dtype, and whether it has a residual."""

    norm: NormSpec | None
    shape: torch.Size
    dtype: torch.dtype
    has_residual: bool

    def read(self, tensors: Sequence[Any], cast: Cast, exchange: Exchange) -> tuple[Tensor, QTensor, Saved]:
        """x + residual [T, K]; its norm, quantized, or without a norm x itself; and what the backward pass needs.

        The tensors are x [..., K] and residual [..., K], by `wider_first`, and gamma [K] and beta [K] of the norm.
        """
        x, residual, gamma, beta = tensors
        # Not before the autograd function: x and the residual get the same tensor as their gradient. Autograd must see
        # that it is the same, or accumulating into one leaf's gradient would change the other's.
        x, residual, norm = rows(x), rows(residual), self.norm
        if norm is None:
            return x, exchange.quantize_x(x, cast), (None,) * 5
        total, q, mean, rstd = ops.norm_quantize(x, residual, gamma, beta, norm.eps, cast, center=norm.center)
        return total, q, (total, mean, rstd, gamma, beta)

    def source(self, total: Tensor, saved: Saved) -> tuple[str, list[Tensor]]:
        """The kind and the tensors of `octavo.nn.observer.observe_xw`."""
        kind = "x" if self.norm is None else "center" if self.norm.center else "norm"
        return kind, [total] if self.norm is None else [t for t in saved if t is not None]

    def outputs(self, y: Tensor, total: Tensor, x_is_trained: bool) -> tuple[Tensor, ...]:
        """y [T, N] as [..., N] where it has the rows of x, and x + residual [..., K] where there is a residual.

        Without one, x itself may follow: the residual stream then takes it from here, and the backward pass of the norm
        adds the gradient of the stream.
        """
        y = shaped(y, self.shape) if len(y) == len(total) else y
        passes_x = self.norm is not None and x_is_trained
        return (y, shaped(total, self.shape)) if self.has_residual or passes_x else (y,)

    def transposed(
        self, sent: Any, g: QTensor, saved: Sequence[Any], scale: Tensor, cast: Cast, exchange: Exchange
    ) -> QTensor:
        """The bytes that were `sent`, transposed, without their `scale` [T, 1]; None computes those of a norm again."""
        if sent is not None:
            return exchange.x_transposed(sent, g)
        assert self.norm is not None
        total, mean, rstd, gamma, beta = saved
        mean = mean if self.norm.center else None
        return scale_folded(ops.requantize_norm(total, mean, rstd, gamma, beta, scale, cast))

    def gradients(self, dn: Tensor, dtotal: Tensor | None, saved: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The gradients of x, residual, gamma and beta, from dn [T, K] of the norm's output (of x if there is no norm),
        dtotal of x + residual, and what `read` saved."""
        if self.norm is None:
            return dn.to(self.dtype).view(self.shape), None, None, None
        total, mean, rstd, gamma, beta = saved
        dx, dgamma, dbeta = ops.norm_backward(dn, total, gamma, mean, rstd, rows(dtotal), self.norm.center)
        dx = dx.view(self.shape)
        return dx, dx if self.has_residual else None, dgamma, None if beta is None else dbeta.to(beta.dtype)


def wider_first(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and residual in such an order that the first has the dtype that PyTorch gives their sum."""
    if residual is None or residual.dtype == x.dtype:
        return x, residual
    wide = torch.promote_types(x.dtype, residual.dtype)
    return (residual, x) if residual.dtype == wide else (x.to(wide), residual)


# ---- Linear layers stacked along their outputs, to run as one GEMM.


@dataclass(frozen=True, eq=False)
class Stack:
    """The parameters of stacked layers."""

    weights: Sequence[Tensor]  # [N_i, K]
    biases: Sequence[Tensor | None]  # [N_i], or None for a layer without one
    cached: QTensor | None = None  # the quantized weights [sum of N_i, K], where `octavo.scales.cast_once` holds them

    def arguments(self) -> tuple[Tensor | None, ...]:
        """The tensors as arguments of an autograd Function, which `from_arguments` reads."""
        data, scale = (None, None) if self.cached is None else (self.cached.data, self.cached.scale)
        return data, scale, *self.weights, *self.biases

    @classmethod
    def from_arguments(cls, tensors: Sequence[Any], cast: Cast) -> Self:
        """The stack that gave these `arguments`; `cast` is that of the weights."""
        data, scale, *parameters = tensors
        half = len(parameters) // 2
        cached = None if data is None or scale is None else QTensor(data, scale, cast.fmt, cast.granularity)
        return cls(parameters[:half], parameters[half:], cached)

    def quantize(self, cast: Cast, exchange: Exchange) -> QTensor:
        """The quantized weights [sum of N_i, K]: those cached, or cast now."""
        return exchange.quantize_w(self.weights, cast) if self.cached is None else self.cached

    def bias(self) -> Tensor | None:
        """The biases [sum of N_i] as one, zeros where a layer has none; None where no layer has one."""
        given = [bias for bias in self.biases if bias is not None]
        if not given or len(self.biases) == 1:
            return given[0] if given else None
        pairs = zip(self.weights, self.biases, strict=True)
        parts = [given[0].new_zeros(w.shape[0]) if b is None else b for w, b in pairs]
        # Autocast of a CPU to BF16 joins no FP16, and the meta device has none.
        with torch.autocast("cpu" if given[0].is_meta else given[0].device.type, enabled=False):
            return torch.cat(parts)

    @property
    def bias_dtypes(self) -> BiasDtypes:
        return tuple(None if bias is None else bias.dtype for bias in self.biases)


BiasDtypes = tuple[torch.dtype | None, ...]  # of the layers of a stack, None for one without a bias


def bias_gradient(dy: Tensor, dtypes: BiasDtypes) -> Tensor:
    """The gradient of the stacked biases, float32 [sum of N_i], from dy [T, sum of N_i]; empty without biases."""
    return dy.sum(0, dtype=torch.float32) if any(dtypes) else dy.new_empty(0)


def stack_gradients(dw: Tensor, db: Tensor, weights: Sequence[Tensor], dtypes: BiasDtypes) -> tuple[Tensor | None, ...]:
    """The gradients of `Stack.arguments`, from stacked dw [sum of N_i, K] and db, as `bias_gradient` gives it."""
    sizes = [w.shape[0] for w in weights]
    biases: list[Tensor | None] = [None] * len(sizes)
    if any(dtypes):
        biases = [None if d is None else part.to(d) for part, d in zip(torch.split(db, sizes), dtypes, strict=True)]
    return None, None, *dw.split_with_sizes(sizes), *biases


def run_fused(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    inner: Stack,
    call: FusedCall,
    exchanges: Exchanges = (ALONE, ALONE),
    pairs: tuple[Pair, Pair] = (NO_PAIR, NO_PAIR),
    activation: str = "",
    outer: Stack | None = None,
) -> tuple[Tensor, Tensor]:
    """y [..., sum of N_i] of the stacked layers `inner`, and x + residual [..., K] (x itself without a residual).

    `norm` is of x + residual [..., K]; None feeds x itself to the layers. With an activation ("swiglu", "geglu" or
    "gelu", as in `octavo.ops.activation_quantize`), y is [..., K] of the layer `outer` after it. y is [T, sum of N_i]
    where an exchange changes the number of rows. `pairs` are those of the adapters of frozen layers, of the inner ones
    and of the outer one.
    """
    spec, gamma, beta = norm if norm is not None else (None, None, None)
    x, residual = wider_first(x, residual)
    after = (None,) * 4 if outer is None else outer.arguments()
    tensors, layers = (x, residual, gamma, beta, *pairs[0], *pairs[1]), (*after, *inner.arguments())
    if call.is_operation and exchanges[0] is ALONE:
        norm_constants = (None, False) if spec is None else (spec.eps, spec.center)
        result = _fused(*tensors, layers, *norm_constants, activation, call.recipe.text, call.dtype, call.recompute)
    else:
        result = _Fused.apply(call, exchanges, spec, activation, *tensors, *layers)  # type: ignore[no-untyped-call]
    y, *rest = result
    return y, rest[0] if rest else x


@composite(
    "fused(Tensor x, Tensor? residual, Tensor? gamma, Tensor? beta, Tensor? a_in, Tensor? b_in, Tensor? a_out, "
    "Tensor? b_out, Tensor?[] layers, float? eps, bool center, str activation, str recipe, ScalarType dtype, "
    "bool recompute) -> Tensor[]"
)
def _fused(*arguments: Any) -> Any:
    *tensors, layers, eps, center, activation, recipe, dtype, recompute = arguments
    fusable, norm = read_recipe(recipe).fusable, None if eps is None else NormSpec(eps, center)
    assert fusable is not None  # the layers were fused by it
    call = LinearCall(fusable, dtype, recompute=recompute)
    return _Fused.apply(call, (ALONE, ALONE), norm, activation, *tensors, *layers)  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: FusedCall, exchanges: Exchanges, norm: NormSpec | None, activation: str, *tensors: Any
    ) -> Any:
        recipe, (a_in, b_in, a_out, b_out), layers = call.recipe, tensors[4:8], tensors[8:]
        inner_exchange, outer_exchange = exchanges
        inner, outer = Stack.from_arguments(layers[4:], recipe.w), Stack.from_arguments(layers[:4], recipe.w)
        given = FusedInput(norm, tensors[0].shape, tensors[0].dtype, tensors[1] is not None)
        total, n_q, saved = given.read(tensors[:4], recipe.x, inner_exchange)
        sent = inner_exchange.send_x(n_q)
        w_in = inner.quantize(recipe.w, inner_exchange)
        w_out = outer.quantize(recipe.w, outer_exchange) if activation else None
        s_n, y = inner_exchange.y(sent, w_in, inner.bias(), call)  # [T,K] @ [N,K]^T, in an MLP N = 2F
        add(y, read_in := read_input(total, saved, a_in), b_in)  # [T,R] @ [N,R]^T
        observe_xw(call.observer, *given.source(total, saved), n_q, inner.weights, w_in, recipe)
        kept: tuple[Tensor | None, ...] = (None,) * 8
        if w_out is not None:
            u, h_q = y, outer_exchange.quantize_activation(y, activation, recipe.x)
            s_h, y = outer_exchange.y(outer_exchange.send_x(h_q), w_out, outer.bias(), call)  # [T,F] @ [K,F]^T
            add(y, read_out := read_bytes(h_q, a_out), b_out)  # [T,R] @ [K,R]^T
            observe_xw(call.outer_observer, activation, [u], h_q, outer.weights, w_out, recipe)
            kept = None if call.recompute else u, s_h, w_out.scale, layers[0], a_out, b_out, read_out, outer.weights[0]
        ctx.call, ctx.exchanges, ctx.input, ctx.activation = call, exchanges, given, activation
        ctx.inner_bias, ctx.outer_bias = inner.bias_dtypes, outer.bias_dtypes
        ctx.trained = any(ctx.needs_input_grad[12:])
        saves_n = call.recompute or (ctx.trained and (norm is None or inner_exchange.resends_x))
        again = (n_q.scale, inner.bias()) if call.recompute else (None, None)
        x = total if norm is None and a_in is not None else None
        kept_in = n_q.data if saves_n else None, s_n, w_in.scale, layers[4], a_in, b_in, read_in, x
        ctx.save_for_backward(*again, *kept_in, *kept, *saved, *inner.weights)
        return given.outputs(y, total, ctx.needs_input_grad[4])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        exchange: Exchange = ctx.exchanges[0]
        recipe = call.recipe
        s_own, bias, n_data, s_n, s_in, w_data, a, b, read, x, *rest = ctx.saved_tensors
        kept, saved, weights = rest[:8], rest[8:13], rest[13:]
        inner: Sequence[Tensor | None] = [None] * (2 + 2 * len(weights))
        dy, sizes = rows(dy.contiguous()), [w.shape[0] for w in weights]
        w_t = weight_transposed(weights, w_data, s_in, recipe.w, dy) if call.recompute else None
        if w_t is not None:
            n_q = QTensor(n_data, s_own, recipe.x.fmt, recipe.x.granularity)
            # Transposed again, these bytes follow from dy. By those of the forward pass compiled code would save u.
            again = exchange.send_x(n_q), QTensor(ops.transpose(w_t.data), s_in, w_t.format, w_t.granularity)
            _, kept[0] = exchange.y(*again, bias, call)  # u
            del again
            add(kept[0], read, b)
        if ctx.activation:
            g, db, pair_out, outer = _activation_backward(ctx, dy, kept, s_n, s_in, sizes)
            sent, dread = g, None
        else:
            pair_out, outer = NO_PAIR, (None,) * 4
            dread, db_pair = output_gradients(dy, read, b)
            if not (ctx.trained or any(ctx.needs_input_grad[4:8])):  # nothing before these adapters is trained
                return *[None] * 8, read_gradient(dread, x, saved), db_pair, *pair_out, *outer, *inner
            own_s_n = exchange.own(s_n)
            g = quantize_folded(dy, s_in, own_s_n, recipe.dy)
            sent = exchange.send_g(g)
            db = bias_gradient(dy, ctx.inner_bias) if ctx.trained else dy.new_empty(0)
            observe_dy(call.observer, [dy], sizes, g, recipe.dy, s_w=s_in, s_x=own_s_n)
        if w_t is None:
            w_t = weight_transposed(weights, w_data, s_in, recipe.w, g.data)
        sent_n = exchange.send_bytes(n_data, g)
        g, scales, dn = exchange.dx(sent, w_t, s_n, s_in, call)  # [T,N] @ [K,N]^T
        if ctx.activation:
            dread, db_pair = bytes_output_gradients(rescaled(g, scales.dx), s_in, read, b)
        add(dn, dread, None if a is None else a.t())  # [T,R] @ [K,R]^T
        pair = read_gradient(dread, x, saved), db_pair
        if ctx.trained:
            n_t = ctx.input.transposed(sent_n, g, saved, s_n, recipe.x, exchange)
            dw = call.mm(recipe.dw, dw_operand(g, scales), n_t, weights[0].dtype)  # [N,T] @ [K,T]^T
            inner = stack_gradients(dw, db, weights, ctx.inner_bias)
        gradients = ctx.input.gradients(exchange.arrived(dn), dtotal, saved)
        return *[None] * 4, *gradients, *pair, *pair_out, *outer, *inner


def _activation_backward(
    ctx: Any, dy: Tensor, kept: Sequence[Any], s_n: Tensor, s_in: Tensor, sizes: Sequence[int]
) -> tuple[QTensor, Tensor, Pair, Sequence[Tensor | None]]:
    """The bytes of the gradient of u, the sums of its columns, and the gradients of the outer layer's adapters and
    arguments. `kept` is what the forward pass has saved of this layer."""
    call: FusedCall = ctx.call
    exchange: Exchange = ctx.exchanges[1]
    recipe = call.recipe
    u, s_h, s_out, w_data, a, b, read, w = kept
    dread, db_pair = output_gradients(dy, read, b)
    own_s_h = exchange.own(s_h)
    g = quantize_folded(dy, s_out, own_s_h, recipe.dy)
    sent = exchange.send_g(g)
    observe_dy(call.outer_observer, [dy], [w.shape[0]], g, recipe.dy, s_w=s_out, s_x=own_s_h)
    w_t = weight_transposed([w], w_data, s_out, recipe.w, g.data)
    g, scales, dh = exchange.dx(sent, w_t, s_h, s_out, call)  # [T,K] @ [F,K]^T
    add(dh, dread, None if a is None else a.t())  # [T,R] @ [F,R]^T
    du, h_q, db, _ = ops.activation_backward(
        dh, u, ctx.activation, recipe.dy, Factors(s_in.t(), mantissa_of=s_n),
        h_cast=recipe.x, h_scale=s_h, biased=any(ctx.inner_bias),
    )  # fmt: skip
    kind = f"{ctx.activation}_gradient"
    observe_dy(call.observer, [dh, u], sizes, du, recipe.dy, kind, s_w=s_in, s_x=s_n)
    outer: Sequence[Tensor | None] = (None,) * 4
    if ctx.trained:
        dw = call.mm(recipe.dw, dw_operand(g, scales), transposed(h_q), w.dtype)  # [K,T] @ [F,T]^T
        outer = stack_gradients(dw, bias_gradient(dy, ctx.outer_bias), [w], ctx.outer_bias)
    return du, db, (bytes_gradient(h_q, dread), db_pair), outer
