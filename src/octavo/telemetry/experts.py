"""The experts of a watched model: a stack of their matrices as one layer, and which expert is worst.

load      rows of the fullest expert / mean rows of an expert: 1 is even
worst     the expert whose operand has the lowest SQNR in the sample, 10 log10(sum(x^2) / sum((x - x_q * scale)^2))
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.nn.expert_conversion import find_experts, stacks_of
from octavo.nn.observer import ExpertObserver
from octavo.recipe import Recipe
from octavo.telemetry.schema import EXPERTS, OPERANDS

Array = np.ndarray[Any, Any]


class ExpertStack:
    """A stack [E, N, K] of experts' matrices, as one layer.

    Attributes:
        module, leaf: the module of experts, and the name of its stack there.
    """

    def __init__(self, module: Any, leaf: str) -> None:
        self.module, self.leaf = module, leaf

    @property
    def weight(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.module, self.leaf)
        return found

    @property
    def recipe(self) -> Recipe | None:
        """None where the experts are not in FP8, or each rank has some of them: those are not recorded."""
        found: Recipe | None = getattr(self.module, "recipe", None)
        return None if getattr(self.module, "parallel", None) is not None else found

    @property
    def observer(self) -> ExpertObserver | None:
        return (getattr(self.module, "observers", None) or {}).get(self.leaf)

    def attach(self, device: torch.device) -> None:
        self.module.observers = (self.module.observers or {}) | {
            self.leaf: ExpertObserver(self.weight.shape[0], device)
        }

    def detach(self) -> None:
        self.module.__dict__.pop("observers", None)


def expert_stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """The stacks of a model by name."""
    return {
        weight: ExpertStack(module, weight.rpartition(".")[2])
        for name, module in find_experts(model).items()
        for weight in stacks_of(name, module)
    }


def expert_sums(observers: Sequence[ExpertObserver], device: torch.device) -> Tensor:
    """The sums of all experts [experts of all stacks, 7], float64: those of x, w and dy beside each other."""
    nothing = torch.empty(0, 7, dtype=torch.float64, device=device)
    return torch.cat([nothing, *(torch.cat([observer.sums[name] for name in OPERANDS], 1) for observer in observers)])


def expert_records(step: int, layers: Sequence[tuple[int, int]], sums: Array) -> Array:
    """The `EXPERTS` records of a step.

    Args:
        layers: the number of each stack among the layers, and its experts.
        sums: of `expert_sums`.
    """
    records = np.zeros(len(layers), EXPERTS)
    start = 0
    for record, (layer, experts) in zip(records, layers, strict=True):
        found, start = sums[start : start + experts], start + experts
        rows = found[:, 0]
        record["step"], record["layer"], record["experts"] = step, layer, experts
        record["fullest"], record["idle"] = rows.argmax(), (rows == 0).sum()
        record["load"] = rows.max() / rows.mean() if rows.any() else np.nan
        squares, errors = found[:, 1::2], found[:, 2::2]  # [E, 3]
        with np.errstate(divide="ignore", invalid="ignore"):
            db = np.where((squares > 0) & np.isfinite(errors), 10 * np.log10(squares / errors), np.inf)
        record["worst"], least = db.argmin(0), db.min(0)
        record["sqnr"] = np.where(np.isfinite(least), least, np.nan)
    return records
