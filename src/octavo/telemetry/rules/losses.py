"""The rule over the losses of a run: a loss spike."""

import math
from collections import deque

import numpy as np

from octavo.telemetry.schema import Event

NEW = 3  # steps whose median loss is judged: one hard batch is no spike
BEFORE = 64  # steps before them that it is compared with
FEWEST = 16  # of which there must be so many
DEVIATIONS = 8.0
LEAST = 0.5  # nats above the median that are no spike, however even the losses were


class LossRule:
    """Finds a loss spike: the median of the last three losses is far above that of those before.

    The limit is the median + 8 standard deviations, at least 0.5. The deviation is 1.4826 times the median absolute
    deviation, which a few losses far off do not change. While a spike lasts, its losses do not count as those before.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=BEFORE)
        self._new: deque[float] = deque(maxlen=NEW)
        self._fault = False

    def check(self, step: int, loss: float) -> Event | None:
        """Take the loss of a step; the event if a spike begins with it. A loss that is not finite does not count."""
        if not math.isfinite(loss):
            return None
        if len(self._new) == NEW and not self._fault:
            self._before.append(self._new[0])
        self._new.append(loss)
        if len(self._before) < FEWEST or len(self._new) < NEW:
            return None
        value, limit = float(np.median(self._new)), self._limit()
        began = value > limit and not self._fault
        self._fault = value > limit
        message = f"the loss of the last steps is {value:.4g}: the steps before allow {limit:.4g}"
        return Event(step, "loss_spike", None, None, value, limit, message) if began else None

    def restart(self) -> None:
        """Forget the spike: the run went back to a step before it."""
        self._new.clear()
        self._fault = False

    def _limit(self) -> float:
        losses = np.array(self._before)
        median = float(np.median(losses))
        deviation = 1.4826 * float(np.median(np.abs(losses - median)))
        return median + max(DEVIATIONS * deviation, LEAST)
