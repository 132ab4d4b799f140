"""The experts of a mixture: SwiGLU MLPs of one shape, of which each token runs through the `top_k` that a router chose.

    out[t] = sum over s of weight[t, s] * down[e] (silu(gate[e] x[t]) * up[e] x[t]),    e = index[t, s]

Every token is computed, however many of them choose one expert: nothing is dropped, and no expert is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import ops
from octavo.nn.linear import compute_dtype
from octavo.nn.linear_function import Call, LinearCall, ones, rescaled
from octavo.nn.module_tools import check_call, differentiable_once, exchanged
from octavo.nn.observer import ExpertObserver, Observer, expert_observer, observe_group
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import ROW, Cast, QTensor
from octavo.numerics.scaling import scattered_signs
from octavo.ops.dispatch import COLUMNS, runs_experts
from octavo.ops.launching import Factors
from octavo.ops.permutation import Groups, nonzero
from octavo.ops.quantization import joined, matrices
from octavo.ops.registration import check_tensor
from octavo.ops.transposition import placed
from octavo.recipe import FusableRecipe, Gemm, Recipe


class Experts(nn.Module):
    """The experts of a layer, with the names and shapes of transformers': plain PyTorch until `octavo.convert`.

    Args:
        experts: E, their number.
        width: K, of x and of the output.
        mlp_width: F, of the hidden layer of one expert.

    Attributes:
        gate_up_proj: [E, 2F, K], the rows of gate before those of up.
        down_proj: [E, K, F].
    """

    recipe: Recipe | None = None  # set by `octavo.convert`
    _layer_name: str = ""
    observers: dict[str, ExpertObserver] | None = None  # of its stacks, set by `octavo.watch`
    recompute: bool = False  # the inputs of SwiGLU, in the backward pass; set by `octavo.convert`
    # Computes the layer where each rank has some of the experts (`octavo.distributed.expert_parallel`).
    parallel: Callable[[Experts, Tensor, Tensor, Tensor], Tensor] | None = None
    matrices: ClassVar[tuple[str, str]] = ("gate_up_proj", "down_proj")
    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(self, experts: int, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * mlp_width, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, mlp_width))
        nn.init.normal_(self.gate_up_proj, std=width**-0.5)
        nn.init.normal_(self.down_proj, std=mlp_width**-0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """out [T, K] in the autocast dtype, or in that of the input outside autocast.

        Args:
            hidden_states: x [T, K].
            top_k_index: int64 [T, top_k], the experts of each token. The number E is no expert: its slot adds nothing.
            top_k_weights: [T, top_k], by which their outputs are multiplied.

        Raises:
            ValueError: index and weights have another shape.
        """
        check_routing(hidden_states, top_k_index, top_k_weights)
        if self.parallel is not None:
            return self.parallel(self, hidden_states, top_k_index, top_k_weights)
        return self.compute(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)

    def runs_fused(self) -> bool:
        return self.recipe is not None and self.recipe.fusable is not None

    def compute(self, x: Tensor, index: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        """The output of `forward` for the experts with the matrices `w_in` and `w_out`."""
        dtype = compute_dtype(x)
        if x.numel() == 0:
            w_in, w_out = wide(w_in), wide(w_out)
            return x.to(dtype) @ w_in[0, : w_out.shape[2]].to(dtype).t() @ w_out[0].to(dtype).t()
        rows = ops.sort_by_expert(index, w_in.shape[0])
        inner, outer = (expert_observer(self, leaf) for leaf in self.matrices)
        call = grouped_call(self, x, w_in, w_out, observer=inner, outer_observer=outer)
        if call is None or call.recipe.fusable is None:
            return plain_experts(x.to(dtype), weight, rows, w_in, w_out, call)
        call.recompute = self.recompute
        arguments = call, call.recipe.fusable, x, weight, w_in, w_out, *rows, *gathered(w_in), *gathered(w_out)
        return _Experts.apply(*arguments)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        e, k, f = self.down_proj.shape
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        return f"experts={e}, width={k}, mlp_width={f}{recipe}"


def check_routing(x: Tensor, index: Tensor, weight: Tensor) -> None:
    """Raise a ValueError unless `index` and `weight` are [T, top_k] for x [T, K]."""
    if index.shape != weight.shape or index.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"need the experts and weights [T, top_k] of x {list(x.shape)}, got {list(index.shape)} and "
            f"{list(weight.shape)}"
        )


def plain_experts(
    x: Tensor, weight: Tensor, rows: ops.Rows, w_in: Tensor, w_out: Tensor, call: Call | None = None
) -> Tensor:
    """The experts in the dtype of x, by PyTorch's grouped GEMMs, or by the recipe of `call`."""
    slot, row, offsets = rows
    outer = None if call is None else LinearCall(call.recipe, call.dtype, observer=call.outer_observer)
    gate, up = multiply_groups(gather_rows(x, slot, row), w_in, offsets, call).chunk(2, 1)
    y = scatter_rows(multiply_groups(F.silu(gate) * up, w_out, offsets, outer), slot, row)
    return (y.float() * weight.float().unsqueeze(2)).sum(1).to(x.dtype)


