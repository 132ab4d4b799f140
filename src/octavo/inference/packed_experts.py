"""The experts of a mixture, computed with their packed matrices.

    x_q = quantize(x);  n_q = x_q[token of the row]         rows M, sorted by expert
    u[M,2F] = n_q @ w_in[e]^T;  h_q = quantize(silu(gate) * up);  y[M,K] = h_q @ w_out[e]^T
    out[t] = sum over s of weight[t,s] * y[row of slot s]

The operations of the scheme `channel`, and their order, are those of training (`octavo.nn.experts`). All
experts run as one grouped GEMM, of eight-bit inputs or weight-only (`octavo.inference.packed_linear`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import ops
from octavo.checkpoint.layouts import EXPERT_DTYPE
from octavo.checkpoint.scheme import CHANNEL, Scheme, input_cast
from octavo.inference.packed_linear import PackedModule, wants_gradient
from octavo.nn.experts import check_routing, plain_experts, rows_of
from octavo.nn.linear import compute_dtype
from octavo.nn.module_tools import differentiable_once
from octavo.numerics import ROW, TENSOR, Cast, QTensor
from octavo.ops import find_grouped_backend
from octavo.ops.grouped_gemm import ALIGNMENT
from octavo.recipe import ROW_X


class PackedGroupedLinear(PackedModule):
    """y[m] = x[m] @ w[e]^T for the rows m of expert e, with packed matrices of one scheme.

    Its sizes and device are those of the stack [E, N, K] that it replaces. Buffers: weight, e4m3 [E, N, K];
    weight_scale, [E, ...], by row where the scheme has one scale for a matrix; input_scale, float32 [E], None unless
    the scheme is static.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(self, weight: Tensor, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme
        self.stored = CHANNEL if scales_by_row(scheme) else scheme  # whose scales the stack has
        e, n, k = weight.shape
        scale = self.stored.empty_scale(n, k)
        with torch.device(weight.device):
            self.register_buffer("weight", torch.empty(e, n, k, dtype=EXPERT_DTYPE))
            self.register_buffer("weight_scale", torch.empty(e, *scale.shape, dtype=scale.dtype))
            self.register_buffer("input_scale", torch.empty(e) if scheme.static else None)

    @property
    def by_row(self) -> bool:
        """True if the input is cast by row, as the fused operations cast it."""
        return scales_by_row(self.scheme) and not self.scheme.static and self.input_cast is not None

    @property
    def input_cast(self) -> Cast | None:
        """The cast of x; None if it keeps its dtype."""
        return expert_input_cast(self.scheme, self.weight, self.weight.device)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """y [M, N] of x [M, K] in the dtype of x; `offsets` int32 [E]: where each group of rows ends."""
        cast = self.input_cast
        if cast is None:
            w = self.stored.packed_weight(self.weight, self.weight_scale)
            return ops.grouped_weight_only_mm(x, w, offsets)  # [M_e,K] @ [N,K]^T
        if self.input_scale is None:
            return self.product(ops.quantize(x, cast), offsets, x.dtype)
        expert = ops.group_of_rows(offsets, len(x)).clamp(max=len(offsets) - 1)
        return self.product(ops.requantize([x], self.input_scale[expert].unsqueeze(1), ROW_X), offsets, x.dtype)

    def product(self, x_q: QTensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """y [M, N] of the quantized input [M, K]."""
        w_q = self.stored.packed_weight(self.weight, self.weight_scale)
        return ops.grouped_mm(x_q, w_q, offsets, out_dtype=dtype, fast_accumulation=True)  # [M_e,K] @ [N,K]^T

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrices [E, N, K] as numbers."""
        matrices = zip(self.weight, self.weight_scale, strict=True)
        return torch.stack([self.stored.packed_weight(*matrix).dequantize(dtype) for matrix in matrices])

    def extra_repr(self) -> str:
        e, n, k = self.weight.shape
        return f"groups={e}, in_features={k}, out_features={n}, scheme={self.scheme.name}, frozen"


def scales_by_row(scheme: Scheme) -> bool:
    """True if the matrices of `scheme` are stacked with a scale for each row, instead of scales that vary along K."""
    return scheme.weight.granularity in (ROW, TENSOR)


def expert_input_cast(scheme: Scheme, weight: Tensor, device: torch.device) -> Cast | None:
    """The cast of the input of matrices [E, N, K] on `device`; None if it keeps its dtype, as where the device has no
    grouped GEMM of these sizes."""
    cast = input_cast(scheme, device)
    if cast is None or device.type != "cuda":
        return cast
    aligned = not any(size % ALIGNMENT for size in weight.shape[1:])
    granularities = (ROW, ROW) if scales_by_row(scheme) else (cast.granularity, scheme.weight.granularity)
    backend = find_grouped_backend(device, (cast.format, scheme.weight.format), *granularities)
    return cast if aligned and backend.name != "none" else None


class PackedExperts(nn.Module):
    """The experts of a layer: `octavo.nn.Experts`, or those of transformers with its parameters, when packed.

    The gradients of x and of the router's weights are those of the experts in high precision. The experts are not
    trained.
    """

    def __init__(self, gate_up_proj: PackedGroupedLinear, down_proj: PackedGroupedLinear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `octavo.nn.Experts.forward`."""
        x, weight = hidden_states, top_k_weights
        check_routing(x, top_k_index, weight)
        if x.numel() == 0:
            return x.to(compute_dtype(x))
        if not wants_gradient(x, weight):
            return self.compute(x, top_k_index, weight)
        return _FrozenExperts.apply(x, weight, top_k_index, self)  # type: ignore[no-untyped-call]

    def compute(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        rows, dtype = ops.sort_by_expert(index, len(self.down_proj.weight)), compute_dtype(x)
        inner, token = self.gate_up_proj, rows.slot // rows.row.shape[1]
        if inner.scheme.static or (cast := inner.input_cast) is None:
            u = inner(x.to(dtype)[token], rows.offsets)  # [M,2F]
        else:  # a token has the same bytes for all its experts
            x_q = ops.quantize(x if inner.by_row else x.to(dtype), cast)
            u = inner.product(rows_of(x_q, token), rows.offsets, dtype)
        if self.down_proj.by_row:
            h_q = ops.activation_quantize(u, "swiglu", ROW_X)
            y = self.down_proj.product(h_q, rows.offsets, u.dtype)
        else:
            gate, up = u.chunk(2, 1)
            y = self.down_proj(F.silu(gate) * up, rows.offsets)
        return ops.combine(y, rows.row, weight.float())


class _FrozenExperts(torch.autograd.Function):
    """The packed experts, with the gradients of x and of the router's weights by their widened matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, index: Tensor, experts: PackedExperts) -> Tensor:
        ctx.save_for_backward(x, weight, index)
        ctx.experts = experts
        return experts.compute(x, index, weight)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, index = ctx.saved_tensors
        experts: PackedExperts = ctx.experts
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        w_in, w_out = (m.dequantize(dout.dtype) for m in (experts.gate_up_proj, experts.down_proj))
        with torch.enable_grad():
            out = plain_experts(leaves[0].to(dout.dtype), leaves[1], ops.sort_by_expert(index, len(w_out)), w_in, w_out)
        dx, dweight = torch.autograd.grad(out, leaves, dout)
        return dx, dweight, None, None
