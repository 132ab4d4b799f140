"""octavo calibrate: what the tensors of a model are like while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo_cli.data import DATA_HELP, print_reading

if TYPE_CHECKING:
    from octavo.serve.calibration import Calibration

_ROWS = 10


def calibrate(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model folder, with safetensors and a tokenizer.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    data: Annotated[list[str], typer.Option(help=f"{DATA_HELP}.")],
    samples: Annotated[int, typer.Option(help="Prompts to take; 128 to 512 as a rule.")] = 256,
    context: Annotated[int, typer.Option(help="Tokens of a prompt, at most.")] = 2048,
    batch: Annotated[int, typer.Option(help="Prompts at once.")] = 8,
    device: Annotated[str, typer.Option(help="Where a block runs: cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Which prompts are taken.")] = 0,
) -> None:
    """Run a model over prompts in BF16 and write what the input of every linear layer, the norms' outputs, and queries,
    keys and values were like: amax (also by channel and by batch) and the whole distribution of magnitudes.

    One block is in memory at a time. A run that is interrupted goes on with its block when the command is given again.

    Example:

      octavo calibrate models/llama calibrated/llama --data chats.jsonl --data books/ --samples 512
    """
    from octavo import serve

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading model and prompts", total=None)

        def progress(done: int, of: int) -> None:
            bar.update(task, description="calibrating, block by block", completed=done, total=of)

        found = serve.calibrate(
            model, data, out, samples=samples, context=context, batch=batch, device=device, seed=seed,
            progress=progress, on_read=print_reading(console),
        )  # fmt: skip
    console.print(f"calibrated {model} into {out}", highlight=False, markup=False)
    fewer = f" ({samples} asked for, the data has no more)" if found.prompts < samples else ""
    console.print(f"{found.prompts} prompts{fewer}, {found.tokens} tokens, {len(found.sites)} sites", highlight=False)
    console.print(_table(found))


def _table(found: Calibration) -> Table:
    """The sites where a few elements take the most range from the others."""
    from octavo.serve.statistics import PERCENTILES

    high = PERCENTILES[-1]
    rows = []
    for name, statistics in found.sites.items():
        percentile = statistics.percentile(high)
        ratio = statistics.amax / percentile if percentile else float("inf") if statistics.amax else 1.0
        rows.append((ratio, name, statistics.amax, percentile, len(statistics.outlier_channels())))
    table = Table(box=None, pad_edge=False, title=f"the {min(_ROWS, len(rows))} sites with the largest outliers")
    for column in ("site", "amax", f"{high}%", "ratio", "outlier channels"):
        table.add_column(column, justify="left" if column == "site" else "right", overflow="fold")
    for ratio, name, amax, percentile, channels in sorted(rows, reverse=True)[:_ROWS]:
        table.add_row(name, f"{amax:.4g}", f"{percentile:.4g}", f"{ratio:.2f}", str(channels))
    return table
