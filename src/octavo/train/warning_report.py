"""The warnings of a run: on the terminal, in metrics.jsonl, and as events."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from octavo.artifact.run import RunFolder
from octavo.telemetry import Event, Watch
from octavo.train.actions import Promotion, Rollback
from octavo.train.checkpoint import TrainState
from octavo.train.instrument import precision_of
from octavo.train.log import print_line
from octavo.train.metrics import Metrics

_SHOWN = 5  # warnings of a check that are printed
_ACTIONS = {"bf16": "promote", "e5m2": "e5m2"}


class Report:
    """Writes warnings to all three places; events only where the run is watched."""

    def __init__(
        self, metrics: Metrics, console: Console, watch: Watch | None, run: RunFolder, state: TrainState
    ) -> None:
        self._metrics, self._console, self._watch, self._run, self._state = metrics, console, watch, run, state

    def warn(self, step: int, events: Sequence[Event], done: Mapping[Event, Promotion]) -> None:
        """Report events, and the promotion of each for which there is one."""
        for event in events:
            promotion = done.get(event)
            self._write(replace(event, action=_ACTIONS[promotion.to]) if promotion else event)
        for event in events[:_SHOWN]:
            self._print(event, _words(done[event]) if event in done else "")
        if len(events) > _SHOWN:
            print_line(
                self._console, f"warning: {len(events) - _SHOWN} more of step {step}, in {self._run.path / 'watch'}"
            )
        for event in events[_SHOWN:]:
            if event in done:
                print_line(self._console, f"warning: step {event.step}{_words(done[event])}")
        found = Counter(event.rule for event in events)
        record: dict[str, Any] = {"warnings": dict(found)}
        if done:
            record["promoted"] = {promotion.layer: promotion.to for promotion in done.values()}
            record["precision"] = precision_of(self._state.model, self._state.device)
            if self._watch is not None:
                self._watch.refresh()
        self._metrics.write(step, **record)
        self._metrics.draw(step, {f"warnings/{rule}": count for rule, count in found.items()})

    def go_back(self, spike: Event, rollback: Rollback) -> None:
        """Report that the run went back to a checkpoint. The metrics of later steps are dropped."""
        self._metrics.go_back(rollback.to)
        if self._watch is not None:
            self._watch.undo_events(rollback.to)
        self._write(replace(spike, action="rollback"))
        self._print(spike, f"; back to the checkpoint of step {rollback.to}, with the batches after these")
        self._metrics.write(rollback.to, warnings={spike.rule: 1}, rolled_back_from=rollback.step)

    def lost(self, step: int, loss: float, norm: float) -> None:
        """Log the step that ended the run, so that its last loss is not taken for its result."""
        self._metrics.write(step, loss=loss, gradient_norm=norm)

    def _write(self, event: Event) -> None:
        if self._watch is not None:
            self._watch.write_event(event)

    def _print(self, event: Event, action: str) -> None:
        print_line(self._console, f"warning: step {event.step}: {event.describe()}{action}")


def _words(promotion: Promotion) -> str:
    moved = "runs in BF16" if promotion.to == "bf16" else "has gradients in e5m2"
    return f"; {promotion.layer} {moved} from now on"
