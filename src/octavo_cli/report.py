"""octavo report: what FP8 did in runs, as a page, on the terminal or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo_cli.display import print_facts, print_table, say
from octavo_cli.output import check_writable

if TYPE_CHECKING:
    from octavo.report.runs import RunData

_EVENTS = 8
_LINES = (("loss", "loss"), ("evaluation_loss", "evaluation loss"), ("tokens_per_second", "tokens/s"))


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Runs of octavo train, or folders of octavo.watch.")
    ],
    to_html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="The page; without it, report.html in the first run.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, and write no page unless --html is given.")
    ] = False,
) -> None:
    """Show loss, speed, memory, and what FP8 did in each layer.

    The command writes one HTML page that opens offline, and prints a summary. The runs may still be in progress.
    A run that was not watched, or that another library trained, has its loss, speed and memory only.

    Examples:

      octavo report runs/rowwise

      octavo report runs/rowwise runs/bf16 --html report.html
    """
    from octavo.report.runs import read_runs

    page = to_html if to_html is not None or as_json else runs[0] / "report.html"
    found = read_runs(runs)
    check_writable(page, "--html")
    if page is not None:
        _write(found, page)
    if as_json:
        from octavo.report.summary import to_dict

        print(json.dumps([to_dict(run) for run in found], indent=1, allow_nan=False))
        return
    for run in found:
        _print(run)
    say(f"the page: {page}")


def _write(runs: list[RunData], path: Path) -> None:
    from octavo.report.training_page import page_of_runs

    path.write_text(page_of_runs(runs).html(), encoding="utf-8")


def _print(run: RunData) -> None:
    from octavo.report.facts import run_facts
    from octavo.report.summary import sparkline, worst_layers

    say(run.name, "bold")
    print_facts(list(run_facts(run).items()))
    lines = [(name, sparkline(run.series[key].values)) for key, name in _LINES if key in run.series]
    if lines:
        print_table(("", "over the steps"), lines)
    worst = worst_layers(run.watched) if run.watched is not None else []
    if worst:
        print_table(("worst layers", "layer", "operand", "worst", "over the steps"), worst)
    events = run.watched.events if run.watched is not None else []
    if len(events) > _EVENTS:
        say(f"the last {_EVENTS} of {len(events)} events:")
    for event in events[-_EVENTS:]:
        action = "undone: the run went back" if event.undone else event.action
        action = f" ({action})" if action else ""
        say(f"step {event.step}: {event.describe()}{action}", "yellow")
    for remark in run.remarks:
        say(remark)
    say()
