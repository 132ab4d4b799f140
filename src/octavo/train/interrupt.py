"""SIGINT and SIGTERM ask a run to stop after its current step; a second one stops it at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Holds the name of the signal that came, if any."""

    received: str | None = None


@contextmanager
def interrupt() -> Iterator[Interrupt]:
    """Within the block SIGINT and SIGTERM are noted instead of acted on; before and after they do as they did."""
    state = Interrupt()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: FrameType | None) -> None:
        state.received = signal.Signals(number).name
        for each in signals:
            signal.signal(each, before[each])

    for number in signals:
        signal.signal(number, note)
    try:
        yield state
    finally:
        for number in signals:
            signal.signal(number, before[number])
