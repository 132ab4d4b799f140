"""Reading a run for its report: the series of its metrics, its settings, and the watch.

A folder is a run if it holds one of these:

    metrics.jsonl         of `octavo train`, or of any loop: one object a line, with `step` and any of `SERIES`
    watch/                of `octavo.watch`
    trainer_state.json    of the Trainer of Hugging Face, also in checkpoint-N/
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.files import ArtifactError, read_json
from octavo.checkpoint.folder import RunFolder
from octavo.report.heat_maps import check_records
from octavo.train.run_records import SERIES, check_record, names_of_runs, read_records, recipe_name
from octavo.util import plural
from octavo.watching.storage import Watched, read_watch, watch_folder

# The names of the Trainer of Hugging Face, where they differ.
_OTHER_NAMES = {
    "eval_loss": "evaluation_loss",
    "grad_norm": "gradient_norm",
    "train_tokens_per_second": "tokens_per_second",
}


_NOT_WATCHED = (
    "The run was not watched, so its layers have no figures. octavo train watches unless watch.interval is 0; in a "
    "loop of your own, call octavo.watch."
)
_NO_SAMPLE = (
    "The watch has no sample yet. A loop of your own must call `step()` of the watch after each step of the optimizer."
)


@dataclass(frozen=True)
class Series:
    """A number over the steps of a run: `steps` ascending [n] int64, `values` [n] float64, NaN for inf and NaN."""

    steps: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]

    @property
    def finite(self) -> np.ndarray[Any, Any]:
        """The values that are numbers."""
        found: np.ndarray[Any, Any] = self.values[np.isfinite(self.values)]
        return found

    @property
    def last(self) -> float | None:
        """The last value; None if it is inf or NaN."""
        return float(self.values[-1]) if math.isfinite(self.values[-1]) else None

    @property
    def last_finite(self) -> tuple[int, float] | None:
        """The last value that is a number, after its step; None without one."""
        known = np.flatnonzero(np.isfinite(self.values))
        return (int(self.steps[known[-1]]), float(self.values[known[-1]])) if len(known) else None

    @property
    def wrong_steps(self) -> list[int]:
        """The steps whose value is inf or NaN."""
        return [int(step) for step in self.steps[~np.isfinite(self.values)]]


@dataclass(frozen=True)
class RunData:
    """All that a report shows of a run; empty or None where the run has no such record."""

    path: Path
    name: str  # of the folder; the whole path if two runs of a report have the same
    settings: Mapping[str, Any]
    series: Mapping[str, Series]
    precision: Mapping[str, Any] = field(default_factory=dict)  # the last of `octavo.train.step_metrics.precision_of`
    watched: Watched | None = None
    remarks: Sequence[str] = ()  # unusual things, each a sentence
    started: Mapping[str, Any] = field(default_factory=dict)  # the command, the machine and the versions
    written: str = ""  # the time of the last record (UTC)

    @property
    def recipe(self) -> str:
        """The name of its recipe; "" if it is not known."""
        return recipe_name(self.settings)

    @property
    def last_step(self) -> int:
        """The last step that was logged or sampled."""
        steps = [int(series.steps[-1]) for series in self.series.values()]
        if self.watched is not None and len(self.watched.operands):
            steps.append(int(self.watched.operands["step"][-1]))
        return max(steps, default=0)


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Read the runs in the folders `paths`, with distinct names. An ArtifactError if a folder is no run, or its metrics
    are damaged; a watch that cannot be read is a remark."""
    return [_read_run(path, name) for path, name in zip(paths, names_of_runs(paths), strict=True)]


def _read_run(path: Path, name: str) -> RunData:
    run, states = RunFolder(path), _trainer_states(path)
    if not path.is_dir():
        raise ArtifactError(f"{path} is no folder: give the folder of a run, which octavo train wrote")
    if not (run.metrics.is_file() or watch_folder(path).is_dir() or states):
        raise ArtifactError(
            f"{path} is no run: it has no metrics.jsonl, no watch/ and no trainer_state.json. Give the folder that "
            "octavo train, octavo.watch or the Trainer of Hugging Face wrote"
        )
    remarks = []
    records: list[dict[str, Any]] = []
    if run.metrics.is_file():
        records = read_records(run.metrics)
        if not run.metrics.read_bytes().endswith(b"\n") and run.metrics.stat().st_size:
            remarks.append("The last line of metrics.jsonl is incomplete: it is being written, or the run was killed.")
    elif states:
        records = _trainer_records(states[-1])
    series = read_series(records, str(path))
    if "loss" not in series:
        remarks.append("The run has logged no loss.")
    for key, each in series.items():
        if wrong := each.wrong_steps:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            remarks.append(f"{key.replace('_', ' ')} is inf or NaN at step {wrong[0]}{more}.")
    watched, remark = _read_watch(path)
    precision: dict[str, Any] = next((each["precision"] for each in reversed(records) if "precision" in each), {})
    settings = read_json(run.config) if run.config.is_file() and run.metrics.is_file() else {}
    started: dict[str, Any] = next((each["started"] for each in records if "started" in each), {})
    newest = (run.metrics if run.metrics.is_file() else path).stat().st_mtime
    written = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return RunData(path, name, settings, series, precision, watched, [*remarks, *remark], started, written)


def read_series(records: Iterable[Mapping[str, Any]], where: str) -> dict[str, Series]:
    """The series of `SERIES` in records; null, inf and NaN become NaN. The ArtifactError of a value that is no number
    begins with `where`."""
    points: dict[str, dict[int, float]] = {}
    for record in records:
        check_record(record, where)
        for key in SERIES:
            if key in record:
                points.setdefault(key, {})[record["step"]] = math.nan if record[key] is None else record[key]
    found = {}
    for key, by_step in points.items():
        steps, values = np.array(sorted(by_step.items()), np.float64).T
        found[key] = Series(steps.astype(np.int64), np.where(np.isfinite(values), values, math.nan))
    return found


def _read_watch(path: Path) -> tuple[Watched | None, list[str]]:
    if not watch_folder(path).is_dir():
        return None, [_NOT_WATCHED]
    try:
        watched = read_watch(path)
        check_records(watched)
    except ArtifactError as error:
        return None, [f"Figures of the layers are missing: {error}."]
    remarks = [] if len(watched.operands) else [_NO_SAMPLE]
    if watched.damaged:
        lines = ", ".join(map(str, watched.damaged[:5])) + (", ..." if len(watched.damaged) > 5 else "")
        remarks.append(
            f"watch/events.jsonl has {plural(len(watched.damaged), 'damaged line')}, left out here: line {lines}."
        )
    return watched, remarks


def _trainer_states(path: Path) -> list[Path]:
    """The records of the Trainer of Hugging Face, oldest first; that of the folder itself is the newest."""
    inner = [each for each in path.glob("checkpoint-*/trainer_state.json") if each.parent.name[11:].isdigit()]
    outer = [path / "trainer_state.json"] if (path / "trainer_state.json").is_file() else []
    return [*sorted(inner, key=lambda each: int(each.parent.name[11:])), *outer]


def _trainer_records(path: Path) -> list[dict[str, Any]]:
    history = read_json(path).get("log_history")
    if not isinstance(history, list) or not all(isinstance(each, dict) for each in history):
        raise ArtifactError(f"{path} must have a list log_history of objects")
    return [{_OTHER_NAMES.get(key, key): value for key, value in each.items()} for each in history]
