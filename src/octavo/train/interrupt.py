"""SIGINT, SIGTERM and SIGHUP ask a run to stop after its current step; a second signal acts at once.

SIGHUP comes when a terminal closes or an ssh connection ends. A signal that is ignored when the run starts, as SIGHUP
under `nohup`, stays ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Interrupt:
    """Holds the number of the signal that came; 0 if none came."""

    number: int = 0


def name_of(number: int) -> str | None:
    """The name of a signal by its number; None for 0."""
    return signal.Signals(number).name if number else None


@contextmanager
def delay_interrupts() -> Iterator[Interrupt]:
    """Note the signals within the block instead of acting on them; give their handlers back after it."""
    state = Interrupt()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}

    def note(number: int, frame: FrameType | None) -> None:
        state.number = number
        for each in before:
            signal.signal(each, before[each])

    for number in before:
        signal.signal(number, note)
    try:
        yield state
    finally:
        for number in before:
            signal.signal(number, before[number])
