"""The place where a layer, or a module that fuses several, records statistics of its operands: see `octavo.watch`.

The autograd functions call `observe_xw` and `observe_dy` with the observer of their call. Without one
nothing is recorded, and compiled code has no trace of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.nn.delayed import ScaleHistory
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import Cast, QTensor
from octavo.observation.operand_statistics import HEAD, WIDTH, clear
from octavo.observation.operands import observe, observe_experts
from octavo.recipe import FusableRecipe, Recipe


class Observer:
    """Statistics of the operands of one GEMM with n stacked layers: x, n of w, and n of dy. They are float64, [1 + n,
    WIDTH] of x and w (`forward`), and [n, WIDTH] of dy (`backward`). A copy of a model, and a file that one is pickled
    to, have None in the observer's place."""

    def __init__(self, layers: int, device: torch.device) -> None:
        # Two tensors: compiled code saves the second for the backward pass, before which another forward pass may come.
        empty = (torch.empty(rows, WIDTH, dtype=torch.float64, device=device) for rows in (1 + layers, layers))
        self.forward, self.backward = map(clear, empty)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class ExpertObserver(Observer):
    """Statistics of the operands of a grouped GEMM, of each expert: `experts` [E, HEAD], float64, of x, w and dy.
    `forward` and `backward` have the histogram of all experts, and a flag if the operand was computed again."""

    def __init__(self, experts: int, device: torch.device) -> None:
        super().__init__(1, device)
        empty = {name: torch.empty(experts, HEAD, dtype=torch.float64, device=device) for name in ("x", "w", "dy")}
        self.experts = {name: clear(table) for name, table in empty.items()}


def expert_observer(module: Any, leaf: str) -> ExpertObserver | None:
    """The observer of a stack of a module of experts that is being trained."""
    observers: dict[str, ExpertObserver] | None = module.observers if module.training else None
    return None if observers is None else observers.get(leaf)


def observe_group(
    observer: Observer | None,
    operand: str,
    kind: str,
    source: Sequence[Tensor],
    q: QTensor,
    cast: Cast,
    offsets: Tensor,
    **factors: Tensor | None,
) -> None:
    """Record the operand "x", "w" or "dy" of a grouped GEMM, as `octavo.observation.operands.observe_experts` does.
    `shift_scale` is the scale m * 2^e [M, 1] of x, `s_x` of `observe_dy`."""
    if isinstance(observer, ExpertObserver):
        of_all, slot = (observer.backward, 0) if operand == "dy" else (observer.forward, ("x", "w").index(operand))
        data, scale = (t.flatten(0, 1) if q.data.ndim == 3 else t for t in (q.data, q.scale))
        stats, table = of_all[slot : slot + 1], observer.experts[operand]
        observe_experts(stats, table, kind, source, offsets, data, scale, cast.spec, **factors)


def observer_of(module: Any) -> Observer | None:
    """The observer of a module that is being trained. Evaluation is not recorded."""
    return module.observer if module.training else None


def observe_xw(
    observer: Observer | None,
    kind: str,
    source: Sequence[Tensor],
    x_q: QTensor | None,
    weights: Sequence[Tensor],
    w_q: QTensor | None,
    recipe: Recipe | FusableRecipe,
    x_history: ScaleHistory | None = None,
    w_history: ScaleHistory | None = None,
) -> None:
    """Record x and the stacked weights [N_i, K], which `x_q` and `w_q` are when quantized. `kind` and `source` are
    those of `octavo.observation.operands.observe`, of x."""
    if observer is not None:
        observe(observer.forward, 0, kind, source, [], *_arguments(x_q, recipe.x, x_history))
        kind, source = ("bytes", []) if isinstance(weights[0], GatheredWeight) else ("w", weights)
        sizes = [w.shape[0] for w in weights]
        observe(observer.forward, 1, kind, source, sizes, *_arguments(w_q, recipe.w, w_history))


def observe_dy(
    observer: Observer | None,
    source: Sequence[Tensor],
    sizes: Sequence[int],
    g: QTensor | None,
    cast: Cast | None,
    kind: str = "dy",
    *,
    s_w: Tensor | None,
    s_x: Tensor | None,
    history: ScaleHistory | None = None,
) -> None:
    """Record dy [T, sum of N_i], of which g = dy * s_w * m was quantized. `s_w` is the factor [sum of N_i, 1], None for
    1; `s_x` the scale m * 2^e [T, 1] of x, by whose exponent the bytes of g are shifted for dw, None where m is 1."""
    if observer is not None:
        observe(observer.backward, 0, kind, source, sizes, *_arguments(g, cast, history), s_w, s_x)


def _arguments(
    q: QTensor | None, cast: Cast | None, history: ScaleHistory | None
) -> tuple[Tensor | None, Tensor | None, str, Tensor | None]:
    if q is None or cast is None:
        return None, None, "", None
    return q.data, q.scale, cast.spec, history.pending if history is not None and history.ready else None
