"""A linear layer that runs from its packed bytes: the y GEMM of the `rowwise` recipe, and nothing else.

    y[T,N] = x_q[T,K] @ weight[N,K]^T  * s_x[T] * weight_scale[N]  + bias[N]

x is quantized by row when the layer is called, by the cast that training used; the weight is never widened where the
machine has an FP8 GEMM.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from octavo.artifact.packed import OTHER_DTYPE, SCALE_DTYPE, WEIGHT_DTYPE
from octavo.numerics import ROW, QTensor
from octavo.ops import quantize, scaled_mm
from octavo.recipe import rowwise

FORWARD = rowwise().y


class PackedLinear(nn.Module):
    """x [..., K] to y [..., N] in x's dtype. For inference; any rank, zero rows included.

    Buffers:
        weight: e4m3 [N, K].
        weight_scale: float32 [N, 1]; w ≈ weight * weight_scale.
        bias: bfloat16 [N], or None.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=WEIGHT_DTYPE, device=device))
        self.register_buffer("weight_scale", torch.empty(out_features, 1, dtype=SCALE_DTYPE, device=device))
        self.register_buffer("bias", torch.empty(out_features, dtype=OTHER_DTYPE, device=device) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        assert FORWARD.x is not None
        assert FORWARD.w is not None
        x_q = quantize(x.reshape(-1, x.shape[-1]), FORWARD.x)
        w_q = QTensor(self.weight, self.weight_scale, FORWARD.w.fmt, ROW)
        y = scaled_mm(  # [T,K] @ [N,K]^T
            x_q, w_q, bias=self.bias, out_dtype=x.dtype, fast_accumulation=FORWARD.fast_accumulation
        )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def swap_linears(model: nn.Module, names: Iterable[str]) -> None:
    """Put an empty `PackedLinear` of the same sizes, on the same device, in the place of each named linear layer."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        packed = PackedLinear(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device=linear.weight.device
        )
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, packed)
