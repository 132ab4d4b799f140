"""The files of a watched run: appending to them while it runs, and reading them, then or later.

A sample is appended as a whole by one write. A record that a kill or a full disk cut short is not read, and the next
writer removes it. When the records reach the limit in bytes, every second sampled step is dropped, and the interval
between samples doubles, so that the samples stay evenly spaced.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from octavo.checkpoint.files import ArtifactError, read_json, replace_file, whole_lines
from octavo.checkpoint.folder import writing
from octavo.util import build, finite, reading

# ---- The records of a watched run.
#
# RUN/watch/
#   layers.json      the layers, by the number that records have for them, and the version of this schema
#   operands.bin     one `OPERAND` record for each operand of each layer and sampled step
#   layers.bin       one `LAYER` record for each layer and sampled step
#   experts.bin      one `EXPERTS` record for each stack of experts' matrices and sampled step
#   events.jsonl     one `Event` a line
#
# The .bin files hold records of a fixed size, little endian, in the order of the steps, and nothing else.
# `docs/watch.md` says what each number means.


Array = np.ndarray[Any, Any]
Records = Array  # of `OPERAND`, `LAYER` or `EXPERTS`

VERSION = 1
OPERANDS = ("x", "w", "dy")  # by the number in OPERAND["operand"]
GEMMS = ("y", "dx", "dw", "recomputation")
# Entry k of the binades is FULL_SHARE times the share of elements with 2^(e-k) <= |x| < 2^(e-k+1), where 2^e is the
# largest power of two up to amax. The last entry has all smaller ones. Zeros are the rest: in none.
BINADES = 40
FULL_SHARE = 65535

# Bits of OPERAND["flags"]
RECOMPUTED = 1  # activation checkpointing computed the operand a second time in this step
UNQUANTIZED = 2  # the GEMMs read it in high precision: scales and errors are those of no format, NaN

OPERAND = np.dtype(
    [
        ("step", "<u4"),
        ("layer", "<u2"),
        ("operand", "u1"),
        ("flags", "u1"),
        ("amax", "<f4"),
        ("rms", "<f4"),
        ("scale", "<f4"),  # the largest; x ≈ x_q * scale
        ("smallest_scale", "<f4"),
        ("saturated", "<f4"),  # share of elements beyond the largest code, which they became
        ("flushed", "<f4"),  # share of elements that were not zero and became zero
        ("sqnr", "<f4"),  # dB
        ("kurtosis", "<f4"),  # fourth standardized moment: 3 of normal numbers
        ("crest", "<f4"),  # amax / rms
        ("zero_rows", "<f4"),  # share of rows that are all zero
        ("nonfinite", "<f4"),  # share of elements
        ("shift_lost", "<f4"),  # of dy: share of the bytes of g, not zero, that became zero in h_q of dw; else 0
        ("gap", "<f4"),  # of a scale fixed before: log2(amax that the scale expects / amax that came); else NaN
        ("binades", "<u2", (BINADES,)),  # see BINADES
    ]
)

LAYER = np.dtype(
    [
        ("step", "<u4"),
        ("layer", "<u2"),
        ("pad", "<u2"),
        ("gradient_norm", "<f4"),  # of the weight, before clipping
        ("gradient_amax", "<f4"),
        ("gradient_nonfinite", "<f4"),  # share of elements
        ("weight_smallest", "<f4"),
        ("weight_largest", "<f4"),
        ("weight_norm", "<f4"),
        ("update_ratio", "<f4"),  # norm of the step's change of w / norm of w, over sampled rows
        ("alignment", "<f4"),  # of the gate and up layers of a SwiGLU: mean |cosine| of matching rows; else NaN
        ("gradient_binades", "<u2", (BINADES,)),
    ]
)

EXPERTS = np.dtype(
    [
        ("step", "<u4"),
        ("layer", "<u2"),  # the stack of their matrices
        ("experts", "<u2"),
        ("fullest", "<u2"),  # the expert with most rows
        ("idle", "<u2"),  # experts without a row
        ("worst", "<u2", (3,)),  # the expert whose x, w and dy have the lowest SQNR in the sample
        ("pad", "<u2"),
        ("load", "<f4"),  # rows of the fullest expert / mean rows of an expert
        ("sqnr", "<f4", (3,)),  # of the worst x, w and dy, dB; NaN if unknown
    ]
)


@dataclass(frozen=True)
class GemmRun:
    """The precision that a GEMM ran in."""

    precision: str  # "fp8", or the dtype of unquantized operands: "bf16", "fp16", "fp32"
    kernel: str  # the backend, such as "cublaslt" or "emulated"
    why: str = ""  # the reason, in words, where the precision or the kernel is not the fastest


@dataclass(frozen=True)
class WatchedLayer:
    """A layer of a watched model."""

    name: str  # in the model
    kind: str  # the name of its class
    shape: tuple[int, int]  # (N, K) of the whole weight
    recipe: str  # its name; "" where the layer was not converted
    formats: dict[str, str]  # of each operand, "bf16" where it is not quantized: {"x": "e4m3", ...}
    granularity: dict[str, str]  # of the scales of each operand, "" where it is not quantized
    gemms: dict[str, GemmRun]  # how y, dx, dw and the recomputation of y ran; a GEMM that did not run is missing
    experts: int = 0  # of a stack of experts' matrices, their number; 0 for another layer

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The layer of `asdict`. A KeyError, TypeError or ValueError if the fields are others, or of other kinds."""
        gemms = {name: build(GemmRun, run) for name, run in fields["gemms"].items()}
        rows, columns = fields["shape"]
        return build(cls, {**fields, "shape": (int(rows), int(columns)), "gemms": gemms})


