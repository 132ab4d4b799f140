"""What has surely run before what: streams of the CPU that remember it as streams of a GPU would enforce it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Event:
    """What had run in a stream when the event was recorded."""

    def __init__(self) -> None:
        self.before: frozenset[str] = frozenset()

    def record(self, stream: Any = None) -> None:
        self.before = frozenset((stream or torch.cpu.current_stream()).before)


class Stream:
    """Work in a stream runs after the earlier work there, and after what the stream waited for; nothing else."""

    def __init__(self, priority: int = 0) -> None:
        self.before: set[str] = set()

    def wait_stream(self, stream: Any) -> None:
        self.before |= stream.before

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


def run(work: str) -> None:
    """Note that `work` runs in the current stream."""
    torch.cpu.current_stream().before.add(work)


def has_run(work: str) -> bool:
    """True if work that runs now in the current stream runs after `work`."""
    return work in torch.cpu.current_stream().before


@contextmanager
def ordered_streams() -> Iterator[None]:
    """In the block the CPU has such streams."""
    cpu: Any = torch.cpu
    names = {"Stream": Stream, "Event": Event, "_default_cpu_stream": Stream(), "_current_stream": Stream()}
    before = {name: getattr(cpu, name) for name in names}
    names["_current_stream"] = names["_default_cpu_stream"]
    try:
        for name, value in names.items():
            setattr(cpu, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(cpu, name, value)
