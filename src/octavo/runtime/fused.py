"""A packed model with its norms and activations fused with quantization, as training fuses them (`octavo.nn.fused`).

    norm+linear   n_q = quantize(norm(x + residual));  q, k, v = n_q @ [w_q; w_k; w_v]^T
    MLP           n_q as above, or quantize(x);  u = n_q @ [w_gate; w_up]^T;  h_q = quantize(silu(gate) * up)
                  y = h_q @ w_down^T

This holds for layers of the schemes `channel`, `int8` and `weight`, in our models and in the decoder layers of
transformers that `octavo.nn.transformers_fusion` knows. All other layers run one by one, and so do these where autograd
records: the fused operations have no gradient. The operations and their order are those of training, so the packed
model of a run gives the same bits as the run. Where the GEMM is weight-only (`octavo.runtime.gemm_path`), PyTorch
computes norms and activations, and nothing is quantized.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kv_cache.served_attention import serve_attention
from octavo.nn import FusedMLP, NormLinear
from octavo.nn.fused_input import Norm, rows, wider_first
from octavo.nn.linear import compute_dtype
from octavo.nn.mixed_class import mix_classes
from octavo.nn.norm_linear import child, read_norm, watched
from octavo.nn.transformers_fusion import fuse_decoder_layers
from octavo.numerics import Cast, QTensor
from octavo.ops import activation_quantize, norm_quantize_inference, quantize
from octavo.runtime.packed_gradient import wants_gradient
from octavo.runtime.packed_linear import PackedLinear
from octavo.runtime.stacked_linear import PackedStack, stackable


class PackedNormLinear(NormLinear):
    stack: PackedStack

    def fused(self, x: Tensor, residual: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """`NormLinear.fused` with the packed weights; None if the layers cannot run fused."""
        norm, stack = read_norm(self.norm, backward=False), child(self, "stack")
        if x.numel() == 0 or norm is None or not stack.holds(self.linears) or wants_gradient(x, residual, *norm[1:]):
            return None
        total, n = _normed(x, residual, norm, stack.input_cast)
        y = stack(n, compute_dtype(x)).view(*x.shape[:-1], -1)
        return torch.split_with_sizes(y, stack.sizes, -1), x if residual is None else total.view(x.shape)


class PackedMLP(FusedMLP):
    """The class of `SwiGLU` and `GELU` when their layers are packed."""

    stack: PackedStack

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
        known, stack = None if norm is None else read_norm(norm, backward=False), child(self, "stack")
        unknown = norm is not None and known is None
        if x.numel() == 0 or unknown or not stack.holds(self.inner) or not _is_alone(self.outer):
            return None
        if wants_gradient(x, residual, *(() if known is None else known[1:])):
            return None
        cast = stack.input_cast
        if known is None:
            total = rows(x)
            n = total if cast is None else quantize(total, cast)
        else:
            total, n = _normed(x, residual, known, cast)
        u = stack(n, compute_dtype(x))  # [T,K] @ [2F,K]^T
        cast = self._outer.input_cast
        if cast is None:
            return total, self.activate(*torch.split_with_sizes(u, stack.sizes, -1))
        return total, activation_quantize(u, self.activation, cast)

    @property
    def _outer(self) -> PackedLinear:
        outer = self.outer
        assert isinstance(outer, PackedLinear)
        return outer

    def _last(self, h: QTensor | Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """y [..., K] from h [T, F], for x [..., K]; plus a residual [T, K]."""
        outer = self._outer
        y = outer.product(h, outer.packed_weight(), compute_dtype(x), residual)  # [T,F] @ [K,F]^T
        return y.view(*x.shape[:-1], -1)


def fuse(model: nn.Module) -> None:
    """Fuse the norms and MLPs of a packed model with the layers that they feed. A second call changes nothing.

    The layers' weights move into stacks on their device, so move the model to its device first.
    """
    fuse_decoder_layers(model)
    serve_attention(model)
    for module in list(model.modules()):
        if isinstance(module, NormLinear) and (layers := stackable(module.linears)) is not None:
            module.stack = PackedStack(layers)
            module.__class__ = PackedNormLinear
        elif (
            isinstance(module, FusedMLP) and _is_alone(module.outer) and (layers := stackable(module.inner)) is not None
        ):
            module.stack = PackedStack(layers)
            module.__class__ = mix_classes(PackedMLP, type(module))


def _is_alone(layer: nn.Module) -> bool:
    """Whether `layer` can take its input from a fused operation: its scheme is fused, and it has no hooks."""
    return isinstance(layer, PackedLinear) and layer.is_fusable and not watched(layer)


def _normed(x: Tensor, residual: Tensor | None, norm: Norm, cast: Cast | None) -> tuple[Tensor, QTensor | Tensor]:
    """x + residual [T, K], and its norm [T, K], cast by row if there is a cast."""
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
