"""The measurement of a training step: from the buffers of the layers to the records of a sample.

A full sample has all numbers. A brief one has those that rules judge, for a fraction of the cost: it leaves out
gradients, the change of the weights, histograms, and what quantization loses in decibels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from octavo.ops.observation import Sampling
from octavo.ops.statistics import MAXIMA, WIDTH, clear_statistics
from octavo.telemetry.gradients import WeightStatistics
from octavo.telemetry.layers import Layers, gate_and_up
from octavo.telemetry.records import LAYER_MAXIMA, alignment_records, combined, layer_records, operand_records
from octavo.telemetry.storage import Records
from octavo.telemetry.transfer import Transfer


@dataclass(frozen=True)
class Sample:
    """The records of one sampled step: arrays of `OPERAND` and `LAYER` (`octavo.telemetry.schema`).

    A brief sample has no histogram (all numbers that are not zero are in the last of the binades), and NaN where it has
    no number: sqnr, zero_rows, and of the layers all but `alignment`.
    """

    step: int
    operands: Records
    layer_records: Records
    brief: bool = False


class Measurement:
    """Measures the steps of a model, one at a time.

    Args:
        model: on its device.
        layers: of the model, to which observers are attached.
        rows: of each operand that are read.

    Attributes:
        full, brief: the kind of sample that the step has; neither where it has none.

    Raises:
        ValueError: the model is watched already.
    """

    def __init__(self, model: nn.Module, layers: Layers, rows: int) -> None:
        self._layers, self._rows, self._device = layers, rows, _device_of(model)
        self.full = self.brief = False
        layers.attach(self._device)
        self._weights = WeightStatistics(layers.modules, gate_and_up(model), rows, self._device)
        self._cleared = [clear_statistics(torch.empty_like(stats)) for stats in layers.stats]
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def largest_of_ranks(self, number: int) -> int:
        """The largest of the numbers that the ranks have. Waits for it."""
        tables = [(torch.empty(0, 0, dtype=torch.float64, device=self._device), 0)]
        return Transfer(tables, number).wait()[1]

    def begin(self, *, full: bool, brief: bool) -> None:
        """Decide about the step that comes next; `full` goes before `brief`."""
        self.full, self.brief = full, brief and not full
        if (full or brief) and self._cleared:
            torch._foreach_copy_(self._layers.stats, self._cleared)
        self._weights.clear()
        Sampling.request(self, self._rows if full or brief else 0, brief=self.brief)

    def read_gradients(self) -> None:
        """Read the gradients of the weights, if the step has a full sample."""
        if self.full:
            self._weights.read_gradients()

    @torch.no_grad()
    def end(self, step: int, interval: int) -> Callable[[], tuple[Sample, int]]:
        """Combine the statistics of all ranks, and begin to copy them to the host.

        Returns:
            a function that waits for the copy: the sample of `step`, and the largest `interval` of the ranks.
        """
        brief = self.brief
        nothing = torch.empty(0, WIDTH, dtype=torch.float64, device=self._device)  # no layer may be converted
        operands = torch.cat([nothing, *self._layers.stats]), len(MAXIMA)
        layers = (self._weights.alignments(), 0) if brief else (self._weights.stats(), len(LAYER_MAXIMA))
        transfer = Transfer((operands, layers), interval)

        def finish() -> tuple[Sample, int]:
            (operand_stats, layer_stats), largest = transfer.wait()
            records = self._operand_records(step, operand_stats), self._layer_records(step, layer_stats, brief=brief)
            return Sample(step, *records, brief), largest

        return finish

    def close(self) -> None:
        """Leave the model as it was before."""
        Sampling.request(self, 0)
        for hook in self._hooks:
            hook.remove()
        self._layers.detach()

    def _operand_records(self, step: int, stats: Any) -> Records:
        layers, operands, places = self._layers.operands()
        return operand_records(step, layers, operands, combined(stats, places))

    def _layer_records(self, step: int, stats: Any, *, brief: bool) -> Records:
        if brief:
            return alignment_records(step, self._weights.pairs, stats)
        return layer_records(step, self._layers.sizes(), stats)

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
