"""octavo fold: folds outliers into the weights of a model, so that it quantizes better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo_cli.display import print_facts, progress, say
from octavo_cli.options import Out, Step, option, refuse_unused

if TYPE_CHECKING:
    from octavo.folding import FoldReport


def fold_command(
    command: typer.Context,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face model folder, or a run of octavo train of a Llama.")
    ],
    out: Out,
    smooth: Annotated[
        Path | None,
        option(
            "FOLDER", "The folder that octavo calibrate wrote for the model: move outliers of activations into weights."
        ),
    ] = None,
    alpha: Annotated[float, option("NUMBER", "With --smooth: how much of the outliers moves, from 0 to 1.")] = 0.5,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Rotate the residual stream and the values by Hadamard matrices. For models with RMSNorm."
        ),
    ] = False,
    seed: Annotated[int, option("NUMBER", "Seed of the signs of the rotation.")] = 0,
    dtype: Annotated[str, option("TYPE", "Dtype of the new weights: bfloat16 or float32.")] = "bfloat16",
    step: Step = None,
) -> None:
    """Write a model that computes the same and quantizes better.

    The new folder can be calibrated and packed like any other.

    The factors of smoothing are powers of two, so the model computes exactly the same. A rotation rounds the weights
    that it changes. With both options only the input of down_proj is smoothed, because the rotation does not reach it.

    Both help INT8, and outliers beyond the range of a static scale. In our measurements (docs/log.md) FP8 with a scale
    for each token gained nothing from either, and lost a little by a rotation.

    Examples:

      octavo calibrate models/llama calibrated/llama --data texts/

      octavo fold models/llama models/llama-smooth --smooth calibrated/llama

      octavo fold models/llama models/llama-rotated --rotate
    """
    from octavo.folding import fold

    if smooth is None:
        refuse_unused(command, ["--alpha"], "--smooth")
    if not rotate:
        refuse_unused(command, ["--seed"], "--rotate")
    with progress("folding") as advance:
        report = fold(
            model, out, smooth=smooth, alpha=alpha, rotate=rotate, seed=seed, dtype=dtype, step=step,
            progress=advance,
        )  # fmt: skip
    say(f"folded {report.source} into {report.folder}")
    print_facts(_facts(report))


def _facts(report: FoldReport) -> list[tuple[str, str]]:
    facts = []
    if report.smoothed:
        lows, highs = zip(*report.smoothed.values(), strict=True)
        facts.append(("tensors smoothed", f"{len(lows)}, by factors of {min(lows):g} to {max(highs):g}"))
    if report.rotated:
        stream, head = report.rotated
        facts.append(("rotated", f"residual stream in blocks of {stream}, heads in blocks of {head}"))
    if report.untied:
        facts.append(("head", "has its own weight now; it shared that of the embedding"))
    facts.append(("tensors changed", str(report.changed)))
    for name in report.left_out:
        facts.append(("left out", f"{name}: the model has no place for it"))
    facts.append(("the whole folder", f"{report.folder_bytes / 1e6:.2f} MB"))
    return facts
