"""The rules over all samples of a run, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from octavo.telemetry.rules.rule import RULES, Rule
from octavo.telemetry.rules.sample import Grid, History, Mask, SampleGrids
from octavo.telemetry.schema import OPERANDS, Event, Records, WatchedLayer


class SampleRules:
    """Judges the samples of a run by all rules, and reports a fault when it begins, and again when it returns.

    Args:
        layers: of the model, by the number that records have for them. The experts of a stack are numbered after all
            layers, in the order of the stacks. An event names the worst of the experts that have a fault.

    Example:
        >>> watched = read_watch(run)  # doctest: +SKIP
        >>> rules = SampleRules(watched.layers)
        >>> for step in np.unique(watched.operands["step"]):
        ...     of_step = (records[records["step"] == step] for records in (watched.operands, watched.layer_records))
        ...     events = rules.check(*of_step)
    """

    def __init__(self, layers: Sequence[WatchedLayer]) -> None:
        self.layers = list(layers)  # may be replaced where a layer has changed its formats
        self._history = History(len(layers) + sum(layer.experts for layer in layers))
        self._faults: dict[Rule, Mask] = {}  # of the sample before

    def check(self, operands: Records, layer_records: Records) -> list[Event]:
        """The faults of a sample that the sample before did not have.

        Args:
            operands, layer_records: of one step, with the dtypes of `octavo.telemetry.schema`.
        """
        experts = [layer for layer in self.layers for _ in range(layer.experts)]
        sample = SampleGrids(operands, layer_records, [*self.layers, *experts])
        events = [event for rule in RULES for event in self._judge(rule, sample)]
        self._history.add(sample)
        return events

    def _judge(self, rule: Rule, sample: SampleGrids) -> Iterator[Event]:
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf are numbers that were found
            values, experts = self._of_layers(rule.number(sample, self._history))
            faults: Mask = values > rule.limit
        new = faults & ~self._faults.get(rule, np.zeros_like(faults))
        self._faults[rule] = faults
        for number, column in np.argwhere(new).tolist():
            operand, value = OPERANDS[column] if values.shape[1] > 1 else None, float(values[number, column])
            layer, expert = self.layers[number], int(experts[number, column])
            event = self._event(rule, _step(sample), layer, operand, value)
            of_expert = replace(event, message=f"expert {expert}: {event.message}", expert=expert)
            yield event if expert < 0 else of_expert

    def _of_layers(self, values: Grid) -> tuple[Grid, Grid]:
        """The numbers of the layers, of a stack that of the worst of its experts; and that expert, -1 for none."""
        end = len(self.layers)
        found, experts = values[:end].copy(), np.full_like(values[:end], -1)
        for i, layer in enumerate(self.layers):
            if layer.experts:
                begin, end = end, end + layer.experts
                worst = np.where(np.isnan(values[begin:end]), -np.inf, values[begin:end]).argmax(0)
                value = values[begin + worst, np.arange(values.shape[1])]
                known = ~np.isnan(value)
                found[i], experts[i] = np.where(known, value, found[i]), np.where(known, worst, -1)
        return found, experts

    def _event(self, rule: Rule, step: int, layer: WatchedLayer, operand: str | None, value: float) -> Event:
        fmt = "" if operand is None else layer.formats.get(operand, "eight bits")
        message = rule.words.format(value=value, limit=rule.limit, operand=operand, format=fmt)
        return Event(step, rule.name, layer.name, operand, value, rule.limit, message)


def _step(sample: SampleGrids) -> int:
    records = sample.operands if len(sample.operands) else sample.layer_records
    return int(records["step"][0])
