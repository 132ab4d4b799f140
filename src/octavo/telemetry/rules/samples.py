"""The rules over all samples of a run, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.telemetry.rules.rule import RULES, Rule
from octavo.telemetry.rules.sample import History, Mask, Records, Sample
from octavo.telemetry.schema import OPERANDS, Event, WatchedLayer


class SampleRules:
    """Judges the samples of a run by all rules, and reports a fault when it begins, and again when it returns.

    Args:
        layers: of the model, by the number that records have for them.

    Example:
        >>> watched = read_watch(run)  # doctest: +SKIP
        >>> rules = SampleRules(watched.layers)
        >>> for step in np.unique(watched.operands["step"]):
        ...     of_step = (records[records["step"] == step] for records in (watched.operands, watched.layer_records))
        ...     events = rules.check(*of_step)
    """

    def __init__(self, layers: Sequence[WatchedLayer]) -> None:
        self.layers = list(layers)  # may be replaced where a layer has changed its formats
        self._history = History(len(layers))
        self._faults: dict[Rule, Mask] = {}  # of the sample before

    def check(self, operands: Records, layer_records: Records) -> list[Event]:
        """The faults of a sample that the sample before did not have.

        Args:
            operands, layer_records: of one step, with the dtypes of `octavo.telemetry.schema`.
        """
        sample = Sample(operands, layer_records, self.layers)
        events = [event for rule in RULES for event in self._judge(rule, sample)]
        self._history.add(sample)
        return events

    def _judge(self, rule: Rule, sample: Sample) -> Iterator[Event]:
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf are numbers that were found
            values = rule.number(sample, self._history)
            faults: Mask = values > rule.limit
        new = faults & ~self._faults.get(rule, np.zeros_like(faults))
        self._faults[rule] = faults
        for number, column in np.argwhere(new).tolist():
            operand = OPERANDS[column] if values.shape[1] > 1 else None
            yield self._event(rule, sample, self.layers[number], operand, float(values[number, column]))

    def _event(self, rule: Rule, sample: Sample, layer: WatchedLayer, operand: str | None, value: float) -> Event:
        fmt = "" if operand is None else layer.formats.get(operand, "eight bits")
        message = rule.words.format(value=value, limit=rule.limit, operand=operand, format=fmt)
        return Event(_step(sample), rule.name, layer.name, operand, value, rule.limit, message)


def _step(sample: Sample) -> int:
    records = sample.operands if len(sample.operands) else sample.layer_records
    return int(records["step"][0])
