"""The gradient of a packed layer's input, for training around packed weights: LoRA adapters, for example.

The weight itself is a constant. dx[T,K] = dy[T,N] @ w[N,K] reads its bytes, transposed:

    row or tensor scales   g = dy * s_w[N] -> g_q, s_g[T];  dx = g_q[T,N] @ wT_q[K,N]^T * s_g[T]
    square blocks          dx = dy_q[T,N] @ wT_q[K,N]^T, each with the scales of its blocks
    groups along K         dx = dy[T,N] @ w[N,K], with w widened: these scales vary along N too, and cannot be taken
                           out of the sum
    weight-only, INT8,     dx = dy[T,N] @ w[N,K], with w widened, of any scales
    FNUZ

s_w lies along the reduction, so it is folded into dy before dy is quantized, as in training
(`octavo.nn.linear_function`).
Layers of the scheme `channel` that run as one, and those in adapters, run as `octavo.nn.fused` says (`packed_call`).
"""

from typing import Any

import torch
from torch import Tensor

from octavo.nn.linear import compute_dtype
from octavo.nn.linear_function import FusedCall, LinearCall, quantize_folded, rows, transposed
from octavo.nn.module_tools import differentiable_once
from octavo.numerics import ROW, TENSOR, QTensor
from octavo.ops import quantize, scaled_mm
from octavo.recipe import BLOCK_X, ROW_X, rowwise

_RECIPE = rowwise().fusable


def packed_call(x: Tensor) -> FusedCall:
    """The call of frozen layers of the scheme `channel`, for the input x."""
    assert _RECIPE is not None
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
