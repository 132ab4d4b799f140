"""octavo pack: a trained model as a folder of eight-bit weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo import serve


def pack(
    run: Annotated[Path, typer.Argument(help="The folder of a run of octavo train.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; without it, the newest.")] = None,
) -> None:
    """Write a trained model as a Hugging Face folder whose linear weights are e4m3, with a scale for each row.

    The folder holds all that running it takes; octavo generate and transformers (with compressed-tensors) open it.
    Layers that training skipped (output heads, --skip) stay in BF16, and so does all that is no linear layer.

    Example:

      octavo pack runs/first packed/first

      octavo generate packed/first --prompt "def main():"
    """
    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("packing")
        report = serve.pack(run, out, step, lambda done, of: bar.update(task, completed=done, total=of))
    console.print(f"packed {report.checkpoint} into {report.folder}", highlight=False, markup=False)
    console.print(_table(report))


def _table(report: serve.PackReport) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("linear layers packed", str(len(report.packed)))
    for name, reason in report.skipped.items():
        table.add_row("left in BF16", f"{name}: {reason}")
    table.add_row("their weights in BF16", f"{report.bf16_bytes / 1e6:.2f} MB")
    table.add_row("in e4m3, with scales", f"{report.packed_bytes / 1e6:.2f} MB ({report.ratio:.3f} of it)")
    table.add_row("the whole folder", f"{report.folder_bytes / 1e6:.2f} MB")
    return table
