"""A packed model with its norms and activations fused with quantization, as training fuses them (`octavo.nn.fused`).

    norm+linear   n_q = quantize(norm(x + residual));  q, k, v = n_q @ [w_q; w_k; w_v]^T
    MLP           n_q as above, or quantize(x);  u = n_q @ [w_gate; w_up]^T;  h_q = quantize(silu(gate) * up)
                  y = h_q @ w_down^T

This holds for layers of the schemes `channel`, `int8` and `weight`, in our models and in the decoder layers of
transformers that `octavo.architectures` names. All other layers run one by one, and so do these where autograd
records: the fused operations have no gradient. The operations and their order are those of training, so the packed
model of a run gives the same bits as the run. Where the GEMM is weight-only (`octavo.inference.packed_linear`), PyTorch
computes norms and activations, and nothing is quantized.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.inference.kv_cache import ModelKVCache
from octavo.inference.packed_linear import PackedLinear, packed_product, wants_gradient
from octavo.nn import FusedMLP, NormLinear
from octavo.nn.fused import Norm, Stack, rows, wider_first
from octavo.nn.fused_modules import child, fuse_decoder_layers, is_fusable, read_norm, watched
from octavo.nn.linear import compute_dtype
from octavo.nn.module_tools import PrecomputedProjections, mix_classes
from octavo.numerics import Cast, QTensor
from octavo.ops import activation_quantize, norm_quantize_inference, quantize

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

    def update(self, modules: Sequence[nn.Module]) -> bool:
        """Whether `modules` run as one GEMM: packed layers of one scheme that is fused, without hooks. Compiled code
        does not stack: there, layers with other buffers run one by one."""
        if any(map(watched, modules)):
            return False
        layers = [layer for layer in modules if isinstance(layer, PackedLinear) and layer.is_fusable]
        if len(layers) < len(modules) or len({layer.scheme.name for layer in layers}) > 1:
            self.__dict__ = {"views": []}
            return False
        views = [layer._buffers[name] for layer in layers for name in _STACKED]
        if len(views) == len(self.views) and all(a is b for a, b in zip(views, self.views, strict=True)):
            return True
        if torch.compiler.is_compiling():
            return False
        with torch.inference_mode(False):  # a later call may save them for the backward pass
            self._stack(layers)
        return True

    def _stack(self, layers: Sequence[PackedLinear]) -> None:
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        data = torch.cat([w.view(torch.uint8) for w in weights])  # it lacks float8 dtypes on some devices
        scale = torch.cat([layer.weight_scale for layer in layers])
        self.weight = layers[0].scheme.packed_weight(data.view(weights[0].dtype), scale)
        self.bias = Stack(weights, biases).bias()
        self.cast, self.sizes = layers[0].input_cast, tuple(map(len, weights))
        for layer, end in zip(layers, accumulate(self.sizes), strict=True):
            rows = slice(end - layer.out_features, end)
            layer.weight, layer.weight_scale = self.weight.data[rows], self.weight.scale[rows]
            layer.bias = None if layer.bias is None or self.bias is None else self.bias[rows]
        self.views = [layer._buffers[name] for layer in layers for name in _STACKED]

    def product(self, x: QTensor | Tensor, dtype: torch.dtype) -> Tensor:
        """y [T, sum of N] of x [T, K], cast by `cast`."""
        return packed_product(x, self.weight, self.bias, dtype)  # [T,K] @ [sum N,K]^T


_STACKED = ("weight", "weight_scale", "bias")


def is_alone(layer: nn.Module) -> bool:
    """Whether `layer` can take its input from a fused operation: its scheme is fused, and it has no hooks."""
    return isinstance(layer, PackedLinear) and layer.is_fusable and not watched(layer)


# ---- A packed model with its norms and activations fused with quantization, as training fuses them
# (`octavo.nn.fused`).


class _OneInput(nn.Module):
    """A module whose layers are stacked. They are registered before it, so a move reaches them first."""

    stacked: Stacked

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.stacked.update(_layers_of(self))
        return result


def _layers_of(module: Any) -> Sequence[nn.Module]:
    """The layers that read the input of a module that is fused."""
    layers: Sequence[nn.Module] = module.inner if isinstance(module, FusedMLP) else module.linears
    return layers


class PackedNormLinear(_OneInput, NormLinear):
    def fused(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """`NormLinear.fused` with the packed weights; None if the layers cannot run fused."""
        norm, stacked = read_norm(self.norm, backward=False), self.stacked
        if x.numel() == 0 or norm is None or not stacked.update(self.linears) or wants_gradient(x, residual, *norm[1:]):
            return None
        total, n = _normed(x, residual, norm, stacked.cast)
        y = stacked.product(n, compute_dtype(x)).view(*x.shape[:-1], -1)
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
            return super().run(x, norm, residual)
        total, h = found
        return self._last(h, x), x if residual is None else total.view(x.shape)

    def _hidden(
        self, x: Tensor, norm: nn.Module | None, residual: Tensor | None
    ) -> tuple[Tensor, QTensor | Tensor] | None:
        """x + residual [T, K], and the input [T, F] of the last layer; None if the layers cannot run fused."""
        known, stacked = None if norm is None else read_norm(norm, backward=False), self.stacked
        unknown = norm is not None and known is None
        if x.numel() == 0 or unknown or not is_alone(self.outer) or not stacked.update(self.inner):
            return None
        if wants_gradient(x, residual, *(() if known is None else known[1:])):
            return None
        total, n = _normed(x, residual, known, stacked.cast)
        u = stacked.product(n, compute_dtype(x))  # [T,K] @ [2F,K]^T
        outer: Any = self.outer
        cast = outer.input_cast
        if cast is None:
            return total, self.activate(*torch.split_with_sizes(u, stacked.sizes, -1))
        return total, activation_quantize(u, self.activation, cast)

    def _last(self, h: QTensor | Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """y [..., K] from h [T, F], for x [..., K]; plus a residual [T, K]."""
        outer: Any = self.outer
        y = packed_product(h, outer.packed_weight(), outer.bias, compute_dtype(x), residual)  # [T,F] @ [K,F]^T
        return y.view(*x.shape[:-1], -1)


def fuse(model: nn.Module) -> None:
    """Fuse the norms and MLPs of a packed model with the layers that they feed. A second call changes nothing."""
    fuse_decoder_layers(model)
    serve_attention(model)
    for module in list(model.modules()):
        stacked = Stacked()
        if not isinstance(module, NormLinear | FusedMLP) or isinstance(module, _OneInput):
            continue
        if stacked.update(_layers_of(module)):
            fused: Any = module
            fused.__class__ = mix_classes(PackedMLP, type(module)) if isinstance(module, FusedMLP) else PackedNormLinear
            fused.stacked = stacked


def _normed(
    x: Tensor, residual: Tensor | None, norm: Norm | None, cast: Cast | None
) -> tuple[Tensor, QTensor | Tensor]:
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


# ---- Attention modules of transformers that rotate and store with one kernel, where their cache is a
# `QuantizedKVCache`.
#
# transformers' own attention takes some ten kernels for the rotary embedding of a token. The classes below become
# subclasses with the same names: parameters, `state_dict`, hooks and `isinstance` stay as they are. With another cache,
# in training, in compiled code and wherever else the short way does not hold, the class's own forward runs.


def serve_attention(model: nn.Module) -> None:
    """Make the attention modules of known classes in `model` a `ServedAttention`; idempotent."""
    for module in list(model.modules()):
        if not isinstance(module, ServedAttention) and is_fusable(type(module).__name__, "Attention"):
            module.__class__ = mix_classes(ServedAttention, type(module))


class ServedAttention(nn.Module):
    """An attention of transformers: projections, rotary embedding with the cache, attention, output projection."""

    layer_idx: int
    head_dim: int
    scaling: float

    def forward(
        self,
        hidden_states: Tensor | PrecomputedProjections,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As the class's own forward: hidden_states [B, T, K] to [B, T, K] and None."""
        cache: Any = getattr(past_key_values, "model_cache", None)
        norms = self._head_norms()
        if norms is None or not self._serves(cache, hidden_states, position_embeddings, attention_mask):
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        assert position_embeddings is not None
        q, k, v = (child(self, name)(hidden_states) for name in ("q_proj", "k_proj", "v_proj"))
        q, appended = cache.rotate_append(self.layer_idx, q, k, v, *position_embeddings, **norms)
        past_key_values.layers[self.layer_idx].is_initialized = True
        first = None if attention_mask is None else attention_mask.flatten()
        y = appended.attend(q, first, self.scaling)  # [B, H, T, D]
        batch, _, tokens, _ = y.shape
        y = y.reshape(batch, 1, -1) if tokens == 1 else y.transpose(1, 2).flatten(2)
        return child(self, "o_proj")(y), None

    def _serves(
        self, cache: Any, x: Tensor | PrecomputedProjections, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> bool:
        if not isinstance(cache, ModelKVCache) or tables is None:
            return False
        if torch.is_grad_enabled() or self.training or torch.compiler.is_compiling():
            return False
        return (
            (tables[0].dtype, tables[0].shape[-1]) == (x.dtype, self.head_dim)
            and 0 not in x.shape
            and (mask is None or (mask.dtype, *mask.shape[1:]) == (torch.int32, 1, 1, 1))
            and not torch.is_autocast_enabled(x.device.type)
        )

    def _head_norms(self) -> dict[str, Any] | None:
        """The norms of the heads as `rotate_append` takes them; None if they are of an unknown kind, or watched."""
        norms: list[Any] = [self._modules.get(name) for name in ("q_norm", "k_norm")]
        if norms == [None, None]:
            return {}
        if not all(is_fusable(type(norm).__name__, "RMSNorm") and not watched(norm) for norm in norms):
            return None
        q_norm, k_norm = norms
        return {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": q_norm.variance_epsilon}
