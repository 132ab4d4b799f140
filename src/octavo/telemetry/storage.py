"""The files of a watched run: appending to them while it runs, and reading them, then or later.

A sample is appended as a whole by one write. A record that a kill or a full disk cut short is not read, and the next
writer removes it. When the records reach the limit in bytes, every second sampled step is dropped, and the interval
between samples doubles, so that the samples stay evenly spaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.artifact.atomic_folder import write_error
from octavo.artifact.files import ArtifactError, read_json, replace_file
from octavo.telemetry.schema import EXPERTS, LAYER, OPERAND, VERSION, Event, Records, WatchedLayer

LIMIT = 500_000_000
_COPIED = 1 << 16  # records that thinning holds in memory at once
_FILES = {"operands.bin": OPERAND, "layers.bin": LAYER, "experts.bin": EXPERTS}

NO_EXPERTS = np.empty(0, EXPERTS)


@dataclass(frozen=True)
class Watched:
    """What a run recorded.

    Attributes:
        interval: the steps between samples now.
        layers: by the number that records have for them.
        operands, layer_records, experts: arrays of `OPERAND`, `LAYER` and `EXPERTS`, in the order of the steps, mapped
            from the files.
        events: in the order in which they were found.
        damaged: the numbers of the lines in events.jsonl that are no events.
    """

    interval: int
    layers: list[WatchedLayer]
    operands: Records
    layer_records: Records
    events: list[Event]
    damaged: Sequence[int] = ()
    experts: Records = field(default_factory=NO_EXPERTS.copy)


def watch_folder(run: Path) -> Path:
    """The folder of the watch in the folder of a run."""
    return run / "watch"


def read_watch(run: Path) -> Watched:
    """Read the watch in the folder of a run, which may still be written.

    Raises:
        ArtifactError: the run was not watched, or its records are damaged or of another version of the schema.
    """
    folder = watch_folder(run)
    interval, layers = _read_layers(run)
    events = [event for _, event in _read_events(folder / "events.jsonl")]
    operands, layer_records, experts = (_read_records(folder / name, dtype) for name, dtype in _FILES.items())
    return Watched(
        interval,
        layers,
        operands,
        layer_records,
        [event for event in events if event is not None],
        [number for number, event in enumerate(events, 1) if event is None],
        experts,
    )


class WatchWriter:
    """Appends the samples and events of a run. One program at a time writes them.

    Args:
        run: the folder of the run, which exists.
        layers: of the model. The order gives the layers their numbers.
        interval: the steps between samples. A resumed run whose samples were thinned continues at the interval that it
            had then: see `interval`.
        limit: the largest size of the records, in bytes.
        resumed_at: the step at which the run continues; samples and events of later steps are dropped. 0 begins anew.

    Raises:
        FileExistsError: the folder has records already, and `resumed_at` is 0.
        ArtifactError: the records of the resumed run are damaged, of other layers, or of another version of the schema.
        WriteError: the disk refused a write.
    """

    def __init__(
        self,
        run: Path,
        layers: Sequence[WatchedLayer],
        *,
        interval: int,
        limit: int = LIMIT,
        resumed_at: int = 0,
    ) -> None:
        self.folder, self.limit, self.interval = watch_folder(run), limit, interval
        self._files = {self.folder / name: dtype for name, dtype in _FILES.items()}
        self._events = self.folder / "events.jsonl"
        self._layers = list(layers)
        if not resumed_at:
            self._check_empty()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if resumed_at and (self.folder / "layers.json").exists():
                self.interval = max(interval, self._former_interval(run))
            self.drop_after(resumed_at)
            self._drop_events_after(resumed_at)
            self.write_layers(layers)
        except OSError as error:
            raise write_error(self.folder, error) from error

    def write_layers(self, layers: Sequence[WatchedLayer]) -> None:
        """Replace the description of the layers. Their number and order must stay."""
        self._layers = list(layers)
        described = {"version": VERSION, "interval": self.interval, "layers": [layer.to_dict() for layer in layers]}
        replace_file(self.folder / "layers.json", json.dumps(described, indent=1) + "\n")

    def write(self, operands: Records, layer_records: Records, experts: Records = NO_EXPERTS) -> None:
        """Append the records [n] `OPERAND`, [m] `LAYER` and [k] `EXPERTS` of one step."""
        try:
            for path, records in zip(self._files, (operands, layer_records, experts), strict=True):
                _append(path, records.tobytes())
            while sum(path.stat().st_size for path in self._files) > self.limit and self._thin():
                pass
        except OSError as error:
            raise write_error(self.folder, error) from error

    def write_event(self, event: Event) -> None:
        """Append an event."""
        try:
            _append(self._events, _line(event).encode())
        except OSError as error:
            raise write_error(self.folder, error) from error

    def drop_after(self, step: int) -> None:
        """Drop the samples of the steps after `step`, to which the run went back. Its events tell why, and stay."""
        for path, dtype in self._files.items():
            path.touch()
            steps = _read_records(path, dtype)["step"]
            count = int(np.searchsorted(steps, step, side="right")) if step else 0
            os.truncate(path, count * dtype.itemsize)

    def undo_events_after(self, step: int) -> None:
        """Mark the events of the steps after `step`, to which the run went back, as undone."""
        marked = [
            line if event is None or event.step <= step else _line(replace(event, undone=True))
            for line, event in _read_events(self._events)
        ]
        replace_file(self._events, "".join(marked))

    def _drop_events_after(self, step: int) -> None:
        lines = [line for line, event in _read_events(self._events) if event is None or event.step <= step]
        replace_file(self._events, "".join(lines))

    def _check_empty(self) -> None:
        if not any(path.is_file() and path.stat().st_size for path in (*self._files, self._events)):
            return
        steps = self._steps()
        last = max(int(steps[-1]) if len(steps) else 0, 1)
        raise FileExistsError(
            f"{self.folder} has the records of an earlier watch, up to step {last}: give octavo.watch another folder, "
            f"or resumed_at={last} to go on with the same model after that step"
        )

    def _former_interval(self, run: Path) -> int:
        """That of the watch which this one continues. An ArtifactError if it watched other layers."""
        interval, former = _read_layers(run)
        before, now = ({(layer.name, layer.shape) for layer in layers} for layers in (former, self._layers))
        if before != now or len(former) != len(self._layers):
            name, shape = min(before ^ now)
            raise ArtifactError(
                f"{self.folder} has records of another model: only one of the two has {name} of shape {list(shape)}. "
                "Give octavo.watch another folder"
            )
        return interval

    def _steps(self) -> Records:
        """The step of each record of an operand."""
        return _read_records(self.folder / "operands.bin", OPERAND)["step"]

    def _thin(self) -> bool:
        """Drop every second sampled step, and double the interval. False if a single step is left."""
        steps = np.unique(self._steps())
        if len(steps) < 2:
            return False
        for path, dtype in self._files.items():
            records, partial = _read_records(path, dtype), path.with_suffix(".partial")
            with partial.open("wb") as file:
                for start in range(0, len(records), _COPIED):
                    part = records[start : start + _COPIED]
                    file.write(part[np.isin(part["step"], steps[::2])].tobytes())
            partial.replace(path)
        self.interval *= 2
        self.write_layers(self._layers)
        return True


def _line(event: Event) -> str:
    return json.dumps(event.to_dict()) + "\n"


def _append(path: Path, data: bytes) -> None:
    """Append all of `data`, or nothing: after a part of a record, no later one could be read."""
    size = path.stat().st_size
    try:
        with path.open("ab", buffering=0) as file:
            written = file.write(data)
            if written < len(data):  # the disk is full: the rest of it says so
                file.write(data[written:])
    except OSError:
        os.truncate(path, size)
        raise


def _read_layers(run: Path) -> tuple[int, list[WatchedLayer]]:
    """The interval and the layers in layers.json."""
    path = watch_folder(run) / "layers.json"
    if not path.is_file():
        raise ArtifactError(
            f"{run} has no record of its layers (watch/layers.json is missing): it was not watched. octavo train "
            "watches a run unless [watch] interval is 0"
        )
    described = read_json(path)
    version = described.get("version")
    if version != VERSION:
        raise ArtifactError(
            f"{path} has version {version!r} of the schema, and this version of octavo reads version {VERSION}: read "
            "it with the octavo that wrote it"
        )
    try:
        return int(described["interval"]), [WatchedLayer.from_dict(layer) for layer in described["layers"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged: {type(error).__name__} {error}") from error


def _read_records(path: Path, dtype: np.dtype[Any]) -> Records:
    """The whole records of a file; an incomplete last one, which is being written or was cut short, is left out."""
    count = path.stat().st_size // dtype.itemsize if path.is_file() else 0
    return np.memmap(path, dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def _read_events(path: Path) -> list[tuple[str, Event | None]]:
    """The whole lines of a file with their events; the last, which is being written or was cut short, is left out."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [(line, _event_of(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _event_of(line: str) -> Event | None:
    """The event that a line of events.jsonl holds; None if it is damaged."""
    try:
        event = Event.from_dict(json.loads(line))
    except (ValueError, TypeError):
        return None
    return event if isinstance(event.step, int) and isinstance(event.rule, str) else None
