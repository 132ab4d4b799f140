"""Early warning in a run: the rules of `octavo.telemetry.rules`, and a step whose numbers are not finite.

Every `CHECK_EVERY` steps, and wherever the loop reads the loss, the losses and gradient norms of the steps since then
come from the device in one transfer. All ranks then decide alike: rank 0 judges, and tells the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from octavo.artifact.run import RunFolder
from octavo.telemetry import Watch
from octavo.telemetry.rules import LossRule, SampleRules
from octavo.telemetry.rules.losses import NEW
from octavo.telemetry.schema import OPERANDS, Event
from octavo.train.actions import recipe_layers
from octavo.train.checkpoint import TrainState
from octavo.train.config import Config
from octavo.train.metrics import Metrics
from octavo.train.nonfinite import Place, find_nonfinite
from octavo.train.ranks import gather
from octavo.train.recent_steps import RecentSteps, StepNumbers
from octavo.train.remedies import Remedies
from octavo.train.warning_report import Report

CHECK_EVERY = 10  # steps


class TrainingError(RuntimeError):
    """The loss or the gradient of the run is no longer finite, or a warning was to stop it."""


class EarlyWarning:
    """Judges a run as it goes, and acts as its settings say.

    Args:
        config: of the run: the table `watch`.
        state: of the run.
        run: its folder.
        recent: the steps since the last check.
        remedies: of the run.
        watch: the samples of the run; None where it is not watched.
        passes: computes the forward and backward passes of the step after so many others.
    """

    def __init__(
        self,
        config: Config,
        state: TrainState,
        run: RunFolder,
        recent: RecentSteps,
        remedies: Remedies,
        watch: Watch | None,
        passes: Callable[[int], object],
    ) -> None:
        self._config, self._state, self._run, self._recent = config.watch, state, run, recent
        self._remedies, self._watch, self._passes = remedies, watch, passes
        self._fp16 = config.precision == "fp16"
        self._losses = LossRule()
        self._samples = None if watch is None else SampleRules(watch.layers)

    def check(self, metrics: Metrics, console: Console) -> bool:
        """Judge the steps and samples since the last check. Whether the run went back to an earlier step.

        Raises:
            TrainingError: a loss or a gradient was not finite, and no layer could be promoted for it; or `on_warning`
                is "stop", and a rule has found a fault.
        """
        report = Report(metrics, console, self._watch, self._run, self._state)
        steps = self._recent.read()
        bad = next((numbers for numbers in steps if not (numbers.finite or self._is_skipped(numbers))), None)
        if bad is not None:
            self._repeat(bad, report)
            return True
        spikes = [event for numbers in steps if (event := self._losses.check(numbers.step, numbers.loss))]
        found: list[Event] = gather([*spikes, *self._judge_samples()])[0]
        spike = next((event for event in found if event.rule == "loss_spike"), None)
        if spike is not None and self._config.on_spike == "rollback":
            found.remove(spike)
            self._act(found, report)
            return self._roll_back(spike, report)
        self._act(found, report)
        return False

    def _is_skipped(self, numbers: StepNumbers) -> bool:
        """Whether the loss scaler of FP16 has skipped the step, as it does when it looks for the largest scale."""
        return self._fp16 and math.isfinite(numbers.loss)

    def _judge_samples(self) -> list[Event]:
        if self._watch is None or self._samples is None:
            return []
        self._samples.layers = list(self._watch.layers)
        return [event for sample in self._watch.take() for event in self._samples.check(*sample)]

    def _act(self, events: list[Event], report: Report) -> None:
        """Report events, and promote their layers or stop the run if the settings say so."""
        if not events:
            return
        done = self._remedies.promote(events) if self._config.on_warning == "promote" else {}
        report.warn(self._state.step, events, done)
        if self._config.on_warning == "stop":
            self._remedies.save()
            raise TrainingError(
                f"step {self._state.step}: stopped by {events[0].describe()}. watch.on_warning is stop; continue with "
                f"--resume {self._run.path} --watch.on-warning log"
            )

    def _repeat(self, bad: StepNumbers, report: Report) -> None:
        """Promote the layer with the first number that is not finite, and return to the step before it."""
        self._state.step = bad.step - 1  # the weights have not changed since
        place = find_nonfinite(self._state.model, self._state.device, lambda: self._passes(self._state.step))
        event = _event_of(bad, place)
        may_promote = self._config.on_warning == "promote" and not self._fp16
        done = self._remedies.promote([event]) if may_promote else {}
        report.warn(bad.step, [event], done)
        if not done:
            report.lost(*bad)
            raise TrainingError(self._hopeless(bad, place))

    def _hopeless(self, bad: StepNumbers, place: Place | None) -> str:
        self._remedies.wait()
        saved = self._run.checkpoints()
        return (
            f"step {bad.step}: the loss is {bad.loss} and the gradient's norm {bad.norm}; {_found(place)}. "
            f"{self._advice(place)}; "
            + (f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was saved yet")
        )

    def _advice(self, place: Place | None) -> str:
        general = "Lower learning_rate or clip, or keep sensitive layers in BF16 with skip"
        if self._config.on_warning != "promote":
            return f"{general}, or set watch.on_warning to promote"
        if place is None:
            return general
        is_converted = place.layer in recipe_layers(self._state.model)
        why = "runs in BF16 by now" if is_converted else "is not converted: it never ran in FP8"
        return (
            f"{place.layer} {why}, so there is nothing to promote. Lower learning_rate or clip, or look at the data of "
            f"this step; --resume {self._run.path} goes on from the last checkpoint"
        )

    def _roll_back(self, spike: Event, report: Report) -> bool:
        """Return to a checkpoint from before the spike, if there is one and the limit is not reached."""
        limit = self._config.rollbacks
        spent = len(self._remedies.actions.rollbacks) >= limit
        rollback = None if spent else self._remedies.roll_back(spike.step - NEW)
        if rollback is None:
            why = f"watch.rollbacks is {limit}" if spent else "no checkpoint is older"
            self._act([replace(spike, message=f"{spike.message}; not rolled back: {why}")], report)
            return False
        self._losses.restart()
        report.go_back(spike, rollback)
        return True


def _event_of(bad: StepNumbers, place: Place | None) -> Event:
    operand = place.tensor if place is not None and place.tensor in (*OPERANDS, "y") else None
    layer = None if place is None else place.layer
    message = f"the loss is {bad.loss:g} and the gradient's norm {bad.norm:g}; {_found(place)}"
    expert = None if place is None else place.expert
    return Event(bad.step, "non_finite", layer, operand, None, None, message, expert=expert)


def _found(place: Place | None) -> str:
    if place is None:
        return "every number is finite when the layers of the step run one by one"
    return f"the first number that is not finite is in {place}"
