"""A linear layer that computes with its packed weight.

    y[T,N] = x_q[T,K] @ weight[N,K]^T  * scales  + bias[N]

x is quantized in each call, as the scheme says (`octavo.checkpoint.scheme`), or keeps its dtype: where the GEMM is
weight-only, and for most rows by themselves (`is_row`). x has a gradient, the weight none.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.checkpoint.layouts import UNQUANTIZED_DTYPE
from octavo.checkpoint.scheme import CHANNEL, FUSED, STATIC, STATIC_INPUTS, WEIGHT, Scheme, input_cast, scheme_on
from octavo.inference.kv_cache import ModelKVCache
from octavo.nn import FusedMLP, NormLinear
from octavo.nn.fused import NO_PAIR, Norm, NormSpec, Stack, reads, run_fused, stack_adapters, wider_first
from octavo.nn.fused_modules import FusedModule, child, fuse_decoder_layers, is_fusable, read_norm
from octavo.nn.linear import ROUNDED, compute_dtype
from octavo.nn.linear_function import FusedCall, LinearCall, quantize_folded, rows, transposed
from octavo.nn.module_tools import (
    Adapter,
    PrecomputedProjections,
    ScaleBuffers,
    check_width,
    differentiable_once,
    mix_classes,
    mix_into,
    parts_of_layer,
    watched,
)
from octavo.numerics import ROW, TENSOR, Cast, QTensor, scale_from_amax
from octavo.ops import activation_quantize, norm_quantize_inference, quantize, quantize_scaled, scaled_mm
from octavo.ops.dispatch import MAX_SMALL_M
from octavo.ops.int8_gemm import int8_mm
from octavo.ops.launching import Around
from octavo.ops.weight_only import weight_only_mm
from octavo.recipe import BLOCK_X, ROW_X, rowwise
from octavo.util import cache_argument


class PackedModule(ScaleBuffers):
    """A module with eight-bit weights and their scales as buffers, which keep their dtypes. Otherwise `model.half()`
    would widen the weights and round the scales."""

    cast_with_model = ("bias",)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        errors: list[str] = args[-1]
        for name in self._buffers.keys() - self.cast_with_model:
            mine, given = self._buffers[name], state_dict.get(prefix + name)
            if mine is not None and given is not None and given.dtype != mine.dtype:
                errors.append(
                    f"{prefix}{name} must be {mine.dtype} {list(mine.shape)}, got {given.dtype} {list(given.shape)}"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


class PackedLinear(PackedModule):
    """x [..., K] to y [..., N] in x's dtype, or in that of autocast; any rank, zero rows included.

    Its sizes and device are those of the `linear` that it replaces, and messages call it `name`. Buffers: weight, e4m3
    or int8 [N, K]; weight_scale as `scheme` states; input_scale, float32 [1], of a static scheme; bias, bfloat16 [N].
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None
    _known: tuple[Tensor, Tensor, QTensor] | None = None

    def __init__(self, linear: Any, scheme: Scheme, name: str = "") -> None:
        super().__init__()
        self._layer_name = name
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        n, k = linear.weight.shape
        with torch.device(linear.weight.device):
            self.register_buffer("weight", torch.empty(n, k, dtype=scheme.weight.fmt.dtype))
            self.register_buffer("weight_scale", scheme.empty_scale(n, k))
            self.register_buffer("input_scale", torch.empty(1) if scheme.static else None)
            self.register_buffer("bias", None if linear.bias is None else torch.empty(n, dtype=UNQUANTIZED_DTYPE))

    @property
    def input_cast(self) -> Cast | None:
        """The cast of x on the device of the weight; None if x keeps its dtype."""
        weight: Any = self._buffers["weight"]
        return input_cast(self.scheme, weight.device)

    def forward(self, x: Tensor | PrecomputedProjections, residual: Tensor | None = None) -> Tensor:
        """y, plus a residual [..., N] of y's dtype where no gradient is computed."""
        if isinstance(x, PrecomputedProjections):
            return x.output_of(self)
        if not torch.compiler.is_compiling():
            check_width(self, x, (self.out_features, self.in_features))
        dtype = compute_dtype(x)
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features, dtype=dtype)
        w_q, alone = self.packed_weight(), self.scheme == CHANNEL and is_row(x)

        def product(x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            operand = rows if alone else self.operand(rows)
            added = None if residual is None else residual.reshape(-1, self.out_features)
            return packed_product(operand, w_q, self.bias, dtype, added).view(*x.shape[:-1], self.out_features)

        if not wants_gradient(x):
            return product(x)
        return PackedProduct.apply(x, w_q.data, w_q.scale, w_q, product, self.input_cast is None)  # type: ignore[no-untyped-call]

    def frozen(self, x: Tensor) -> tuple[Stack, FusedCall] | None:
        """The layer and its call for the input x, as `octavo.nn.fused` takes them; None unless its scheme is
        `channel` and the device has its GEMM."""
        if self.scheme != CHANNEL or self.input_cast is None:
            return None
        return Stack([self.weight], [self.bias], self.packed_weight()), packed_call(x)

    def operand(self, x: Tensor) -> QTensor | Tensor:
        """x [T, K] as the GEMM takes it: cast by its own amax or by the scale that is stored, or as it is."""
        cast = self.input_cast
        if cast is None:
            return x
        scale = self._buffers["input_scale"]
        return quantize(x, cast) if scale is None else quantize_scaled(x, scale.unsqueeze(1), cast)[0]

    def packed_weight(self) -> QTensor:
        """The weight [N, K], cached while the buffers are the same tensors: its checks take as long as a launch."""
        buffers: Any = self._buffers  # faster than by attribute, as in `octavo.nn.fused_modules.child`
        data, scale, known = buffers["weight"], buffers["weight_scale"], self._known
        if torch.compiler.is_compiling():
            return self.scheme.packed_weight(data, scale)
        if known is not None and known[0] is data and known[1] is scale:
            return known[2]
        with torch.inference_mode(False):  # a later call may save it for the backward pass
            made = self.scheme.packed_weight(data, scale)
        if made.scale.data_ptr() == scale.data_ptr():  # a copy would not see new numbers in the buffer
            self._known = data, scale, made
        return made

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._known = None  # it would hold the former buffers
        return super()._apply(fn, recurse)

    @property
    def freezable(self) -> bool:
        """True if the scale of the input is computed in each call."""
        return not self.scheme.static

    @property
    def input_limit(self) -> Tensor | None:
        """The largest magnitude of x, 0-dim, that the stored scale holds; None where the scale is not stored."""
        scale, cast = self.input_scale, self.scheme.inputs
        return None if scale is None or cast is None else scale.view(()) * cast.fmt.max * ROUNDED

    def freeze_input(self, amax: Tensor) -> Tensor:
        """Become a layer of the scheme static, whose scale of the input follows from `amax`, 0-dim; returns it, [1]."""
        if self.scheme.weight != STATIC.weight:
            q = quantize(self.packed_weight().dequantize(), STATIC.weight)
            self.weight, self.weight_scale = q.data, q.scale.reshape(1)
        self.scheme = STATIC
        self.input_scale = scale_from_amax(amax, STATIC_INPUTS.fmt).reshape(1).to(self.weight_scale.device)
        return self.input_scale.clone()

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, scheme={self.scheme.name}, frozen"


def is_row(x: Tensor) -> bool:
    """True for one row by itself, in BF16. Its product takes as long as reading the weight, so a cast to eight bits
    would only make it slower and less exact. (FP16 may overflow in SwiGLU, where the cast of float32 does not.)"""
    return x.numel() == x.shape[-1] and x.dtype == torch.bfloat16


def packed_product(
    x: QTensor | Tensor, w_q: QTensor, bias: Tensor | None, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """y [T, N] in `dtype` of the input x [T, K] and a packed weight [N, K]; weight-only if x is not quantized."""
    if isinstance(x, Tensor):
        return weight_only_mm(x.to(dtype), w_q, bias=bias, residual=residual)  # [T,K] @ [N,K]^T
    if w_q.format.name == "int8":
        return int8_mm(x, w_q, bias=bias, residual=residual, out_dtype=dtype)  # [T,K] @ [N,K]^T
    return scaled_mm(x, w_q, bias=bias, residual=residual, out_dtype=dtype, fast_accumulation=True)  # [T,K] @ [N,K]^T


def swap_linears(model: nn.Module, packed: Mapping[str, Scheme]) -> None:
    """Replace each named linear layer by an empty `PackedLinear` of its scheme."""
    for name, scheme in packed.items():
        model.set_submodule(name, PackedLinear(model.get_submodule(name), scheme, name))


# ---- The gradient of a packed layer's input, for training around packed weights: LoRA adapters, for example.
#
# The weight itself is a constant. dx[T,K] = dy[T,N] @ w[N,K] reads its bytes, transposed:
#
#     row or tensor scales   g = dy * s_w[N] -> g_q, s_g[T];  dx = g_q[T,N] @ wT_q[K,N]^T * s_g[T]
#     square blocks          dx = dy_q[T,N] @ wT_q[K,N]^T, each with the scales of its blocks
#     groups along K         dx = dy[T,N] @ w[N,K], with w widened: these scales vary along N too, and cannot be taken
#                            out of the sum
#     weight-only, INT8,     dx = dy[T,N] @ w[N,K], with w widened, of any scales
#     FNUZ
#
# s_w lies along the reduction, so it is folded into dy before dy is quantized, as in training
# (`octavo.nn.linear_function`). Layers of the scheme `channel` that run as one, and those in adapters, run as
# `octavo.nn.fused` says (`packed_call`).


_RECIPE: Any = rowwise().fusable


def packed_call(x: Tensor) -> FusedCall:
    """The call of frozen layers of the scheme `channel`, for the input x."""
    return LinearCall(_RECIPE, compute_dtype(x))


def wants_gradient(*tensors: Tensor | None) -> bool:
    """True if autograd records an operation on `tensors`."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class PackedProduct(torch.autograd.Function):
    """y of an input x [..., K], computed by `product(x)`, with the gradient of x. The weight is w [N, K].

    If the GEMM is `weight_only`, dy is not quantized either.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_data: Tensor, w_scale: Tensor, w: QTensor, product: Any, weight_only: bool
    ) -> Tensor:
        ctx.format, ctx.granularity, ctx.x_dtype, ctx.shape = w.format, w.granularity, x.dtype, x.shape
        ctx.weight_only = weight_only
        ctx.save_for_backward(w_data, w_scale)
        return product(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        data, scale = ctx.saved_tensors
        dy, w = rows(dy).contiguous(), QTensor(data, scale, ctx.format, ctx.granularity)
        if ctx.weight_only or w.format.name != "e4m3" or not (w.granularity.outer or w.granularity.transposes):
            dx = dy @ w.dequantize(dy.dtype)  # [T,N] @ [N,K]
        else:
            if w.granularity == TENSOR:
                w = QTensor(data, scale.expand(len(data), 1).contiguous(), w.format, ROW)
            g = quantize_folded(dy, w.scale, None, ROW_X) if w.granularity == ROW else quantize(dy, BLOCK_X)
            dx = scaled_mm(g, transposed(w), out_dtype=dy.dtype, fast_accumulation=True)  # [T,N] @ [K,N]^T
        return dx.to(ctx.x_dtype).view(ctx.shape), None, None, None, None, None


# ---- Packed layers in the format of AMD's MI300, E4M3FNUZ, whose GEMMs take no other.
#
# Its exponents are biased by one more than those of E4M3, so the same byte is half the number, and the scale is
# doubled:
#
#     data * scale = fnuz(data) * (2 * scale)        exact for every byte
#
# Two codes differ: FNUZ has no -0, whose code is its NaN, and E4M3's codes of NaN are numbers there. Nothing of this
# has run on an MI300.


def use_formats_of(model: nn.Module, device: torch.device) -> None:
    """Rewrite the packed layers of `model` in the format that the GEMMs of `device` take."""
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and (scheme := scheme_on(layer.scheme, device)) is not layer.scheme:
            layer.scheme = scheme
            layer.weight, layer.weight_scale = fnuz_data(layer.weight), 2 * layer.weight_scale
            layer.input_scale = None if layer.input_scale is None else 2 * layer.input_scale


def fnuz_data(data: Tensor) -> Tensor:
    """E4M3 data as E4M3FNUZ data of half the numbers; -0 becomes 0, and NaN stays NaN."""
    codes = data.view(torch.uint8)
    nan = codes & 0x7F == 0x7F
    codes = codes.masked_fill(codes == 0x80, 0).masked_fill(nan, 0x80)  # that is -0 in E4M3, and NaN in FNUZ
    return codes.view(torch.float8_e4m3fnuz)


# ---- Packed layers that read one input, as one GEMM: their weights lie in one buffer, stacked along N.
#
#     y[T, N_1 + N_2 + ...] = x[T,K] @ weight[N_1 + N_2 + ..., K]^T * s_w[N_1 + N_2 + ...]
#
# x is quantized by row, or not where the GEMM is weight-only. No weight is in memory twice: the weight, scale and bias
# of each layer are views of the stack, in the layer's own buffers (`state_dict`, `layer.weight`).


class Stacked:
    """The weights of packed layers with one input as one, made anew where a layer has other buffers than these views:
    after a move, a copy, or a state that was assigned."""

    weight: QTensor
    bias: Tensor | None
    cast: Cast | None  # of the input
    sizes: tuple[int, ...]  # N of each layer

    def __init__(self) -> None:
        self.views: list[Tensor | None] = []

    def __reduce__(self) -> Any:
        return Stacked, ()

    def update(self, modules: Sequence[nn.Module]) -> list[list[Adapter]] | None:
        """The adapters around each of `modules` if these run as one GEMM: packed layers of one scheme that is fused,
        without hooks. Compiled code does not stack: there, layers with other buffers run one by one."""
        parts = [found for found in map(parts_of_layer, modules) if found is not None]
        if len(parts) < len(modules):
            return None
        layers = [layer for layer, _ in parts if isinstance(layer, PackedLinear) and layer.scheme.name in FUSED]
        if len(layers) < len(modules) or len({layer.scheme.name for layer in layers}) > 1:
            self.__dict__ = {"views": []}
            return None
        views, adapters = _buffers_of(layers), [each for _, each in parts]
        if len(views) == len(self.views) and all(a is b for a, b in zip(views, self.views, strict=True)):
            return adapters
        if torch.compiler.is_compiling():
            return None
        with torch.inference_mode(False):  # a later call may save them for the backward pass
            self._stack(layers)
        return adapters

    def _stack(self, layers: Sequence[PackedLinear]) -> None:
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        data = torch.cat([w.view(torch.uint8) for w in weights])  # it lacks float8 dtypes on some devices
        scale = torch.cat([layer.weight_scale for layer in layers])
        self.weight = layers[0].scheme.packed_weight(data.view(weights[0].dtype), scale)
        self.bias = Stack(weights, biases).bias() if any(bias is not None for bias in biases) else None
        self.cast, self.sizes = layers[0].input_cast, tuple(map(len, weights))
        self.trains = self.cast is not None and layers[0].scheme == CHANNEL
        for layer, end in zip(layers, accumulate(self.sizes), strict=True):
            rows = slice(end - layer.out_features, end)
            layer.weight, layer.weight_scale = self.weight.data[rows], self.weight.scale[rows]
            layer.bias = None if layer.bias is None or self.bias is None else self.bias[rows]
        self.views = _buffers_of(layers)

    def stack(self) -> Stack:
        """The layers as `octavo.nn.fused` takes them."""
        return Stack(self.views[0::3], self.views[2::3], self.weight)  # type: ignore[arg-type]


def _buffers_of(layers: Sequence[PackedLinear]) -> list[Tensor | None]:
    return [layer._buffers[name] for layer in layers for name in ("weight", "weight_scale", "bias")]


# ---- A packed model whose norms and activations are fused with quantization, as in training (`octavo.nn.fused`).
#
# This holds for layers of the schemes `channel`, `int8` and `weight`, in our models and in the decoder layers of
# transformers that `octavo.architectures` names. All other layers run one by one. Where autograd records, and with
# adapters around them, layers of the scheme `channel` run as `octavo.nn.fused` says, others one by one. The
# operations and their order are those of training, so the packed model of a run gives the same bits as the run. Where
# the GEMM is weight-only, PyTorch computes norms and activations.
#
# One row by itself, a token of one text, is not cast in the schemes `channel` and `weight`. The kernels of its GEMMs
# (`octavo.ops.weight_only_mm`) compute norms and SwiGLU, and add the residual. With gradients PyTorch computes these.


class _OneInput(FusedModule):
    """A module whose layers are stacked. They are registered before it, so a move reaches them first."""

    stacked: Stacked

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.stacked.update(self.inner)
        return result


class PackedNormLinear(_OneInput, NormLinear):
    def fused(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """`NormLinear.fused` with the packed weights; None if the layers cannot run fused."""
        norm, stacked = read_norm(self.norm, backward=False), self.stacked
        adapters = None if x.numel() == 0 or norm is None else stacked.update(self.inner)
        if adapters is None or norm is None:
            return None
        alone = not any(adapters) and _is_alone(x, residual, norm, stacked)
        if any(adapters) or wants_gradient(x, residual, *norm[1:]):
            known = stacked.trains and read_norm(self.norm) is not None
            if alone or not known or not reads(adapters, norm, compute_dtype(x)):
                return None
            stack, call = stacked.stack(), packed_call(x)
            pair = stack_adapters(adapters, stack.weights, call.dtype)
            y, total = run_fused(x, residual, norm, stack, call, pairs=(pair, NO_PAIR))
            return torch.split_with_sizes(y, stacked.sizes, -1), total
        if alone:
            total, y = _row(x, residual, norm, stacked)
        else:
            total, n = _norm(x, residual, norm, stacked.cast)
            y = packed_product(n, stacked.weight, stacked.bias, compute_dtype(x))
        y = y.view(*x.shape[:-1], -1)
        return torch.split_with_sizes(y, stacked.sizes, -1), x if residual is None else total.view(x.shape)


class PackedMLP(_OneInput, FusedMLP):
    """The class of `SwiGLU` and `GELU` when their layers are packed."""

    def forward_residual(self, x: Tensor, norm: nn.Module, residual: Tensor | None = None) -> Tensor:
        found = self._hidden(x, norm, residual)
        if found is None or found[0].dtype != compute_dtype(x):
            return super().forward_residual(x, norm, residual)
        total, h = found
        return self._last(h, x, total)  # the GEMM adds

    def run(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        found = self._hidden(x, norm, residual)
        if found is None:
            return self._trained(x, norm, residual) or super().run(x, norm, residual)
        total, h = found
        return self._last(h, x), x if residual is None else total.view(x.shape)

    def _hidden(
        self, x: Tensor, norm: nn.Module | None, residual: Tensor | None
    ) -> tuple[Tensor, QTensor | Tensor] | None:
        """x + residual [T, K], and the input [T, F] of the last layer; None if the layers cannot run fused."""
        known, stacked = None if norm is None else read_norm(norm, backward=False), self.stacked
        outer: Any = self.outer
        alone = isinstance(outer, PackedLinear) and outer.scheme.name in FUSED and not watched(outer)
        adapters = stacked.update(self.inner) if alone and x.numel() else None
        if adapters is None or any(adapters) or (norm is not None and known is None):
            return None
        if wants_gradient(x, residual, *(() if known is None else known[1:])):
            return None
        gated = self.activation == "swiglu" and outer.scheme in (CHANNEL, WEIGHT)
        if gated and _is_alone(x, residual, known, stacked):
            return _row(x, residual, known, stacked, gated=True)
        total, n = _norm(x, residual, known, stacked.cast)
        u = packed_product(n, stacked.weight, stacked.bias, compute_dtype(x))  # [T,K] @ [2F,K]^T
        cast = outer.input_cast
        if cast is None:
            return total, self.activate(*torch.split_with_sizes(u, stacked.sizes, -1))
        return total, activation_quantize(u, self.activation, cast)

    def _trained(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """`run` where autograd records or layers have adapters; None if the layers cannot run fused."""
        known, outer = None if norm is None else read_norm(norm), parts_of_layer(self.outer)
        adapters = self.stacked.update(self.inner) if x.numel() else None
        layer = outer[0] if outer is not None and isinstance(outer[0], PackedLinear) else None
        found = None if layer is None else layer.frozen(x)
        if adapters is None or outer is None or found is None or (norm is not None and known is None):
            return None
        adapters = [*adapters, outer[1]]
        alone = not any(adapters) and self.activation == "swiglu" and _is_alone(x, residual, known, self.stacked)
        if alone or not self.stacked.trains or not reads(adapters, known, compute_dtype(x)):
            return None
        (last, call), stack = found, self.stacked.stack()
        inner_pair = stack_adapters(adapters[:-1], stack.weights, call.dtype)
        pairs = inner_pair, stack_adapters(adapters[-1:], last.weights, call.dtype)
        return run_fused(x, residual, known, stack, call, pairs=pairs, activation=self.activation, outer=last)

    def _last(self, h: QTensor | Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """y [..., K] from h [T, F], for x [..., K]; plus a residual [T, K]."""
        outer: Any = self.outer
        y = packed_product(h, outer.packed_weight(), outer.bias, compute_dtype(x), residual)  # [T,F] @ [K,F]^T
        return y.view(*x.shape[:-1], -1)


def fuse(model: nn.Module) -> None:
    """Fuse the norms and MLPs of a packed model with the layers that they feed. A second call changes nothing."""
    fuse_decoder_layers(model)
    serve_attention(model)
    for each in list[Any](model.modules()):
        if is_fusable(type(each), "RMSNorm"):
            mix_into(each, ServedNorm)
        elif isinstance(each, FusedModule) and not isinstance(each, _OneInput):
            stacked = Stacked()
            if stacked.update(each.inner) is not None:
                each.__class__ = mix_classes(PackedMLP, type(each)) if isinstance(each, FusedMLP) else PackedNormLinear
                each.stacked = stacked  # type: ignore[assignment]


class ServedNorm(nn.Module):
    """A norm of transformers that feeds no quantized layer: without gradients two operations in place of eight."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != self.weight.dtype:
            return super().forward(x)
        y = F.rms_norm(x, self.weight.shape, None, self.variance_epsilon)
        return self.weight * y.to(x.dtype)  # autocast widens y


def _is_alone(x: Tensor, residual: Tensor | None, norm: Norm | None, stacked: Stacked) -> bool:
    """True for one row that is not cast for the layers that read its norm: their GEMM computes the norm too."""
    alike = compute_dtype(x) == x.dtype and (residual is None or residual.dtype == x.dtype)
    w, center = stacked.weight, norm is not None and norm[0].center
    return is_row(x) and alike and not center and w.format.name == "e4m3" and w.granularity == ROW


def _row(
    x: Tensor, residual: Tensor | None, norm: Norm | None, stacked: Stacked, *, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """x + residual [1, K] of one row, and the outputs [1, sum of N] of layers that read its norm, or their SwiGLU."""
    how, gamma, _ = (NormSpec(0.0, center=False), None, None) if norm is None else norm
    total = rows(x if residual is None else x + residual)
    return total, weight_only_mm(total, stacked.weight, bias=stacked.bias, around=Around(gamma, how.eps, gated))


def _norm(x: Tensor, residual: Tensor | None, norm: Norm | None, cast: Cast | None) -> tuple[Tensor, QTensor | Tensor]:
    """x + residual [T, K], and its norm [T, K], cast by row if there is a cast. Without a norm, x itself twice."""
    if norm is None:
        x = rows(x)
        return x, x if cast is None else quantize(x, cast)
    how, gamma, beta = norm
    x, residual = wider_first(x, residual)
    x, residual = rows(x), rows(residual)
    if cast is not None:
        return norm_quantize_inference(x, residual, gamma, beta, how.eps, cast, center=how.center)
    total = x if residual is None else x + residual
    gamma, beta = gamma.to(x.dtype), None if beta is None else beta.to(x.dtype)
    if how.center:
        return total, F.layer_norm(total, gamma.shape, gamma, beta, how.eps)
    return total, F.rms_norm(total, gamma.shape, gamma, how.eps)


# ---- Attention modules of transformers that rotate and store with one kernel, if the cache is a `QuantizedKVCache`.
#
# transformers' own attention takes some ten kernels for the rotary embedding of a token. The classes below become
# subclasses with the same names: parameters, `state_dict`, hooks and `isinstance` stay as they are. With another cache,
# in training, in compiled code and wherever else the short way does not hold, the class's own forward runs.


def serve_attention(model: nn.Module) -> None:
    """Make the attention modules of known classes in `model` a `ServedAttention`; idempotent."""
    for served in list[Any](model.modules()):
        if not isinstance(served, ServedAttention) and is_fusable(type(served), "Attention"):
            served.__class__ = mix_classes(ServedAttention, type(served))
            served.cache_argument = cache_argument()


class ServedAttention(nn.Module):
    """An attention of transformers: projections, rotary embedding with the cache, attention, output projection."""

    cache_argument: str
    layer_idx: int
    head_dim: int
    scaling: float

    def forward(
        self,
        hidden_states: Tensor | PrecomputedProjections,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the class's own forward: hidden_states [B, T, K] to [B, T, K] and None."""
        passed: Any = kwargs.get(self.cache_argument)
        cache: Any = getattr(passed, "model_cache", None)
        norms = self._head_norms()
        if norms is None or not self._serves(cache, hidden_states, position_embeddings, attention_mask):
            return super().forward(
                hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
            )
        assert position_embeddings is not None
        q, k, v = (child(self, name)(hidden_states) for name in ("q_proj", "k_proj", "v_proj"))
        q, appended = cache.rotate_append(self.layer_idx, q, k, v, *position_embeddings, **norms)
        passed.layers[self.layer_idx].is_initialized = True
        first = None if attention_mask is None else attention_mask.flatten()
        y = appended.attend(q, first, self.scaling)  # [B, H, T, D]
        if cache.only_last and self.layer_idx == cache.layers - 1 and isinstance(hidden_states, PrecomputedProjections):
            y = y[:, :, -1:]
        batch, _, tokens, _ = y.shape
        y = y.reshape(batch, 1, -1) if tokens == 1 else y.transpose(1, 2).flatten(2)
        return self._project(y, hidden_states), None

    def _project(self, y: Tensor, x: Tensor | PrecomputedProjections) -> Tensor:
        """The output projection of y [B, T, H * D]; of few tokens plus x, which the decoder layer is told."""
        outer: Any = child(self, "o_proj")
        few = y.shape[:-1] == x.shape[:-1] and y.shape[:-1].numel() <= MAX_SMALL_M
        if isinstance(x, Tensor) or not (few and x.adds) or type(outer) is not PackedLinear or watched(outer):
            return outer(y)
        x.added = True
        return outer.forward(y, x.x)

    def _serves(
        self, cache: Any, x: Tensor | PrecomputedProjections, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> bool:
        return (
            isinstance(cache, ModelKVCache)
            and tables is not None
            and not (torch.is_grad_enabled() or self.training or torch.compiler.is_compiling())
            and (tables[0].dtype, tables[0].shape[-1]) == (x.dtype, self.head_dim)
            and 0 not in x.shape
            and (mask is None or (mask.dtype, *mask.shape[1:]) == (torch.int32, 1, 1, 1))
            and not torch.is_autocast_enabled(x.device.type)
        )

    def _head_norms(self) -> dict[str, Any] | None:
        """The norms of the heads as `rotate_append` takes them; None if they are of an unknown kind, or watched."""
        norms: list[Any] = [self._modules.get(name) for name in ("q_norm", "k_norm")]
        if norms == [None, None]:
            return {}
        if not all(is_fusable(type(norm), "RMSNorm") and not watched(norm) for norm in norms):
            return None
        q_norm, k_norm = norms
        return {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": q_norm.variance_epsilon}
