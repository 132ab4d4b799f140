"""octavo fold: the same model with its outliers folded into weights, so that it quantizes better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from octavo import serve


def fold(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model folder, or a run of octavo train of a Llama.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    smooth: Annotated[
        Path | None,
        typer.Option(help="What octavo calibrate made of the model: move activations' outliers over to weights."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="How much of them, 0 to 1; for --smooth.")] = 0.5,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Rotate residual stream and values by Hadamard matrices; RMSNorm models.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the rotation's signs.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")] = "bfloat16",
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; without it, the newest.")] = None,
) -> None:
    """Write a model that computes the same and quantizes better, to be calibrated and packed as any other.

    Smoothing's factors are powers of two, so that nothing else changes; a rotation is off by the rounding of the
    weights that it writes. With both, only what a rotation does not reach is smoothed: the input of down_proj.

    Both are for INT8, and for outliers beyond the range of a static scale. Where that was measured (docs/log.md), FP8
    with a scale a token gained nothing by either, and lost a little by a rotation.

    Example:

      octavo calibrate models/llama calibrated/llama --data texts/

      octavo fold models/llama models/llama-smooth --smooth calibrated/llama

      octavo fold models/llama models/llama-rotated --rotate
    """
    from octavo import serve

    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("folding")
        report = serve.fold(
            model, out, smooth=smooth, alpha=alpha, rotate=rotate, seed=seed, dtype=dtype, step=step,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )  # fmt: skip
    console.print(f"folded {report.source} into {report.folder}", highlight=False, markup=False)
    console.print(_table(report))


def _table(report: serve.FoldReport) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    if report.smoothed:
        lows, highs = zip(*report.smoothed.values(), strict=True)
        table.add_row("tensors smoothed", f"{len(lows)}, by factors of {min(lows):g} to {max(highs):g}")
    if report.rotated:
        stream, head = report.rotated
        table.add_row("rotated", f"residual stream in blocks of {stream}, heads in blocks of {head}")
    if report.untied:
        table.add_row("head", "has a weight of its own now, which it shared with the embedding")
    table.add_row("tensors changed", str(report.changed))
    for name in report.left_out:
        table.add_row("left out", f"{name}: the model has no place for it")
    table.add_row("the whole folder", f"{report.folder_bytes / 1e6:.2f} MB")
    return table
