"""octavo calibrate: measures the tensors of a model while it runs on text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo_cli.data import DATA_HELP, print_reading
from octavo_cli.display import print_table, progress, say
from octavo_cli.options import Device, Out, PromptBatch, PromptSeed, PromptTokens, Step, option

if TYPE_CHECKING:
    from octavo.calibration.folder import Calibration

_ROWS = 10


def calibrate_command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face model folder, or a run of octavo train.")
    ],
    out: Out,
    data: Annotated[list[str], option("TEXT", f"{DATA_HELP}.")],
    samples: Annotated[int, option("NUMBER", "Number of prompts; 128 to 512 are usual.")] = 256,
    context: PromptTokens = 2048,
    batch: PromptBatch = 8,
    device: Device = "cpu",
    seed: PromptSeed = 0,
    step: Step = None,
) -> None:
    """Measure the tensors of a model while it runs on text.

    The model runs in BF16 on prompts. The folder OUT gets the amax (also by channel and by batch) and the distribution
    of magnitudes of these tensors: inputs of linear layers, outputs of norms, queries, keys and values.

    One block is in memory at a time. Give the same command again to resume after an interruption.

    Example:

      octavo calibrate models/llama calibrated/llama --data chats.jsonl --data books/ --samples 512
    """
    from octavo.calibration import calibrate
    from octavo.evaluation import PromptOptions
    from octavo.words import plural

    prompts = PromptOptions(samples, context, batch, seed)
    try:
        with progress("reading model and prompts") as advance:
            found = calibrate(
                model, data, out, prompts=prompts, device=device, step=step, progress=advance, on_read=print_reading
            )
    except KeyboardInterrupt:
        say(f"interrupted: the blocks that were done are kept beside {out}; the same command continues", error=True)
        raise typer.Exit(130) from None
    say(f"calibrated {model} into {out}")
    fewer = f" ({samples} asked for, the data has no more)" if found.prompts < samples else ""
    sites = plural(len(found.sites), "site")
    say(f"{plural(found.prompts, 'prompt')}{fewer}, {plural(found.tokens, 'token')}, {sites}")
    if found.unseen:
        names = ", ".join(found.unseen[:3]) + (", ..." if len(found.unseen) > 3 else "")
        say(
            f"no token reached {len(found.unseen)} matrices of experts ({names}): a static scale of such an input is "
            "the largest of the layer's other experts. More data may reach it"
        )
    _print_outliers(found)


def _print_outliers(found: Calibration) -> None:
    """Print the sites with the largest ratio of the amax to a high percentile."""
    from octavo.calibration.statistics import PERCENTILES
    from octavo.words import plural

    high = PERCENTILES[-1]
    rows = []
    for name, statistics in ((name, s) for name, s in found.sites.items() if s.tokens):
        percentile = statistics.percentile(high)
        ratio = statistics.amax / percentile if percentile else float("inf") if statistics.amax else 1.0
        rows.append((ratio, name, statistics.amax, percentile, len(statistics.outlier_channels())))
    shown = [
        (name, f"{amax:.4g}", f"{percentile:.4g}", f"{ratio:.2f}", str(channels))
        for ratio, name, amax, percentile, channels in sorted(rows, reverse=True)[:_ROWS]
    ]
    numbers = ("amax", f"{high}%", "ratio", "outlier channels")
    title = f"the {plural(len(shown), 'site')} with the largest outliers"
    print_table(("site", *numbers), shown, right=numbers, title=title)
