"""The measurement of a training step: from the buffers of the layers to the records of a sample.

A full sample has all numbers. A brief one has those that rules judge, of fewer rows, for a fraction of the cost: it
leaves out gradients, the change of the weights, histograms, and what quantization loses in decibels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from octavo.nn.observer import ExpertObserver
from octavo.observation.brief_samples import BriefStore, clear
from octavo.observation.sampling import Sampling
from octavo.observation.statistics import BRIEF_MAXIMA, BRIEF_WIDTH, MAXIMA, WIDTH, clear_statistics
from octavo.telemetry.experts import (
    brief_expert_records,
    brief_tables,
    expert_alignments,
    expert_records,
    expert_sums,
    first_numbers,
)
from octavo.telemetry.gradients import WeightStatistics
from octavo.telemetry.layers import Layers, gate_and_up
from octavo.telemetry.records import (
    LAYER_MAXIMA,
    alignment_records,
    brief_operand_records,
    combined,
    layer_records,
    operand_records,
)
from octavo.telemetry.schema import EXPERTS, Records
from octavo.telemetry.transfer import Table, Transfer


@dataclass(frozen=True)
class Sample:
    """The records of one sampled step: arrays of `OPERAND`, `LAYER` and `EXPERTS` (`octavo.telemetry.schema`).

    Those of a brief sample are NaN where it has no number: `octavo.telemetry.records.brief_operand_records`. It has
    records of single experts, numbered after the layers, and none of the stacks of their matrices.
    """

    step: int
    operands: Records
    layer_records: Records
    experts: Records = field(default_factory=partial(np.empty, 0, EXPERTS))
    brief: bool = False


class Measurement:
    """Measures the steps of a model, one at a time.

    Args:
        model: on its device.
        layers: of the model, to which observers are attached.
        rows: of each operand that a full sample reads.

    Attributes:
        full, brief: the samples that the step has: either, both or none.

    Raises:
        ValueError: the model is watched already.
    """

    def __init__(self, model: nn.Module, layers: Layers, rows: int) -> None:
        self._layers, self._rows, self._device = layers, rows, _device_of(model)
        self.full = self.brief = False
        layers.attach(self._device)
        self._weights = WeightStatistics(layers.modules, gate_and_up(model), rows, self._device)
        self._firsts = first_numbers(len(layers.modules), layers.stacks)
        self._recorded = [(layer, len(observer.sums["x"])) for layer, observer in layers.experts]
        self._gate_and_up = [(layer, stack) for layer, stack in layers.stacks if stack.is_gate_and_up]
        self._cleared = [clear_statistics(torch.empty_like(stats)) for stats in layers.stats]
        self._store = BriefStore(layers.stats)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def largest_of_ranks(self, number: int) -> int:
        """The largest of the numbers that the ranks have. Waits for it."""
        tables = [(torch.empty(0, 0, dtype=torch.float64, device=self._device), 0)]
        return Transfer(tables, number).wait()[1]

    def begin(self, *, full: bool, brief: bool) -> None:
        """Decide about the step that comes next."""
        self.full, self.brief = full, brief
        if (full or brief) and self._cleared:
            torch._foreach_copy_(self._layers.stats, self._cleared)
        for _, observer in self._layers.experts:
            if full:
                torch._foreach_zero_(list(observer.sums.values()))
            for table in observer.brief.values() if brief else ():
                clear(table)
        self._weights.clear()
        self._store.clear()
        Sampling.request(self, self._rows if full else 0, brief=brief)

    def read_gradients(self) -> None:
        """Read the gradients of the weights, if the step has a full sample."""
        if self.full:
            self._weights.read_gradients()

    @torch.no_grad()
    def end(self, step: int, interval: int) -> Callable[[], tuple[list[Sample], int]]:
        """Combine the statistics of all ranks, and begin to copy them to the host.

        Returns:
            a function that waits for the copy: the samples of `step`, and the largest `interval` of the ranks.
        """
        nothing = torch.empty(0, WIDTH + BRIEF_WIDTH, dtype=torch.float64, device=self._device)
        stats = torch.cat([nothing, *self._layers.stats])  # no layer may be converted
        observers = [observer for _, observer in self._layers.experts]
        kinds: list[tuple[Callable[..., Sample], list[Table]]] = []
        if self.full:
            kinds.append((self._full, self._full_tables(stats[:, :WIDTH], observers)))
        if self.brief:
            kinds.append((self._brief, self._brief_tables(stats[:, WIDTH:], observers)))
        transfer = Transfer([table for _, tables in kinds for table in tables], interval)

        def finish() -> tuple[list[Sample], int]:
            found, largest = transfer.wait()
            arrays = iter(found)
            return [make(step, *islice(arrays, len(tables))) for make, tables in kinds], largest

        return finish

    def close(self) -> None:
        """Leave the model as it was before."""
        Sampling.request(self, 0)
        self._store.close()
        for hook in self._hooks:
            hook.remove()
        self._layers.detach()

    def _full_tables(self, stats: torch.Tensor, observers: Sequence[ExpertObserver]) -> list[Table]:
        sums = expert_sums(observers, self._device)
        return [(stats, len(MAXIMA)), (self._weights.stats(), len(LAYER_MAXIMA)), (sums, 0)]

    def _brief_tables(self, stats: torch.Tensor, observers: Sequence[ExpertObserver]) -> list[Table]:
        stacks = [stack for _, stack in self._gate_and_up]
        alignments = torch.cat([self._weights.alignments(), expert_alignments(stacks, self._device)])
        of_experts = brief_tables(observers, self._device)
        return [(self._store.add_to(stats), len(BRIEF_MAXIMA)), (alignments, 0), (of_experts, len(BRIEF_MAXIMA))]

    def _full(self, step: int, operand_stats: Any, layer_stats: Any, sums: Any) -> Sample:
        layers, operands, places = self._layers.operands()
        records = operand_records(step, layers, operands, combined(operand_stats, places, len(MAXIMA)))
        of_layers = layer_records(step, self._layers.sizes(), layer_stats)
        return Sample(step, records, of_layers, expert_records(step, self._recorded, sums))

    def _brief(self, step: int, operand_stats: Any, alignments: Any, of_experts: Any) -> Sample:
        layers, operands, places = self._layers.operands()
        stats = combined(operand_stats, places, len(BRIEF_MAXIMA))
        firsts = [(self._firsts[layer], count) for layer, count in self._recorded]
        records = brief_operand_records(step, layers, operands, stats), brief_expert_records(step, firsts, of_experts)
        numbers = [(self._firsts[layer] + e,) for layer, stack in self._gate_and_up for e in range(stack.count)]
        aligned = alignment_records(step, [*self._weights.pairs, *numbers], alignments)
        return Sample(step, np.concatenate(records), aligned, brief=True)

    def _before_update(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if self.full:
            self._weights.before_update(_parameters(optimizer))

    def _after_update(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if self.full:
            self._weights.after_update(_parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _device_of(model: nn.Module) -> torch.device:
    """That of the first parameter; of weights that are kept on the host, and computed with on a GPU, the GPU."""
    parameter = next(model.parameters())
    if hasattr(parameter, "device_mesh"):
        kind = parameter.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return parameter.device
