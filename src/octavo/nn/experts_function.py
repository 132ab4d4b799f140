"""The experts of a layer as one function: rows sorted by expert, two grouped GEMMs around SwiGLU, and sorted back.

Tokens T, each with top_k experts; rows M = T * top_k; width K, F columns inside an expert:

    n_q = quantize(x[token of the row])                      one pass
    u[M,2F] = n_q @ w_in_q[e]^T;  h_q = quantize(silu(gate) * up);  y[M,K] = h_q @ w_out_q[e]^T
    out[t] = sum over s of weight[t,s] * y[row of slot s]    one pass
    backward    g_q = quantize(dout[token] * weight * s_out[e] * m_h), one pass
                dh = g_q @ w_out_q[e];  du_q = quantize(activation'(u) * dh);  dn = du_q @ w_in_q[e]
                dx[t] = sum over s of dn[row of slot s]

The backward pass of a grouped GEMM is that of `octavo.nn.grouped_function`. Saved are u and y in high precision and the
bytes of n; the bytes of h and w are computed again.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.nn.grouped_function import (
    gathered,
    groups_of,
    multiply,
    observe_matrices,
    quantized,
    weight_gradient,
    weights_transposed,
)
from octavo.nn.layer_limits import differentiable_once
from octavo.nn.linear_call import FusedCall
from octavo.nn.observer import observe_group
from octavo.nn.scale_folding import dx_operand, mantissa
from octavo.ops import (
    Rows,
    activation_backward,
    activation_quantize,
    combine,
    combine_weight_gradient,
    gather_quantize,
)


def experts_mlp(x: Tensor, weight: Tensor, rows: Rows, w_in: Tensor, w_out: Tensor, call: FusedCall) -> Tensor:
    """out [T, K] of x [T, K], differentiable.

    Args:
        weight: [T, top_k], of each expert's output.
        rows: of `octavo.ops.sort_by_expert`.
        w_in, w_out: [E, 2F, K], the rows of gate before those of up, and [E, K, F].
    """
    arguments = x, weight, w_in, w_out, *rows, call, *gathered(w_in), *gathered(w_out)
    out: Tensor = _Experts.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        slot: Tensor,
        row: Tensor,
        offsets: Tensor,
        call: FusedCall,
        in_data: Tensor | None,
        in_scale: Tensor | None,
        out_data: Tensor | None,
        out_scale: Tensor | None,
    ) -> Tensor:
        recipe = call.recipe
        n_q = gather_quantize(x, recipe.x, slot=slot, top_k=row.shape[1])
        in_q, out_q = quantized(w_in, in_data, in_scale, recipe.w), quantized(w_out, out_data, out_scale, recipe.w)
        u = multiply(call, recipe.y, n_q, in_q, offsets)  # [M,K] @ [2F,K]^T
        h_q = activation_quantize(u, "swiglu", recipe.x)
        y = multiply(call, recipe.y, h_q, out_q, offsets)  # [M,F] @ [K,F]^T
        observe_group(call.observer, "x", "x", [x], n_q, recipe.x, offsets, slot=slot)
        observe_matrices(call.observer, w_in, in_q, recipe.w, offsets)
        observe_group(call.outer_observer, "x", "swiglu", [u], h_q, recipe.x, offsets)
        observe_matrices(call.outer_observer, w_out, out_q, recipe.w, offsets)
        ctx.call, ctx.x_dtype, ctx.weight_dtype = call, x.dtype, weight.dtype
        scales = (n_q.scale, h_q.scale, in_q.scale, out_q.scale)
        ctx.save_for_backward(n_q.data, u, y, *scales, weight, w_in, w_out, in_data, out_data, slot, row, offsets)
        return combine(y, row, weight.float())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: FusedCall = ctx.call
        recipe = call.recipe
        n_data, u, y, s_n, s_h, s_in, s_out, *saved = ctx.saved_tensors
        weight, w_in, w_out, in_data, out_data, slot, row, offsets = saved
        dout, groups = dout.contiguous(), groups_of(offsets, len(slot))
        dweight = combine_weight_gradient(dout, y, row).to(ctx.weight_dtype)
        m_n, m_h, expert = mantissa(s_n), mantissa(s_h), groups.expert
        factor, folded = weight.float().view(-1, 1)[slot], s_out.squeeze(2)
        g = gather_quantize(
            dout, recipe.dy, slot=slot, top_k=row.shape[1], column_scale=folded, group=expert, row_scale=m_h * factor,
        )  # fmt: skip
        observe_group(
            call.outer_observer, "dy", "dy", [dout], g, recipe.dy, offsets,
            slot=slot, factor=factor, column_scale=folded, row_scale=m_h, shift_scale=s_h,
        )  # fmt: skip
        out_t = weights_transposed(w_out, out_data, s_out, recipe.w, g.data)
        dh = multiply(call, recipe.dx, dx_operand(g, m_h), out_t, offsets)  # [M,K] @ [F,K]^T
        du, h_q, _ = activation_backward(
            dh, u, "swiglu", recipe.dy,
            column_scale=s_in.squeeze(2), row_scale=m_n, h_cast=recipe.x, h_scale=s_h, biased=False, group=expert,
        )  # fmt: skip
        observe_group(
            call.observer, "dy", "swiglu_gradient", [dh, u], du, recipe.dy, offsets,
            column_scale=s_in.squeeze(2), row_scale=m_n, shift_scale=s_n,
        )  # fmt: skip
        dw_out = weight_gradient(call, g, s_h, s_out, h_q.data, groups, w_out.dtype)  # [K,M_e] @ [F,M_e]^T
        in_t = weights_transposed(w_in, in_data, s_in, recipe.w, du.data)
        dn = multiply(call, recipe.dx, dx_operand(du, m_n), in_t, offsets)  # [M,2F] @ [K,2F]^T
        dw_in = weight_gradient(call, du, s_n, s_in, n_data, groups, w_in.dtype)  # [2F,M_e] @ [K,M_e]^T
        dx = combine(dn, row).to(ctx.x_dtype)
        return dx, dweight, dw_in, dw_out, *([None] * 8)
