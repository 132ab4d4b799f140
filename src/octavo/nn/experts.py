"""The experts of a mixture: SwiGLU MLPs of one shape, of which each token runs through the `top_k` that a router chose.

    out[t] = sum over s of weight[t, s] * down[e] (silu(gate[e] x[t]) * up[e] x[t]),    e = index[t, s]

Every token is computed, however many of them choose one expert: nothing is dropped, and no expert is padded.
"""

from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.experts_function import experts_mlp
from octavo.nn.grouped_linear import grouped_call, plain_grouped_linear, wide
from octavo.nn.linear import compute_dtype
from octavo.nn.observer import ExpertObserver, expert_observer
from octavo.ops import Rows, sort_by_expert
from octavo.recipe import Recipe


class ParallelExperts(Protocol):
    """The computation of a layer of experts of which each rank has some: `octavo.dist.expert_parallel`."""

    def __call__(self, module: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor: ...


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
    name: str = ""
    observers: dict[str, ExpertObserver] | None = None  # of its stacks, set by `octavo.watch`
    parallel: ParallelExperts | None = None  # set where each rank has some of the experts
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
        x = hidden_states
        check_routing(x, top_k_index, top_k_weights)
        if self.parallel is not None:
            return self.parallel(self, x, top_k_index, top_k_weights)
        return self.compute(x, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)

    def compute(self, x: Tensor, index: Tensor, weight: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        """The output of `forward` for the experts with the matrices `w_in` and `w_out`."""
        dtype = compute_dtype(x)
        if x.numel() == 0:
            w_in, w_out = wide(w_in), wide(w_out)
            return x.to(dtype) @ w_in[0, : w_out.shape[2]].to(dtype).t() @ w_out[0].to(dtype).t()
        rows = sort_by_expert(index, w_in.shape[0])
        if self.recipe is None or not self.recipe.quantized:
            return plain_experts(x.to(dtype), weight, rows, wide(w_in), wide(w_out))
        inner, outer = (expert_observer(self, leaf) for leaf in self.matrices)
        call = grouped_call(self, x, w_in, w_out, observer=inner, outer_observer=outer)
        return experts_mlp(x, weight, rows, w_in, w_out, call)

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


def plain_experts(x: Tensor, weight: Tensor, rows: Rows, w_in: Tensor, w_out: Tensor) -> Tensor:
    """The experts in the dtype of x, by PyTorch's grouped GEMMs."""
    slot, row, offsets = rows
    gate, up = plain_grouped_linear(gather_rows(x, slot, row), w_in, offsets).chunk(2, 1)
    y = scatter_rows(plain_grouped_linear(F.silu(gate) * up, w_out, offsets), slot, row)
    return (y.float() * weight.float().unsqueeze(2)).sum(1).to(x.dtype)


def gather_rows(x: Tensor, slot: Tensor, row: Tensor) -> Tensor:
    """The rows [M, K] of the experts, from tokens [T, K]. The gradient is a gather too, without atomic additions."""
    rows: Tensor = _Gather.apply(x, slot, row)  # type: ignore[no-untyped-call]
    return rows


def scatter_rows(y: Tensor, slot: Tensor, row: Tensor) -> Tensor:
    """The outputs [T, top_k, K] of the slots, from the rows [M, K] of the experts."""
    slots: Tensor = _Scatter.apply(y, slot, row)  # type: ignore[no-untyped-call]
    return slots


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        return x[slot // row.shape[1]]

    @staticmethod
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor | None, ...]:
        (row,) = ctx.saved_tensors
        return _by_slot(dn, row).float().sum(1).to(dn.dtype), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slot: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return _by_slot(y, row)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (slot,) = ctx.saved_tensors
        return dy.reshape(-1, dy.shape[2])[slot], None, None


def _by_slot(y: Tensor, row: Tensor) -> Tensor:
    """The row [T, top_k, K] of each slot; zeros for a slot without one."""
    return torch.where(row.unsqueeze(2) < 0, 0, y[row.clamp(min=0)])
