"""Frozen layers and the low-rank adapters around them (LoRA), in the passes that fuse norms, layers and activations.

    u[T,R] = n @ A[R,K]^T               A of layers with one input stacked: q, k, v have one product, and gate, up
    y[T,N] = n_q @ w_q^T + u @ B[N,R]^T           B block-diagonal over these layers, times alpha / r
    g_q    = quantize(dy * s_w);  dn = g_q @ wT_q^T + du @ A,  du = dy @ B
    dA     = du^T @ n;  dB = dy^T @ u

The weights are constants: there is no dw, nothing is kept for it, and g needs no scale of n. What the adapters read is
there anyway. A norm without a mean is linear in its input, n = x * rstd * gamma, so A * gamma reads the residual stream
x, which the norm saves. The last layer of an MLP quantizes its input h, and its adapter reads these bytes, which the
backward pass of the activation computes again. That pass gives du of gate and up in eight bits only, for dx, and their
adapters read these. Saved for the backward pass are x + residual, u of an MLP's activation, and R numbers a token.

The products of adapters run in the dtype of the layer, as under autocast; their sums are float32.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import ops
from octavo.nn.fused import ALONE, FusedInput, Norm, NormSpec, Stack, read_fusable, rows, wider_first
from octavo.nn.linear_function import FusedCall, LinearCall, composite, quantize_folded, weight_transposed
from octavo.nn.module_tools import differentiable_once, watched
from octavo.nn.observer import observe_dy, observe_w, observe_x
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import QTensor

# ---- Adapters, and the layers that they wrap.


class Adapter(NamedTuple):
    """B(A(x)) * scale, which is added to the output of a layer."""

    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    scale: float


class AdaptedLayer(nn.Module):
    """A layer in adapters, as a library of adapters wraps it (`octavo.integrations.peft`)."""

    def parts(self) -> tuple[nn.Module, list[Adapter]] | None:
        """The layer and the adapters whose sum the output is; None where only `forward` computes it."""
        raise NotImplementedError


def parts_of_layer(module: nn.Module) -> tuple[nn.Module, list[Adapter]] | None:
    """`AdaptedLayer.parts`; another module is the layer itself. None too where the module or the layer is watched."""
    found = module.parts() if isinstance(module, AdaptedLayer) else (module, [])
    return None if found is None or watched(module) or watched(found[0]) else found


def is_frozen(layer: Any) -> bool:
    """True if no parameter of the layer is trained, and each is whole on this rank."""
    tensors = [t for t in (layer.weight, layer.bias) if t is not None]
    return not any(t.requires_grad or isinstance(t, GatheredWeight) or hasattr(t, "device_mesh") for t in tensors)


def reads(adapters: Sequence[Sequence[Adapter]], norm: Norm | None, dtype: torch.dtype) -> bool:
    """True if the adapters, if there are any, can read the input of `norm` in `dtype`: not with the mean of a layer
    norm, nor in float16, which the products of the residual stream may exceed."""
    centered = norm is not None and norm[0].center
    return not any(adapters) or not (centered or dtype == torch.float16)


def stack_adapters(layers: Sequence[Sequence[Adapter]], stack: Stack, dtype: torch.dtype) -> list[Tensor | None]:
    """A [R, K] and B [sum of N, R] of a stack of layers in `dtype`, differentiable; twice None without adapters."""
    if not any(layers):
        return [None, None]
    blocks = []
    for adapters, w in zip(layers, stack.weights, strict=True):
        columns = [(each.b * each.scale).to(dtype) for each in adapters]
        blocks.append(torch.cat(columns, 1) if columns else w.new_empty((w.shape[0], 0), dtype=dtype))
    a = torch.cat([each.a.to(dtype) for adapters in layers for each in adapters])
    return [a, blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)]  # type: ignore[no-untyped-call]


# ---- The products with A and B. Without adapters A, B and u are None, and so are results.


def _read(given: FusedInput, a: Tensor | None) -> Tensor | None:
    """u = n @ A^T [T, R]."""
    if a is None:
        return None
    _, _, rstd, gamma, _ = given.saved
    total = given.total.to(a.dtype)
    if rstd is None or gamma is None:
        return total @ a.t()  # [T,K] @ [R,K]^T
    return ((total @ (a * gamma).to(a.dtype).t()) * rstd).to(a.dtype)


def _read_gradient(du: Tensor | None, total: Tensor | None, saved: Sequence[Tensor]) -> Tensor | None:
    """dA [R, K] of `_read`; `total` is x, saved where there is no norm."""
    if du is None:
        return None
    if total is not None:
        return du.t() @ total.to(du.dtype)  # [T,R]^T @ [T,K]
    normed, _, rstd, gamma, _ = saved
    return ((du * rstd).to(du.dtype).t() @ normed.to(du.dtype) * gamma).to(du.dtype)


def _read_bytes(q: QTensor, a: Tensor | None) -> Tensor | None:
    """q @ A^T [T, R], from the bytes of q [T, K] by row."""
    if a is None:
        return None
    if q.format.name == "e4m3":
        return ops.weight_only_mm(a, q).t().contiguous()  # ([R,K] @ [T,K]^T)^T
    return (q.data.to(a.dtype) @ a.t() * q.scale).to(a.dtype)  # [T,K] @ [R,K]^T


def _bytes_gradient(q: QTensor, u: Tensor) -> Tensor:
    """q^T @ u [K, R], from the bytes of q [T, K] by row: the scales multiply u."""
    return q.data.to(u.dtype).t() @ (u * q.scale).to(u.dtype)  # [T,K]^T @ [T,R]


def _add(y: Tensor, u: Tensor | None, b: Tensor | None) -> None:
    """y [T, N] += u [T, R] @ B [N, R]^T."""
    if u is not None and b is not None:
        ops.add_product(y, u, b)


# ---- A norm and the frozen layers that it feeds.


def frozen_norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    stack: Stack,
    adapters: Sequence[Sequence[Adapter]],
    call: FusedCall,
) -> tuple[Tensor, Tensor]:
    """`octavo.nn.fused.norm_linear` of frozen layers with the `adapters` of each, none included."""
    spec, gamma, beta = norm if norm is not None else (None, None, None)
    x, residual = wider_first(x, residual)
    tensors = x, residual, gamma, beta, *stack_adapters(adapters, stack, call.dtype)
    if call.is_operation:
        constants = (None, False) if spec is None else (spec.eps, spec.center)
        result = _frozen_norm_linear(*tensors, stack.arguments(), *constants, call.recipe.text, call.dtype)
    else:
        result = _FrozenNormLinear.apply(call, spec, *tensors, *stack.arguments())  # type: ignore[no-untyped-call]
    y, *rest = result
    return y, rest[0] if rest else x


@composite(
    "frozen_norm_linear(Tensor x, Tensor? residual, Tensor? gamma, Tensor? beta, Tensor? a, Tensor? b, "
    "Tensor?[] layers, float? eps, bool center, str recipe, ScalarType dtype) -> Tensor[]"
)
def _frozen_norm_linear(*arguments: Any) -> Any:
    *tensors, layers, eps, center, recipe, dtype = arguments
    call, norm = LinearCall(read_fusable(recipe), dtype), None if eps is None else NormSpec(eps, center)
    return _FrozenNormLinear.apply(call, norm, *tensors, *layers)  # type: ignore[no-untyped-call]


class _FrozenNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: FusedCall, norm: NormSpec | None, *tensors: Any) -> Any:
        recipe, (a, b), layers = call.recipe, tensors[4:6], tensors[6:]
        stack = Stack.from_arguments(layers, recipe.w)
        given = FusedInput.of(norm, tensors[:4], recipe.x, ALONE)
        w_q = stack.quantize(recipe.w, ALONE)
        y = call.mm(recipe.y, given.q, w_q, call.dtype, stack.bias())  # [T,K] @ [N,K]^T
        u = _read(given, a)
        _add(y, u, b)
        observe_x(call.observer, *given.source, given.q, recipe.x)
        observe_w(call.observer, stack.weights, w_q, recipe.w)
        ctx.call, ctx.input = call, given.info
        total = given.total if norm is None and a is not None else None
        ctx.save_for_backward(total, a, b, u, layers[0], w_q.scale, *given.saved, *stack.weights)
        return given.outputs(y)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        recipe = call.recipe
        total, a, b, u, w_data, s_w, *rest = ctx.saved_tensors
        saved, weights = rest[:5], rest[5:]
        dy = rows(dy.contiguous())
        du, db = (None, None) if u is None else (dy @ b, dy.t() @ u)  # [T,N] @ [N,R], [T,N]^T @ [T,R]
        gradients: tuple[Tensor | None, ...] = (None,) * 4
        if any(ctx.needs_input_grad[2:6]):
            g = quantize_folded(dy, s_w, None, recipe.dy)
            observe_dy(call.observer, [dy], [w.shape[0] for w in weights], g, recipe.dy, s_w=s_w, s_x=None)
            w_t = weight_transposed(weights, w_data, s_w, recipe.w, g.data)
            dn = call.mm(recipe.dx, g, w_t, call.dtype)  # [T,N] @ [K,N]^T
            _add(dn, du, None if a is None else a.t())
            gradients = ctx.input.gradients(dn, dtotal, saved)
        da = _read_gradient(du, total, saved)
        return None, None, *gradients, da, db, None, None, *[None] * (2 * len(weights))


# ---- A whole MLP of frozen layers.


def frozen_mlp(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    activation: str,
    stacks: tuple[Stack, Stack],
    adapters: Sequence[Sequence[Adapter]],
    call: FusedCall,
) -> tuple[Tensor, Tensor]:
    """`octavo.nn.fused.mlp` of frozen layers with the `adapters` of each, the outer layer's last; `stacks` are those of
    the inner layers and of the outer one."""
    inner, outer = stacks
    spec, gamma, beta = norm if norm is not None else (None, None, None)
    x, residual = wider_first(x, residual)
    pairs = *stack_adapters(adapters[:-1], inner, call.dtype), *stack_adapters(adapters[-1:], outer, call.dtype)
    tensors, layers = (x, residual, gamma, beta, *pairs), (*outer.arguments(), *inner.arguments())
    if call.is_operation:
        constants = (None, False) if spec is None else (spec.eps, spec.center)
        result = _frozen_mlp(*tensors, layers, *constants, activation, call.recipe.text, call.dtype)
    else:
        result = _FrozenMLP.apply(call, spec, activation, *tensors, *layers)  # type: ignore[no-untyped-call]
    y, *rest = result
    return y, rest[0] if rest else x


@composite(
    "frozen_mlp(Tensor x, Tensor? residual, Tensor? gamma, Tensor? beta, Tensor? a_in, Tensor? b_in, Tensor? a_out, "
    "Tensor? b_out, Tensor?[] layers, float? eps, bool center, str activation, str recipe, ScalarType dtype) "
    "-> Tensor[]"
)
def _frozen_mlp(*arguments: Any) -> Any:
    *tensors, layers, eps, center, activation, recipe, dtype = arguments
    call, norm = LinearCall(read_fusable(recipe), dtype), None if eps is None else NormSpec(eps, center)
    return _FrozenMLP.apply(call, norm, activation, *tensors, *layers)  # type: ignore[no-untyped-call]


class _FrozenMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: FusedCall, norm: NormSpec | None, activation: str, *tensors: Any) -> Any:
        recipe, (a_in, b_in, a_out, b_out), layers = call.recipe, tensors[4:8], tensors[8:]
        outer, inner = Stack.from_arguments(layers[:4], recipe.w), Stack.from_arguments(layers[4:], recipe.w)
        given = FusedInput.of(norm, tensors[:4], recipe.x, ALONE)
        w_in, w_out = inner.quantize(recipe.w, ALONE), outer.quantize(recipe.w, ALONE)
        h_in = call.mm(recipe.y, given.q, w_in, call.dtype, inner.bias())  # [T,K] @ [2F,K]^T
        u_in = _read(given, a_in)
        _add(h_in, u_in, b_in)
        h_q = ops.activation_quantize(h_in, activation, recipe.x)
        y = call.mm(recipe.y, h_q, w_out, call.dtype, outer.bias())  # [T,F] @ [K,F]^T
        u_out = _read_bytes(h_q, a_out)
        _add(y, u_out, b_out)
        observe_x(call.observer, *given.source, given.q, recipe.x)
        observe_w(call.observer, inner.weights, w_in, recipe.w)
        observe_x(call.outer_observer, activation, [h_in], h_q, recipe.x)
        observe_w(call.outer_observer, outer.weights, w_out, recipe.w)
        ctx.call, ctx.input, ctx.activation = call, given.info, activation
        total = given.total if norm is None and a_in is not None else None
        pairs, scales = (a_in, b_in, u_in, a_out, b_out, u_out), (h_q.scale, w_in.scale, w_out.scale)
        bytes_and_weights = layers[4], layers[0], *outer.weights
        ctx.save_for_backward(total, h_in, *pairs, *scales, *bytes_and_weights, *given.saved, *inner.weights)
        return given.outputs(y)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        recipe = call.recipe
        total, h_in, a_in, b_in, u_in, a_out, b_out, u_out, *rest = ctx.saved_tensors
        s_h, s_in, s_out, in_data, out_data, w, *rest = rest
        saved, weights = rest[:5], rest[5:]
        dy = rows(dy.contiguous())
        du_out, db_out = (None, None) if u_out is None else (dy @ b_out, dy.t() @ u_out)  # [T,N] @ [N,R]
        g = quantize_folded(dy, s_out, None, recipe.dy)
        observe_dy(call.outer_observer, [dy], [w.shape[0]], g, recipe.dy, s_w=s_out, s_x=None)
        w_out_t = weight_transposed([w], out_data, s_out, recipe.w, g.data)
        dh = call.mm(recipe.dx, g, w_out_t, call.dtype)  # [T,K] @ [F,K]^T
        _add(dh, du_out, None if a_out is None else a_out.t())
        du, h_q, _ = ops.activation_backward(
            dh, h_in, ctx.activation, recipe.dy,
            column_scale=s_in.t(), row_scale=torch.ones_like(s_h), h_cast=recipe.x, h_scale=s_h, biased=False,
        )  # fmt: skip
        kind = f"{ctx.activation}_gradient"
        observe_dy(call.observer, [dh, h_in], [w.shape[0] for w in weights], du, recipe.dy, kind, s_w=s_in, s_x=None)
        da_out = None if du_out is None else _bytes_gradient(h_q, du_out).t()  # ([T,F]^T @ [T,R])^T
        du_in = db_in = None
        if u_in is not None:  # the bytes are those of the gradient times s_in
            du_in = _read_bytes(du, (b_in / s_in).to(b_in.dtype).t().contiguous())  # [T,2F] @ [2F,R]
            db_in = (_bytes_gradient(du, u_in) / s_in).to(b_in.dtype)  # [T,2F]^T @ [T,R]
        gradients: tuple[Tensor | None, ...] = (None,) * 4
        if any(ctx.needs_input_grad[3:7]):
            w_in_t = weight_transposed(weights, in_data, s_in, recipe.w, du.data)
            dn = call.mm(recipe.dx, du, w_in_t, call.dtype)  # [T,2F] @ [K,2F]^T
            _add(dn, du_in, None if a_in is None else a_in.t())
            gradients = ctx.input.gradients(dn, dtotal, saved)
        da_in = _read_gradient(du_in, total, saved)
        layers = [None] * (4 + 2 + 2 * len(weights))
        return None, None, None, *gradients, da_in, db_in, da_out, db_out, *layers
