"""octavo verify: is a packed folder right, and what did packing cost?"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo_cli.data import DATA_HELP, print_reading
from octavo_cli.output import check_writable

if TYPE_CHECKING:
    from octavo.serve.verify_report import Section
    from octavo.serve.verify_result import Report

_ROWS = 12
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


def verify(
    packed: Annotated[Path, typer.Argument(help="The packed folder.", metavar="PACKED")],
    against: Annotated[
        Path, typer.Option(help="The model that it was packed from: a folder, or a run.", metavar="MODEL")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(help=f"{DATA_HELP}; without it no quality."),
    ] = None,
    budget_kl: Annotated[str | None, typer.Option(help="The most nats of KL a token, such as 0.01.")] = None,
    budget_ppl: Annotated[str | None, typer.Option(help="The most that perplexity may rise, such as 0.5%.")] = None,
    budget_cosine: Annotated[
        str | None, typer.Option(help="Of an encoder: the least mean cosine of its embeddings, such as 0.999.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Prompts to take.")] = 64,
    context: Annotated[int, typer.Option(help="Tokens of a prompt, at most.")] = 512,
    batch: Annotated[int, typer.Option(help="Prompts at once.")] = 8,
    device: Annotated[str, typer.Option(help="Where the reference and our runtime run: cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Which prompts are taken.")] = 0,
    folded: Annotated[
        bool, typer.Option("--folded", help="Something was folded into the weights: compare what they do alone.")
    ] = False,
    to_json: Annotated[Path | None, typer.Option("--json", help="Write all that was found there, as JSON.")] = None,
    to_html: Annotated[Path | None, typer.Option("--html", help="Write one HTML page there.")] = None,
) -> None:
    """Check a packed folder: its bytes, every program installed here that opens it, and what packing cost.

    Ends with exit code 1 if anything is wrong, a reader disagrees with the bytes, or the cost is over the budget.
    Nothing of the folder is run that is not safetensors or JSON.

    Example:

      octavo verify packed/qwen --against models/qwen --data texts/ --budget-kl 0.01 --budget-ppl 0.5% --html q.html
    """
    from octavo.serve.verify import verify as run_verify
    from octavo.serve.verify_report import sections, verdict
    from octavo.serve.verify_result import Budget

    console = Console()
    budget = Budget(_limit("kl", budget_kl), _limit("ppl", budget_ppl), _limit("cosine", budget_cosine))
    check_writable(to_json, "--json")
    check_writable(to_html, "--html")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading model and prompts", total=None)
        report = run_verify(
            packed, against, data or (), budget=budget, samples=samples, context=context, batch=batch, device=device,
            seed=seed, folded=folded, on_read=print_reading(console),
            progress=lambda stage, done, of: bar.update(task, description=stage, completed=done, total=of),
        )  # fmt: skip
    for section in sections(_worst(report)):
        console.print(_table(section))
        if section.remark:
            console.print(section.remark, style="dim", highlight=False, markup=False)
        console.print()
    for remark in _worst(report).remarks:
        console.print(remark, **_PLAIN)
    console.print(f"{packed}: {verdict(report)}", style="" if report.ok else "red", **_PLAIN)
    for finding in report.findings:
        console.print(f"  {finding.kind} {finding}", **_PLAIN)
    _write(report, to_json, to_html)
    if not report.ok:
        raise typer.Exit(1)


def _worst(report: Report) -> Report:
    """With the layers alone that lose most, where they are many."""
    if len(report.layers) <= _ROWS:
        return report
    ordered = sorted(report.layers, key=lambda layer: layer.output_sqnr or layer.weight_sqnr or 0.0)
    remark = f"of {len(report.layers)} layers the {_ROWS} that lose most are shown; --json and --html have all"
    return replace(report, layers=ordered[:_ROWS], remarks=[*report.remarks, remark])


def _limit(measure: str, text: str | None) -> float | None:
    from octavo.serve.limits import read_limit

    return None if text is None else read_limit(measure, text, f"--budget-{measure}")


def _write(report: Report, to_json: Path | None, to_html: Path | None) -> None:
    from octavo.serve.verify_page import page
    from octavo.serve.verify_report import Run, to_dict

    run = Run.now(shlex.join(["octavo", *sys.argv[1:]]))
    if to_json is not None:
        to_json.write_text(json.dumps(to_dict(report, run), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if to_html is not None:
        to_html.write_text(page(report, run), encoding="utf-8")


def _table(section: Section) -> Table:
    table = Table(box=None, pad_edge=False, title=section.title, title_justify="left", title_style="bold")
    for column in section.columns:
        table.add_column(column, overflow="fold")
    for row in section.rows:
        table.add_row(*(text.replace("[", "\\[") for text in row))
    return table
