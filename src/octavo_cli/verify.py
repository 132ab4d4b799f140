"""octavo verify: check a packed folder, and measure what packing cost."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo_cli.data import DATA_HELP, print_reading
from octavo_cli.display import print_table, progress, say
from octavo_cli.options import BUDGET_HELP, Device, Packed, PromptBatch, PromptSeed, PromptTokens, option, refuse_unused
from octavo_cli.output import check_writable

if TYPE_CHECKING:
    from octavo.verification.result import Report

_ROWS = 12


def verify_command(
    command: typer.Context,
    packed: Packed,
    against: Annotated[Path, option("MODEL", "The model that the folder was packed from: a folder, or a run.")],
    data: Annotated[list[str] | None, option("TEXT", f"{DATA_HELP}; without it the quality is not measured.")] = None,
    budget: Annotated[
        list[str] | None, option("BUDGET", f"The most that packing may cost on --data: {BUDGET_HELP}.")
    ] = None,
    samples: Annotated[int, option("NUMBER", "Number of prompts.")] = 64,
    context: PromptTokens = 512,
    batch: PromptBatch = 8,
    device: Device = "cpu",
    seed: PromptSeed = 0,
    folded: Annotated[
        bool, typer.Option("--folded", help="Smoothing or a rotation was folded into the weights: do not compare them.")
    ] = False,
    to_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all results to FILE, as JSON.")
    ] = None,
    to_html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write all results to FILE, as one HTML page.")
    ] = None,
) -> None:
    """Check a packed folder, and measure what packing cost.

    The command checks the bytes, and opens the folder with every installed program that can read it. The exit code is 1
    if something is wrong, a reader disagrees with the bytes, or the cost is over the budget.
    Only safetensors and JSON are read from the folder; no code of it runs.

    Example:

      octavo verify packed/qwen --against models/qwen --data texts/ --budget kl=0.01 --budget ppl=0.5% --html q.html
    """
    from octavo.evaluation import Budget, PromptOptions
    from octavo.verification import verify

    if not data:
        refuse_unused(command, ["--samples", "--context", "--batch", "--seed"], "--data")
    budgets, prompts = [Budget.parse(text) for text in budget or ()], PromptOptions(samples, context, batch, seed)
    check_writable(to_json, "--json")
    check_writable(to_html, "--html")
    with progress("reading model and prompts") as advance:
        report = verify(
            packed, against, data or (), budgets=budgets, prompts=prompts, device=device, folded=folded,
            progress=advance, on_read=print_reading,
        )  # fmt: skip
    _print(report)
    _write(report, to_json, to_html)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    from octavo.verification.report import sections, verdict

    shown = _with_worst_layers(report)
    for section in sections(shown):
        print_table(section.columns, section.rows, prose=[""], title=section.title)
        if section.remark:
            say(section.remark, "dim")
        say()
    for remark in shown.remarks:
        say(remark)
    say(f"{report.packed}: {verdict(report)}", "" if report.ok else "red")
    for finding in report.findings:
        say(f"  {finding.kind} {finding}")


def _with_worst_layers(report: Report) -> Report:
    """The report with at most `_ROWS` layers, those with the lowest SQNR."""
    if len(report.layers) <= _ROWS:
        return report
    ordered = sorted(report.layers, key=lambda layer: layer.output_sqnr or layer.weight_sqnr or 0.0)
    remark = f"of {len(report.layers)} layers the {_ROWS} that lose most are shown; --json and --html have all"
    return replace(report, layers=ordered[:_ROWS], remarks=[*report.remarks, remark])


def _write(report: Report, to_json: Path | None, to_html: Path | None) -> None:
    from octavo.report.verification_page import page_of_report
    from octavo.verification.report import Invocation, to_dict

    invocation = Invocation.now(shlex.join(["octavo", *sys.argv[1:]]))
    if to_json is not None:
        text = json.dumps(to_dict(report, invocation), indent=1, allow_nan=False)
        to_json.write_text(f"{text}\n", encoding="utf-8")
    if to_html is not None:
        to_html.write_text(page_of_report(report, invocation).html(), encoding="utf-8")