@dataclass(frozen=True)
class Event:
    """A finding of a rule."""

    step: int  # the sampled step
    rule: str  # its name, such as "saturation_spike"
    layer: str | None  # its name; None for the whole model
    operand: str | None  # "x", "w", "dy" or "y"; None where the finding is of none
    value: float | None  # the number that was found; None where it is not finite
    limit: float | None  # the number that it passed; None where it is not finite
    message: str  # one sentence
    action: str | None = None  # what the trainer did: None, "promote", "e5m2" or "rollback"
    undone: bool = False  # the run went back to an earlier step later, so that its model has not seen this one
    expert: int | None = None  # the number of the expert that it is of, where the layer is a stack of experts' matrices

    def describe(self) -> str:
        """The rule, the layer and the message."""
        return f"{self.rule}: {self.layer + ': ' if self.layer else ''}{self.message}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without inf and NaN."""
        return dict(finite(asdict(self)))


def columns(records: Records) -> dict[str, Array]:
    """The fields of records, each a column; the binades are columns `binades_0` to `binades_39`.

    Example:
        >>> frame = pandas.DataFrame(columns(read_watch(run).operands))  # doctest: +SKIP
        >>> table = pyarrow.table(columns(read_watch(run).operands))  # doctest: +SKIP
    """
    found: dict[str, Array] = {}
    for name in records.dtype.names or ():
        field = records[name]
        found |= {name: field} if field.ndim == 1 else {f"{name}_{k}": column for k, column in enumerate(field.T)}
    return {name: np.ascontiguousarray(column) for name, column in found.items()}


# ---- The files.


LIMIT = 500_000_000
_FILES = {"operands.bin": OPERAND, "layers.bin": LAYER, "experts.bin": EXPERTS}

NO_EXPERTS = np.empty(0, EXPERTS)


@dataclass(frozen=True)
class Watched:
    """The records of a run: arrays that are mapped from the files, in the order of the steps."""

    interval: int  # the steps between samples now
    layers: list[WatchedLayer]  # by the number that records have for them
    operands: Records  # of `OPERAND`
    layer_records: Records  # of `LAYER`
    events: list[Event]  # in the order in which they were found
    damaged: Sequence[int] = ()  # the numbers of the lines in events.jsonl that are no events
    experts: Records = field(default_factory=NO_EXPERTS.copy)  # of `EXPERTS`


def watch_folder(run: str | Path) -> Path:
    """The folder of the watch in the folder of a run."""
    return Path(run) / "watch"


def read_watch(run: str | Path) -> Watched:
    """Read the watch in the folder of a run, which may still be written.

    Raises:
        ArtifactError: the run was not watched, or its records are damaged or of another version of the schema.
    """
    folder = watch_folder(run)
    interval, layers = _read_layers(run)
    lines = [event for _, event in _read_events(folder / "events.jsonl")]
    events, damaged = [event for event in lines if event], [at for at, event in enumerate(lines, 1) if not event]
    operands, layer_records, experts = (_read_records(folder / name, dtype) for name, dtype in _FILES.items())
    layer = max(int(records["layer"].max(initial=0)) for records in (operands, layer_records))
    operand = int(operands["operand"].max(initial=0))
    if layer >= len(layers) or operand >= len(OPERANDS):
        raise ArtifactError(
            f"the records of the watch are damaged: one is of layer {layer} and operand {operand}, and there are "
            f"{len(layers)} layers and {len(OPERANDS)} operands, counted from 0"
        )
    return Watched(interval, layers, operands, layer_records, events, damaged, experts)


