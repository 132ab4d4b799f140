"""octavo compare: runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo_cli.display import print_table, say
from octavo_cli.options import AsJson

if TYPE_CHECKING:
    from octavo.train.records import RunRecord


def compare_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two or more runs of octavo train.")],
    as_json: AsJson = False,
) -> None:
    """Compare runs: losses by step, gaps, speed and memory.

    A gap is the relative difference between the evaluation losses of a run and of the first run. The runs may still be
    in progress.

    Example:

      octavo compare runs/bf16 runs/rowwise
    """
    from octavo.train.records import different_settings, read_run

    if len(runs) < 2:
        raise ValueError(f"compare takes two or more runs, got {len(runs)}")
    records = [read_run(path) for path in runs]
    different = different_settings([run.settings for run in records])
    if as_json:
        found = {"runs": [_summary(run, records[0]) for run in records], "different_settings": different}
        print(json.dumps(found, indent=2))
        return
    names = _names(runs)
    _print_losses(records, names)
    say()
    _print_summary(records, names)
    for name, values in different.items():
        say(f"{name.replace('_', '-')}: {', '.join(_text(value) for value in values)}")


def _print_losses(records: list[RunRecord], names: list[str]) -> None:
    first = records[0]
    gaps = ["gap"] if len(records) == 2 else [f"gap of {name}" for name in names[1:]]
    rows = []
    for step in sorted({step for run in records for step in run.evaluations}):
        losses = [_number(run.evaluations.get(step), ".4f") for run in records]
        rows.append((str(step), *losses, *(_percent(_gap(run, first, step)) for run in records[1:])))
    columns = ("step", *names, *gaps)
    print_table(columns, rows, right=columns, title="evaluation loss")


def _print_summary(records: list[RunRecord], names: list[str]) -> None:
    rows = [
        (
            name, str(run.step), _number(_final(run), ".4f"), _percent(_gap(run, records[0], _last(run))),
            _number(run.tokens_per_second, ",.0f"),
            _number(None if run.peak_memory is None else run.peak_memory / 1e9, ".2f"),
        )
        for name, run in zip(names, records, strict=True)
    ]  # fmt: skip
    columns = ("run", "steps", "final loss", "gap", "tokens/s", "peak memory, GB")
    print_table(columns, rows, right=columns[1:])


def _summary(run: RunRecord, first: RunRecord) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "steps": run.step,
        "evaluations": {str(step): loss for step, loss in run.evaluations.items()},
        "gaps": {str(step): gap for step in run.evaluations if (gap := _gap(run, first, step)) is not None},
        "final_loss": _final(run),
        "tokens_per_second": run.tokens_per_second,
        "peak_memory": run.peak_memory,
    }


def _last(run: RunRecord) -> int | None:
    return max(run.evaluations, default=None)


def _final(run: RunRecord) -> float | None:
    last = _last(run)
    return None if last is None else run.evaluations[last]


def _gap(run: RunRecord, first: RunRecord, step: int | None) -> float | None:
    """The loss of `run` relative to that of `first` at a step, minus 1; None if one of the two has no loss there."""
    if step is None or run is first or not (run.evaluations.get(step) and first.evaluations.get(step)):
        return None
    return run.evaluations[step] / first.evaluations[step] - 1


def _names(runs: list[Path]) -> list[str]:
    """The names of the folders, or their whole paths where two folders have one name."""
    names = [path.resolve().name for path in runs]
    return names if len(set(names)) == len(names) else [str(path) for path in runs]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.2%}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
