"""The experts of a watched model: a stack of their matrices as one layer, and which expert is worst.

load      rows of the fullest expert / mean rows of an expert: 1 is even
worst     the expert whose operand has the lowest SQNR in the sample, 10 log10(sum(x^2) / sum((x - x_q * scale)^2))
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.expert_conversion import find_experts, stacks_of
from octavo.nn.experts import Experts
from octavo.nn.observer import ExpertObserver
from octavo.nn.weight_cache import local_part
from octavo.observation.statistics import BRIEF_WIDTH, sampled_rows
from octavo.recipe import Recipe
from octavo.telemetry.records import brief_operand_records
from octavo.telemetry.schema import EXPERTS, OPERANDS, Array

ALIGNED_ROWS = 16  # of an expert's gate and up, in a brief sample


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
    def count(self) -> int:
        """The number of experts, of all ranks."""
        return self.weight.shape[0]

    @property
    def is_gate_and_up(self) -> bool:
        return self.leaf == Experts.matrices[0]

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


def first_numbers(layers: int, stacks: Sequence[tuple[int, ExpertStack]]) -> dict[int, int]:
    """The number of expert 0 of each stack, by the number of its layer.

    The records of brief samples number single experts after the layers, in the order of the stacks.
    """
    ends = accumulate((stack.count for _, stack in stacks), initial=layers)
    return {layer: first for (layer, _), first in zip(stacks, ends, strict=False)}


def brief_tables(observers: Sequence[ExpertObserver], device: torch.device) -> Tensor:
    """The numbers of brief samples [3 * experts of all stacks, BRIEF_WIDTH]: of each expert x, w and dy."""
    nothing = torch.empty(0, BRIEF_WIDTH, dtype=torch.float64, device=device)
    each = (torch.stack([observer.brief[name] for name in OPERANDS], 1).flatten(0, 1) for observer in observers)
    return torch.cat([nothing, *each])


def brief_expert_records(step: int, firsts: Sequence[tuple[int, int]], tables: Array) -> Array:
    """The `OPERAND` records of single experts in a brief sample.

    Args:
        firsts: of each stack that is recorded, the number of its expert 0, and its experts.
        tables: of `brief_tables`.
    """
    numbers = np.concatenate([np.empty(0, int), *(np.arange(first, first + count) for first, count in firsts)])
    operands = np.tile(np.arange(len(OPERANDS)), len(numbers))
    return brief_operand_records(step, numbers.repeat(len(OPERANDS)), operands, tables)


def expert_alignments(stacks: Sequence[ExpertStack], device: torch.device) -> Tensor:
    """The sum of |cosine| of rows of gate and up, and their number, by expert: float64 [experts of all stacks, 2].

    A rank that holds a part of the experts leaves the others at 0.
    """
    table = torch.zeros(sum(stack.count for stack in stacks), 2, dtype=torch.float64, device=device)
    end = 0
    for stack in stacks:
        begin, end = end + first_matrix(stack.weight), end + stack.count
        w = local_part(stack.weight).detach()
        if len(w):
            index = sampled_rows(w.shape[1] // 2, ALIGNED_ROWS, w.device)
            gate, up = (half[:, index].float() for half in w.chunk(2, 1))
            cosine = F.cosine_similarity(gate, up, dim=2).abs().sum(1)
            found = torch.stack([cosine, torch.full_like(cosine, len(index))], 1)
            table[begin : begin + len(w)] = found.to(device, torch.float64)
    return table


def first_matrix(weight: Any) -> int:
    """The number of the first matrix that this rank holds."""
    if not hasattr(weight, "__create_chunk_list__"):
        return 0
    [chunk] = weight.__create_chunk_list__()  # of a DTensor: two dimensions of a mesh may both divide the matrices
    return int(chunk.offsets[0])


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