class WatchWriter:
    """Appends the samples and events of a run, in its folder; raises the errors of `octavo.watch`. The order of
    `layers` gives them their numbers. A resumed run whose samples were thinned goes on at the `interval` that it had
    then. Samples and events of the steps after `resumed_at` are dropped; 0 begins anew."""

    def __init__(
        self, run: Path, layers: Sequence[WatchedLayer], *, interval: int, limit: int = LIMIT, resumed_at: int = 0
    ) -> None:
        self.folder, self.limit, self.interval = watch_folder(run), limit, interval
        self._files = {self.folder / name: dtype for name, dtype in _FILES.items()}
        self._events = self.folder / "events.jsonl"
        self._layers = layers
        if not resumed_at:
            self._check_empty()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if resumed_at and (self.folder / "layers.json").exists():
                self._go_on(run)
            self.drop_after(resumed_at)
            self._change_events_after(resumed_at, lambda event: "")
        self.write_layers(self._layers)

    def write_layers(self, layers: Sequence[WatchedLayer]) -> None:
        """Replace the description of the layers. Their number and order must stay."""
        self._layers = layers
        described = {"version": VERSION, "interval": self.interval, "layers": [asdict(layer) for layer in layers]}
        with writing(self.folder):
            replace_file(self.folder / "layers.json", json.dumps(described, indent=1) + "\n")

    def write(self, operands: Records, layer_records: Records, experts: Records = NO_EXPERTS) -> None:
        """Append the records [n] `OPERAND`, [m] `LAYER` and [k] `EXPERTS` of one step."""
        with writing(self.folder):
            for path, records in zip(self._files, (operands, layer_records, experts), strict=True):
                _append(path, records.tobytes())
            while sum(path.stat().st_size for path in self._files) > self.limit and self._thin():
                pass

    def write_event(self, event: Event) -> None:
        with writing(self.folder):
            _append(self._events, f"{json.dumps(event.to_dict())}\n".encode())

    def drop_after(self, step: int) -> None:
        """Drop the samples of the steps after `step`, to which the run went back. Its events tell why, and stay."""
        for path, dtype in self._files.items():
            path.touch()
            steps = _read_records(path, dtype)["step"]
            count = int(np.searchsorted(steps, step, side="right")) if step else 0
            os.truncate(path, count * dtype.itemsize)

    def undo_events_after(self, step: int) -> None:
        """Mark the events of the steps after `step`, to which the run went back, as undone."""
        self._change_events_after(step, lambda event: json.dumps(replace(event, undone=True).to_dict()) + "\n")

    def _change_events_after(self, step: int, line_of: Callable[[Event], str]) -> None:
        lines = _read_events(self._events)
        replace_file(self._events, "".join(line_of(e) if e and e.step > step else line for line, e in lines))

    def _check_empty(self) -> None:
        if not any(path.is_file() and path.stat().st_size for path in (*self._files, self._events)):
            return
        last = max(1, *_read_records(self.folder / "operands.bin", OPERAND)["step"][-1:].tolist())
        raise FileExistsError(
            f"{self.folder} has the records of an earlier watch, up to step {last}: give octavo.watch another folder, "
            f"or resumed_at={last} to go on with the same model after that step"
        )

    def _go_on(self, run: Path) -> None:
        """Take the interval of the watch before and how layers ran. An ArtifactError if it watched other layers."""
        try:
            interval, former = _read_layers(run)
        except ArtifactError as error:
            raise ArtifactError(f"{error}. Move {self.folder} out of the run, to watch it anew") from error
        before, now = ({(layer.name, layer.shape) for layer in layers} for layers in (former, self._layers))
        if before != now or len(former) != len(self._layers):
            name, shape = min(before ^ now)
            raise ArtifactError(
                f"{self.folder} has records of another model: only one of the two has {name} of shape {list(shape)}. "
                "Give octavo.watch another folder"
            )
        self.interval = max(self.interval, interval)
        self._layers = [now if now.gemms else before for now, before in zip(self._layers, former, strict=True)]

    def _thin(self) -> bool:
        """Drop every second sampled step, and double the interval. False if a single step is left."""
        steps = np.unique(_read_records(self.folder / "operands.bin", OPERAND)["step"])
        if len(steps) < 2:
            return False
        for path, dtype in self._files.items():
            records, partial = _read_records(path, dtype), path.with_suffix(".partial")
            records[np.isin(records["step"], steps[::2])].tofile(partial)
            partial.replace(path)
        self.interval *= 2
        self.write_layers(self._layers)
        return True


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


def _read_layers(run: str | Path) -> tuple[int, list[WatchedLayer]]:
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
    with reading(path, "a description of layers", ArtifactError):
        return int(described["interval"]), [WatchedLayer.from_dict(layer) for layer in described["layers"]]


def _read_records(path: Path, dtype: np.dtype[Any]) -> Records:
    """The whole records of a file; an incomplete last one, which is being written or was cut short, is left out."""
    count = path.stat().st_size // dtype.itemsize if path.is_file() else 0
    return np.memmap(path, dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def _read_events(path: Path) -> list[tuple[str, Event | None]]:
    """The whole lines of a file with their events; None for a line that is damaged."""
    found: list[tuple[str, Event | None]] = []
    for line in whole_lines(path):
        try:
            found.append((line, build(Event, json.loads(line))))
        except (ValueError, TypeError):
            found.append((line, None))
    return found