def gather_rows(x: Tensor, slot: Tensor, row: Tensor) -> Tensor:
    """The rows [M, K] of the experts, from tokens [T, K]. The gradient is a gather too, without atomic additions."""
    return exchanged(x, lambda x: x[slot // row.shape[1]], lambda dn: _by_slot(dn, row).float().sum(1).to(dn.dtype))


def scatter_rows(y: Tensor, slot: Tensor, row: Tensor) -> Tensor:
    """The outputs [T, top_k, K] of the slots, from the rows [M, K] of the experts."""
    return exchanged(y, lambda y: _by_slot(y, row), lambda dy: dy.flatten(0, 1)[slot])


def _by_slot(y: Tensor, row: Tensor) -> Tensor:
    """The row [T, top_k, K] of each slot; zeros for a slot without one."""
    return torch.where(row.unsqueeze(2) < 0, 0, y[row.clamp(min=0)])


# ---- The experts of a layer as one function: rows sorted by expert, two grouped GEMMs around SwiGLU, and sorted back.
#
# Tokens T, each with top_k experts; rows M = T * top_k; width K, F columns inside an expert:
#
#     x_q = quantize(x);  n_q = x_q[token of the row]
#     u[M,2F] = n_q @ w_in_q[e]^T;  h_q = quantize(silu(gate) * up);  y[M,K] = h_q @ w_out_q[e]^T
#     out[t] = sum over s of weight[t,s] * y[row of slot s]    one pass
#     backward    g_q = quantize(dout[token] * weight * s_out[e] * m_h);  dh = g_q @ w_out_q[e]
#                 du_q = quantize(activation'(u) * dh), and dweight = sum(dh * h) / weight, one pass
#                 dn = du_q @ w_in_q[e];  dx[t] = sum over s of dn[row of slot s]
#
# Each grouped GEMM has the backward pass of `GroupedLinear`, below. Saved are u in high precision and the bytes of x;
# those of h and w are computed again, and with `LinearCall.recompute` u too. y is not saved: dweight = sum(dout * y)
# = sum(dout * (h @ w_out^T)), and dh is weight * dout @ w_out. A token's rows have one scale and the same bytes,
# quantized once.


class _Experts(torch.autograd.Function):
    """out [T, K] of x [T, K], the weights [T, top_k] of its experts, their matrices, rows, and gathered bytes."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, recipe: FusableRecipe, x: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor, *rest: Any
    ) -> Tensor:
        slot, row, offsets, in_data, in_scale, out_data, out_scale = rest
        x_q, token = ops.quantize(x, recipe.x), slot // row.shape[1]
        n_q = rows_of(x_q, token)  # [M,K]
        in_q, out_q = quantized(w_in, in_data, in_scale, recipe.w), quantized(w_out, out_data, out_scale, recipe.w)
        u = multiply(call, recipe.y, n_q, in_q, offsets)  # [M,K] @ [2F,K]^T
        h_q = ops.activation_quantize(u, "swiglu", recipe.x)
        y = multiply(call, recipe.y, h_q, out_q, offsets)  # [M,F] @ [K,F]^T
        observe_group(call.observer, "x", "x", [x], n_q, recipe.x, offsets, slot=slot)
        observe_matrices(call.observer, w_in, in_q, recipe.w, offsets)
        observe_group(call.outer_observer, "x", "swiglu", [u], h_q, recipe.x, offsets)
        observe_matrices(call.outer_observer, w_out, out_q, recipe.w, offsets)
        ctx.call, ctx.recipe, ctx.x_dtype, ctx.weight_dtype = call, recipe, x.dtype, weight.dtype
        scales = (x_q.scale, n_q.scale, h_q.scale, in_q.scale, out_q.scale)
        ctx.save_for_backward(
            x_q.data, None if call.recompute else u, *scales, weight, w_in, w_out, in_data, out_data, slot, row, offsets
        )
        return ops.combine(y, row, weight.float())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        recipe: FusableRecipe = ctx.recipe
        x_data, u, s_x, s_n, s_h, s_in, s_out, *saved = ctx.saved_tensors
        weight, w_in, w_out, in_data, out_data, slot, row, offsets = saved
        dout, groups = dout.contiguous(), ops.aligned_groups(offsets, len(slot), slot, row.shape[1])
        folded, weight = s_out.squeeze(2), weight.float().contiguous()
        factors = Factors(folded, groups.expert, s_h, weight, slot)
        g = ops.gather_quantize(dout, recipe.dy, factors, top_k=row.shape[1])
        if call.outer_observer is not None:
            observe_group(
                call.outer_observer, "dy", "dy", [dout], g, recipe.dy, offsets,
                slot=slot, factor=nonzero(weight).view(-1, 1)[slot], column_scale=folded, shift_scale=s_h,
            )  # fmt: skip
        in_t = weights_transposed(w_in, in_data, s_in, recipe.w, g.data) if call.recompute else None
        if in_t is not None:
            x_q = QTensor(x_data, s_x, recipe.x.fmt, recipe.x.granularity)
            token = slot // row.shape[1]
            if torch.compiler.is_compiling():  # an index that follows from dout: otherwise n_q would be saved
                token = token + (g.data.view(torch.uint8)[:, 0] & 0)
            w_q = QTensor(ops.transpose(in_t.data.transpose(0, 1).flatten(1)).view(w_in.shape), s_in, in_t.format, ROW)
            u = multiply(call, recipe.y, rows_of(x_q, token), w_q, offsets)  # [M,K] @ [2F,K]^T
            del w_q
        out_t = weights_transposed(w_out, out_data, s_out, recipe.w, g.data)
        scales = ops.fold_scales(s_h, g.scale, s_out, offsets)
        dh = multiply(call, recipe.dx, rescaled(g, scales.dx), out_t, offsets)  # [M,K] @ [F,K]^T
        factors = Factors(s_in.squeeze(2), groups.expert, s_n, weight, slot, row)
        du, h_q, _, dweight = ops.activation_backward(
            dh, u, "swiglu", recipe.dy, factors, h_cast=recipe.x, h_scale=s_h, biased=False
        )
        if call.observer is not None:
            observe_group(
                call.observer, "dy", "swiglu_gradient", [dh, u], du, recipe.dy, offsets,
                factor=(weight / nonzero(weight)).view(-1, 1)[slot], column_scale=s_in.squeeze(2), shift_scale=s_n,
            )  # fmt: skip
        h_t = ops.transpose(h_q.data, place=groups.place)
        dw_out = weight_gradient(recipe, g, scales, h_t, groups, w_out.dtype)  # [K,M_e] @ [F,M_e]^T
        if in_t is None:
            in_t = weights_transposed(w_in, in_data, s_in, recipe.w, du.data)
        scales = ops.fold_scales(s_n, du.scale, s_in, offsets)
        dn = multiply(call, recipe.dx, rescaled(du, scales.dx), in_t, offsets)  # [M,2F] @ [K,2F]^T
        n_t = ops.transpose(x_data, place=groups.token)
        dw_in = weight_gradient(recipe, du, scales, n_t, groups, w_in.dtype)  # [2F,M_e] @ [K,M_e]^T
        dx = ops.combine(dn, row, None).to(ctx.x_dtype)
        return None, None, dx, dweight.to(ctx.weight_dtype), dw_in, dw_out, *([None] * 7)


# ---- A linear layer with a weight for each group of rows, as the experts of a mixture have.


# The shortest side of experts that were measured faster in FP8: 128 experts of 2048 x 768 (H200, docs/performance.md).
# The GEMMs of narrower ones gain less than the passes that quantize cost.
LEAST_SIDE = 768


class GroupedLinear(nn.Module):
    """y[m] = x[m] @ weight[e]^T for the rows m of group e: plain PyTorch, until `octavo.convert` gives it a recipe.

    Args:
        groups: E, the number of groups.
        in_features: K, of each row of x.
        out_features: N, of each row of y.

    Example:
        >>> layer = GroupedLinear(2, 32, 64)
        >>> offsets = torch.tensor([3, 8], dtype=torch.int32)  # rows 0 to 2 and 3 to 7
        >>> layer(torch.randn(8, 32), offsets).shape
        torch.Size([8, 64])
    """

    recipe: Recipe | None = None  # set by `octavo.convert`
    _layer_name: str = ""
    observers: dict[str, ExpertObserver] | None = None  # of its weight, set by `octavo.watch`

    def __init__(self, groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    @classmethod
    def from_linears(cls, linears: Sequence[nn.Linear]) -> Self:
        """A layer with copies of the weights of `linears`, one group each.

        Raises:
            ValueError: the layers have unequal shapes, or biases, or there is none.
        """
        shapes = sorted({tuple(linear.weight.shape) for linear in linears})
        if len(shapes) != 1 or any(linear.bias is not None for linear in linears):
            raise ValueError(
                f"the experts of a grouped layer have one shape [N, K] and no bias, got {[list(s) for s in shapes]}"
                f"{' with biases' if len(shapes) == 1 else ''}: leave them as separate layers"
            )
        n, k = shapes[0]
        layer = cls(0, k, n)
        layer.weight = nn.Parameter(torch.stack([linear.weight.detach() for linear in linears]))
        return layer

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """y [M, N] of x [M, K].

        Args:
            offsets: int32 [E] on the device of x, where each group of rows ends. A group may be empty. Rows from
                offsets[-1] on have any numbers in y.

        Raises:
            ValueError: `offsets` is not int32 [E].
        """
        return grouped_linear(self, x, self.weight, offsets, expert_observer(self, "weight"))

    def extra_repr(self) -> str:
        e, n, k = self.weight.shape
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        return f"groups={e}, in_features={k}, out_features={n}{recipe}"


def grouped_linear(layer: Any, x: Tensor, w: Tensor, offsets: Tensor, observer: Observer | None = None) -> Tensor:
    """y [M, N] of x [M, K] and w [E, N, K], as `GroupedLinear.forward`, by the recipe of `layer`."""
    # A traced check would turn a dynamic size into a constant, on which PyTorch 2.11 fails inside an autograd Function:
    # the fake implementations of the operations check then.
    if not torch.compiler.is_dynamo_compiling():
        check_tensor("offsets", offsets, (w.shape[0],), torch.int32)
    dtype = compute_dtype(x)
    if x.numel() == 0:
        return x.to(dtype) @ wide(w)[0].to(dtype).t()
    call = grouped_call(layer, x, w, observer=observer)
    return multiply_groups(x.to(dtype) if call is None else x, w, offsets, call)


def grouped_call(
    layer: Any, x: Tensor, *weights: Tensor, observer: Observer | None, outer_observer: Observer | None = None
) -> Call | None:
    """The call of a layer for the input `x`, None if no recipe casts; raises the errors of `check_call`."""
    if layer.recipe is None or not layer.recipe.quantized:
        return None
    check_call(layer, x, *weights)
    if not runs_experts(layer.recipe):
        raise ValueError(
            "grouped layers run recipes with row scales in all GEMMs, rounded to nearest and not rotated, or with "
            f"scales along the reduction, got {layer.recipe}: convert them with 'rowwise', or leave them out by skip="
        )
    # Dynamo cannot trace a call of the alias Call.
    return LinearCall(layer.recipe, compute_dtype(x), observer=observer, outer_observer=outer_observer)


def wide(w: Tensor) -> Tensor:
    """The weights as numbers, where FSDP2 has gathered bytes."""
    return w.dequantize() if isinstance(w, GatheredWeight) else w


# ---- A linear layer for each group of rows, as three grouped GEMMs with one quantization for each tensor.
#
# The mathematics is that of `octavo.nn.linear_function`, with w[e,N,K], its scales and c_max by expert e. Rows M are in
# groups, and dw[e,N,K] adds over the rows M_e of its group.
#
# The GPU's GEMM of dw takes groups in positive multiples of 128 rows. Only its two operands need that, and the kernel
# that transposes them writes the columns of each group to their place, with zeros behind them. So groups of any size
# run, and no tensor is copied. The gradient of an expert without rows is zero.


def gathered(w: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The bytes and scales of matrices that FSDP2 has gathered so; None for others."""
    return (w.data_bytes, w.scale) if isinstance(w, GatheredWeight) else (None, None)


def quantized(w: Tensor, data: Tensor | None, scale: Tensor | None, cast: Cast) -> QTensor:
    """The matrices [E, N, K], cast unless they are `gathered`."""
    if data is None or scale is None:
        return ops.quantize_matrices(w, cast)
    return QTensor(data, scale, cast.fmt, cast.granularity)


def rows_of(q: QTensor, index: Tensor) -> QTensor:
    """Rows of a matrix that is quantized by row: the bytes and scales of each, as often as `index` [M] names it."""
    words = q.data.view(torch.int64 if q.data.shape[1] % 8 == 0 else torch.uint8)  # an element of 8 bytes at a time
    return QTensor(words[index].view(q.data.dtype), q.scale[index], q.format, q.granularity)


def observe_matrices(observer: Observer | None, w: Tensor, w_q: QTensor, cast: Cast, offsets: Tensor) -> None:
    """Record the matrices [E, N, K], of which only bytes exist where they are `gathered`."""
    source = [] if isinstance(w, GatheredWeight) else [w.flatten(0, 1)]
    observe_group(observer, "w", "w", source, w_q, cast, offsets)


def multiply(call: Call, gemm: Gemm, a: QTensor, b: QTensor, offsets: Tensor) -> Tensor:
    """a [M, R] @ b [e, N, R]^T, as `gemm` accumulates it."""
    fast, emulate = gemm.fast_accumulation, call.recipe.emulate
    return ops.grouped_mm(a, b, offsets, out_dtype=call.dtype, fast_accumulation=fast, emulate=emulate)


def weights_transposed(w: Tensor, w_data: Tensor | None, s_w: Tensor, cast: Cast, after: Tensor) -> QTensor:
    """The weights' bytes by row or square block, transposed to [E, K, N], cast again by `s_w` unless `gathered`; scales
    by row become 1."""
    e, n, k = w.shape
    if w_data is None:
        parts = matrices(w, cast.granularity.rows)
        scales = [s_w.flatten(0, 1)] if len(parts) == 1 else s_w
        cast_again = [ops.requantize_transposed([m], s, cast, after) for m, s in zip(parts, scales, strict=True)]
        data = joined(cast_again, 1)  # [K, E * N]
    else:
        data = ops.transpose(w_data.view(e * n, k), None, after)
    scale = ones(data, e * k).view(e, k, 1) if cast.by_row else s_w.transpose(1, 2)
    return QTensor(data.view(k, e, n).transpose(0, 1), scale, cast.fmt, cast.granularity)


def weight_gradient(
    recipe: FusableRecipe, g: QTensor, scales: ops.FoldedScales, x_t: Tensor, groups: Groups, dtype: torch.dtype
) -> Tensor:
    """dw [E, N, K] from g [M, N], and the bytes of x, transposed and placed, [K, M']."""
    h = ops.transpose(g.data, scales.shift, place=groups.place)
    return ops.grouped_mm_dw(
        h, scales.dw, x_t, groups.aligned_offsets, out_dtype=dtype,
        fast_accumulation=recipe.dw.fast_accumulation, emulate=recipe.emulate,
    )  # fmt: skip


# ---- The same for recipes with scales along the reduction: each GEMM quantizes its own two operands.
#
#     y [M,N]   = x_q[M,K]    @ w_q[e,N,K]^T      scales along K, of w perhaps in square blocks
#     dx[M,K]   = dy_q[M,N]   @ w_q[e,K,N]^T      along N
#     dw[e,N,K] = dy_q[N,M_e] @ x_q[K,M_e]^T      along the rows of the group
#
# For dw each group has a positive multiple of 128 columns, with zeros behind its rows. So no scale is shared by rows
# of two groups, and the last scale of a group is that of the rows that are left. A rotation of dw mixes 128 columns.
# A GEMM without casts runs in the layer's high-precision dtype.


def multiply_groups(x: Tensor, w: Tensor, offsets: Tensor, call: Call | None) -> Tensor:
    """y [M, N] of x [M, K] and w [E, N, K] by the recipe of `call`; without one by PyTorch, in the dtype of x."""
    if call is None:
        return F.grouped_mm(x, wide(w).to(x.dtype).transpose(1, 2), offs=offsets)  # [M_e,K] @ [N,K]^T
    call.has_backward = torch.is_grad_enabled()
    return _GroupedLinear.apply(x, w, offsets, call, *gathered(w))  # type: ignore[no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    """y [M, N] of x [M, K] and w [E, N, K]. `offsets` int32 [E]: where each group of rows ends."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, offsets: Tensor, call: Call, w_data: Tensor | None, s_w: Tensor | None
    ) -> Tensor:
        recipe, saved_x = call.recipe, None
        needs_w = call.has_backward and ctx.needs_input_grad[1]
        if recipe.y is None:
            y = multiply_groups(x.to(call.dtype), w, offsets, None)
        else:
            read_x, read_w = (ops.rotate(x), ops.rotate(w)) if "y" in recipe.rotate else (x, w)
            a, b = ops.quantize(read_x, recipe.y.a), quantized(read_w, w_data, s_w, recipe.y.b)
            y = multiply(call, recipe.y, a, b, offsets)  # [M_e,K] @ [N,K]^T
            observe_group(call.observer, "x", "x", [read_x], a, recipe.y.a, offsets)
            observe_matrices(call.observer, read_w, b, recipe.y.b, offsets)
            s_w, saved_x = b.scale, a if recipe.fusable else None
        if recipe.dw is not None and recipe.fusable is None and needs_w:
            saved_x = by_columns(x, recipe.dw.b, ops.aligned_groups(offsets, len(x)).place, recipe)
        x_data, s_x = (None, None) if saved_x is None else (saved_x.data, saved_x.scale)
        if recipe.dw is None and needs_w:
            x_data = x.to(call.dtype)
        ctx.call, ctx.x_dtype = call, x.dtype
        ctx.save_for_backward(x_data, s_x, w, w_data, s_w, offsets)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        x_data, s_x, w, w_data, s_w, offsets = ctx.saved_tensors
        needs_x, needs_w, *_ = ctx.needs_input_grad
        dy, dx, dw, recipe = dy.contiguous(), None, None, call.recipe.fusable
        if recipe is not None:
            groups, folded = ops.aligned_groups(offsets, len(x_data)), s_w.squeeze(2)
            g = ops.gather_quantize(dy, recipe.dy, Factors(folded, groups.expert, s_x))
            observe_group(call.observer, "dy", "dy", [dy], g, recipe.dy, offsets, shift_scale=s_x, column_scale=folded)
            scales = ops.fold_scales(s_x, g.scale, s_w, offsets)
            if needs_x:
                w_t = weights_transposed(w, w_data, s_w, recipe.w, g.data)
                dx = multiply(call, recipe.dx, rescaled(g, scales.dx), w_t, offsets)
            if needs_w:
                x_t = ops.transpose(x_data, place=groups.place)
                dw = weight_gradient(recipe, g, scales, x_t, groups, w.dtype)
        else:
            dx = _dx(dy, w, w_data, s_w, offsets, call) if needs_x else None
            dw = _dw(dy, x_data, s_x, offsets, call, w.dtype) if needs_w else None
        return None if dx is None else dx.to(ctx.x_dtype), dw, *([None] * 4)


def _dx(dy: Tensor, w: Tensor, w_data: Tensor | None, s_w: Tensor, offsets: Tensor, call: Call) -> Tensor:
    """dx [M, K] of dy [M, N], in the dtype of the call."""
    recipe, gemm = call.recipe, call.recipe.dx
    if gemm is None:
        return F.grouped_mm(dy.to(call.dtype), w.to(call.dtype), offs=offsets)  # [M_e,N] @ [N,K]
    rotated = "dx" in recipe.rotate
    read_dy = ops.rotate(dy) if rotated else dy
    a = ops.quantize(read_dy, gemm.a)
    observe_group(call.observer, "dy", "dy", [read_dy], a, gemm.a, offsets)
    if rotated:
        w_t = ops.quantize_matrices(ops.rotate(w.transpose(1, 2), dy), gemm.b)
    elif recipe.quantizes_w_once and recipe.y is not None and "y" not in recipe.rotate:
        w_t = weights_transposed(w, w_data, s_w, gemm.b, a.data)
    else:
        w_t = ops.quantize_matrices_transposed(w, gemm.b)
    return multiply(call, gemm, a, w_t, offsets)  # [M_e,N] @ [K,N]^T


def _dw(dy: Tensor, x_t: Tensor, s_x: Tensor | None, offsets: Tensor, call: Call, dtype: torch.dtype) -> Tensor:
    """dw [E, N, K] of dy [M, N], and of x [M, K], or its bytes and scales as `by_columns` gives them."""
    recipe, gemm = call.recipe, call.recipe.dw
    if gemm is None:
        return F.grouped_mm(dy.to(call.dtype).t(), x_t, offs=offsets).to(dtype)  # [N,M_e] @ [M_e,K]
    _, ends, place, _ = ops.aligned_groups(offsets, len(dy))
    a = by_columns(dy, gemm.a, place, recipe)
    return ops.grouped_mm_dw(  # [N,M_e] @ [K,M_e]^T
        a.data, a.scale, x_t, ends, scale_b=s_x, granularity=a.granularity, out_dtype=dtype, emulate=recipe.emulate
    )


def by_columns(t: Tensor, cast: Cast, place: Tensor, recipe: Recipe) -> QTensor:
    """The transpose [R, M'] of `t` [M, R], quantized for dw, with its rows at the places of `aligned_groups`."""
    if "dw" not in recipe.rotate:
        return ops.quantize_transposed(t, cast, place)
    place = F.pad(place, (0, -len(place) % COLUMNS), value=-1)
    columns = placed(t, place).t() * scattered_signs(len(place), t.device).to(t.dtype)
    return ops.quantize(ops.rotate(columns.reshape(len(columns), -1, COLUMNS)).flatten(1), cast)
