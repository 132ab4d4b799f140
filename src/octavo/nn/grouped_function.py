"""A linear layer for each group of rows, as three grouped GEMMs with one quantization for each tensor.

The mathematics is that of `octavo.nn.linear_function`, with a weight for each expert e. Rows M in groups, inputs K,
outputs N, and w, its scales and c_max by expert:

    y [M,N]   = x_q[M,K]   @ w_q[e,N,K]^T   * s_x[M] * s_w[e,N]
    g [M,N]   = dy[M,N] * s_w[e,N] * m[M]   -> g_q, s_g[M]
    dx[M,K]   = g_q[M,N]   @ wT_q[e,K,N]^T  * (s_g[M] / m[M])
    dw[e,N,K] = h_q[N,M_e] @ xT_q[K,M_e]^T  * (c_max[e] / s_w[e,N])

The GPU's GEMM of dw takes groups in positive multiples of 16 rows. Only its two operands need that, and the kernel that
transposes them writes the columns of each group to their place, with zeros behind them. So groups of any size run, and
no tensor is copied. The gradient of an expert without rows is zero.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.nn.gathered_weight import GatheredWeight
from octavo.nn.layer_limits import differentiable_once
from octavo.nn.linear_call import FusedCall
from octavo.nn.observer import Observer, observe_group
from octavo.nn.scale_folding import dx_operand, mantissa
from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.numerics.scaling import quotient, scale_exponent
from octavo.ops import (
    aligned_groups,
    gather_quantize,
    group_of_rows,
    group_shifts,
    grouped_mm,
    grouped_mm_dw,
    quantize,
    quantize_matrices,
    requantize_transposed,
    transpose,
)
from octavo.recipe import Gemm


class Groups(NamedTuple):
    """The groups of rows in a backward pass.

    Attributes:
        offsets: int32 [E], where each group ends.
        group: int32 [M], the group of each row, E for rows beyond the last group.
        aligned_offsets, place: those of `octavo.ops.aligned_groups`.
    """

    offsets: Tensor
    group: Tensor
    aligned_offsets: Tensor
    place: Tensor

    @property
    def expert(self) -> Tensor:
        """int32 [M]: the expert of each row, the last one for rows beyond the last group."""
        return self.group.clamp(max=len(self.offsets) - 1)


def groups_of(offsets: Tensor, rows: int) -> Groups:
    return Groups(offsets, group_of_rows(offsets, rows), *aligned_groups(offsets, rows))


def grouped_linear(x: Tensor, w: Tensor, offsets: Tensor, call: FusedCall) -> Tensor:
    """y [M, N] of x [M, K] and w [E, N, K], differentiable. `offsets` int32 [E]: where each group of rows ends."""
    y: Tensor = _GroupedLinear.apply(x, w, offsets, call, *gathered(w))  # type: ignore[no-untyped-call]
    return y


def gathered(w: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The bytes and scales of matrices that FSDP2 has gathered so; None for others."""
    return (w.data_bytes, w.scale) if isinstance(w, GatheredWeight) else (None, None)


def quantized(w: Tensor, data: Tensor | None, scale: Tensor | None, cast: Cast) -> QTensor:
    """The matrices [E, N, K], cast by row, unless they are `gathered`."""
    return quantize_matrices(w, cast) if data is None or scale is None else QTensor(data, scale, cast.fmt, ROW)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        offsets: Tensor,
        call: FusedCall,
        w_data: Tensor | None,
        w_scale: Tensor | None,
    ) -> Tensor:
        x_q, w_q = quantize(x, call.recipe.x), quantized(w, w_data, w_scale, call.recipe.w)
        observe_group(call.observer, "x", "x", [x], x_q, call.recipe.x, offsets)
        observe_matrices(call.observer, w, w_q, call.recipe.w, offsets)
        ctx.call, ctx.x_dtype = call, x.dtype
        ctx.save_for_backward(x_q.data, x_q.scale, w_q.scale, w, w_data, offsets)
        return multiply(call, call.recipe.y, x_q, w_q, offsets)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: FusedCall = ctx.call
        recipe = call.recipe
        x_data, s_x, s_w, w, w_data, offsets = ctx.saved_tensors
        groups, m = groups_of(offsets, len(x_data)), mantissa(s_x)
        dy, folded = dy.contiguous(), s_w.squeeze(2)
        g = gather_quantize(dy, recipe.dy, column_scale=folded, group=groups.expert, row_scale=m)
        factors = {"column_scale": folded, "row_scale": m, "shift_scale": s_x}
        observe_group(call.observer, "dy", "dy", [dy], g, recipe.dy, offsets, **factors)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w_t = weights_transposed(w, w_data, s_w, recipe.w, g.data)
            dx = multiply(call, recipe.dx, dx_operand(g, m), w_t, offsets).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(call, g, s_x, s_w, x_data, groups, w.dtype)
        return dx, dw, None, None, None, None


def observe_matrices(observer: Observer | None, w: Tensor, w_q: QTensor, cast: Cast, offsets: Tensor) -> None:
    """Record the matrices [E, N, K], of which only bytes exist where they are `gathered`."""
    source = [] if isinstance(w, GatheredWeight) else [w.flatten(0, 1)]
    observe_group(observer, "w", "w", source, w_q, cast, offsets)


def multiply(call: FusedCall, gemm: Gemm, a: QTensor, b: QTensor, offsets: Tensor) -> Tensor:
    """a [M, R] @ b [e, N, R]^T, as `gemm` accumulates it."""
    fast, emulate = gemm.fast_accumulation, call.recipe.emulate
    return grouped_mm(a, b, offsets, out_dtype=call.dtype, fast_accumulation=fast, emulate=emulate)


def weights_transposed(w: Tensor, w_data: Tensor | None, s_w: Tensor, cast: Cast, after: Tensor) -> QTensor:
    """The bytes of the weights [E, N, K], transposed to [E, K, N], with scales of 1; `after` as in `transpose`.

    `w_data` is their bytes where they are `gathered`; else the weights are cast again by the scale `s_w`.
    """
    e, n, k = w.shape
    if w_data is None:
        data = requantize_transposed([w.reshape(e * n, k)], s_w.view(e * n, 1), cast, after)  # [K, E * N]
    else:
        data = transpose(w_data.view(e * n, k), None, after)
    ones = torch.ones((e, k, 1), dtype=torch.float32, device=w.device)
    return QTensor(data.view(k, e, n).transpose(0, 1), ones, cast.fmt, ROW)


def weight_gradient(
    call: FusedCall, g: QTensor, s_x: Tensor, s_w: Tensor, x_data: Tensor, groups: Groups, dtype: torch.dtype
) -> Tensor:
    """dw [E, N, K] from g [M, N] and the bytes and scales of x [M, K]; `s_w` [E, N, 1] is taken out of the scale."""
    exponent = (scale_exponent(s_x) + scale_exponent(g.scale)).view(-1)  # [M] of c
    largest, shift = group_shifts(exponent, groups.group, len(groups.offsets))  # [E] of c_max, [M]
    scale = quotient(torch.exp2(largest.float()).view(-1, 1, 1), s_w)
    h, x_t = transpose(g.data, shift, place=groups.place), transpose(x_data, place=groups.place)
    gemm, formats = call.recipe.dw, (g.format.name, call.recipe.x.format)
    return grouped_mm_dw(
        h, scale, x_t, groups.aligned_offsets, formats=formats, out_dtype=dtype,
        fast_accumulation=gemm.fast_accumulation, emulate=call.recipe.emulate,
    )  # fmt: skip
