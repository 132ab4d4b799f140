"""A linear layer that runs from its packed bytes.

    y[T,N] = x_q[T,K] @ weight[N,K]^T  * scales  + bias[N]

x is quantized when the layer is called, as its scheme says (`octavo.artifact.scheme`); the weight is never widened
where the machine has an FP8 GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octavo.artifact.packed import OTHER_DTYPE, WEIGHT_DTYPE
from octavo.artifact.scheme import Scheme
from octavo.numerics import TENSOR
from octavo.ops import scaled_mm


class PackedLinear(nn.Module):
    """x [..., K] to y [..., N] in x's dtype. For inference; any rank, zero rows included.

    Args:
        linear: the layer whose place it takes, for its sizes and its device.
        scheme: how it is packed.
        parts: the layers on disk that it holds, each with its own scale where there is one a tensor.

    Buffers:
        weight: e4m3 [N, K].
        weight_scale: as `scheme` says.
        input_scale: float32 [parts], all equal, where the scheme is static; or None.

    Where a scale is of a whole tensor, `merge_scales` makes one of those of all parts if they are equal.
        bias: bfloat16 [N], or None.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, scheme: Scheme, parts: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        n, k = linear.weight.shape
        with torch.device(linear.weight.device):
            self.register_buffer("weight", torch.empty(n, k, dtype=WEIGHT_DTYPE))
            self.register_buffer("weight_scale", scheme.empty_scale(n, k, parts))
            self.register_buffer("input_scale", torch.empty(parts) if scheme.static else None)
            self.register_buffer("bias", None if linear.bias is None else torch.empty(n, dtype=OTHER_DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        w_q = self.scheme.packed_weight(self.weight, self.weight_scale)
        x_q = self.scheme.quantized_input(x.reshape(-1, x.shape[-1]), self.input_scale, w_q)
        y = scaled_mm(x_q, w_q, bias=self.bias, out_dtype=x.dtype, fast_accumulation=True)  # [T,K] @ [N,K]^T
        return y.view(*x.shape[:-1], self.out_features)

    def merge_scales(self) -> None:
        """Let equal scales of several parts be one, so that the GEMM is that of one layer: of a tensor's scale."""
        scales = [scale for scale in (self.weight_scale, self.input_scale) if scale is not None]
        if self.scheme.weight.granularity == TENSOR and all(bool((scale == scale[0]).all()) for scale in scales):
            self.weight_scale = self.weight_scale[:1]
            self.input_scale = None if self.input_scale is None else self.input_scale[:1]

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, scheme={self.scheme.name}"


def swap_linears(model: nn.Module, packed: Mapping[str, tuple[Scheme, int]]) -> None:
    """Put an empty `PackedLinear`, of a scheme and so many parts, in the place of each named linear layer."""
    for name, (scheme, parts) in packed.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, PackedLinear(linear, scheme, parts))
