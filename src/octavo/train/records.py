"""Reading the metrics.jsonl of runs in order to compare them (`octavo.train.metrics` writes that file)."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.artifact.files import ArtifactError, parse_object, read_json
from octavo.artifact.run import RunFolder
from octavo.train.declaration import flatten
from octavo.train.tables import replace_former


@dataclass(frozen=True)
class RunRecord:
    """The settings and the measurements of a run, read from its files.

    Attributes:
        path: its folder.
        settings: those of its config.json.
        evaluations: step to evaluation loss.
        tokens_per_second: the median over the log records; None without one.
        peak_memory: bytes; None where the run did not record it.
        step: the last step that was logged.
    """

    path: Path
    settings: dict[str, Any]
    evaluations: dict[int, float]
    tokens_per_second: float | None
    peak_memory: int | None
    step: int


def read_run(path: Path) -> RunRecord:
    """Read what the run in the folder `path` logged.

    Raises:
        ArtifactError: the folder is no run, or its log is damaged.
    """
    run = RunFolder(path)
    run.check()
    records = read_records(run.metrics)
    speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second") is not None]
    memory = [r["peak_memory"] for r in records if r.get("peak_memory") is not None]
    return RunRecord(
        path,
        read_json(run.config),
        {r["step"]: r["evaluation_loss"] for r in records if r.get("evaluation_loss") is not None},
        statistics.median(speeds) if speeds else None,
        max(memory) if memory else None,
        max((r["step"] for r in records), default=0),
    )


def different_settings(of_runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings in which runs differ, other than their folders: name to the value of each run."""
    settings = [replace_former(flatten(each, ("recipe",))) for each in of_runs]
    if all(isinstance(each.get("recipe"), Mapping) for each in settings):
        settings = [each | _leaves("recipe", each.pop("recipe")) for each in settings]
    elif any("recipe" in each for each in settings):  # a preset is its name alone
        settings = [each | {"recipe": recipe_name(each)} for each in settings]
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name) for each in settings] for name in names if name not in ("out", "derived")}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def _leaves(name: str, value: Any) -> dict[str, Any]:
    """`value` by its name, or if it is a mapping, all that it holds by names such as recipe.y.x.format."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {path: leaf for key, entry in value.items() for path, leaf in _leaves(f"{name}.{key}", entry).items()}


def recipe_name(settings: Mapping[str, Any]) -> str:
    """The name of a run's recipe, which its settings hold as a name or as fields; "" if they have none."""
    recipe = settings.get("recipe", "")
    return str(recipe["name"] if isinstance(recipe, Mapping) else recipe)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl. A last line that is being written, or was cut short, is left out.

    Raises:
        ArtifactError: the file is missing, or a line is no JSON object.
    """
    if not path.is_file():
        raise ArtifactError(f"{path} is missing: the run has logged nothing")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [parse_object(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.endswith("\n")]
