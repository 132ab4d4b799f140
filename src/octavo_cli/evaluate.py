"""octavo evaluate: the loss of a model on text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo_cli.data import DATA_HELP, print_reading
from octavo_cli.display import print_facts, progress
from octavo_cli.opened import SOURCE_HELP, Opened, open_source
from octavo_cli.options import AsJson, Device, Step, option, refuse_unused

if TYPE_CHECKING:
    from octavo.text import ReadReport
    from octavo.train.data import Batches


def evaluate_command(
    command: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    data: Annotated[list[str] | None, option("TEXT", f"{DATA_HELP}.")] = None,
    held_out: Annotated[Path | None, option("RUN", "Evaluate on the text that this run holds out.")] = None,
    batches: Annotated[
        int | None, option("NUMBER", "Batches to take; without it what the run takes, or all of --data.")
    ] = None,
    batch: Annotated[int, option("NUMBER", "With --data: sequences in a batch.")] = 4,
    context: Annotated[int | None, option("NUMBER", "With --data: tokens in a sequence, up to the model's.")] = None,
    step: Step = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the loss and the perplexity of a model on text.

    A run is evaluated on the text that it holds out, as octavo train evaluates it. Any model is evaluated on --data,
    whose text is cut into sequences, or on the text that a run holds out.

    Examples:

      octavo evaluate runs/first

      octavo evaluate packed/first --held-out runs/first

      octavo evaluate models/qwen --data 'books/*.txt' --context 1024 --json
    """
    from octavo.nn import cast_once
    from octavo.train.evaluation import mean_loss

    if data and held_out:
        raise ValueError("--data and --held-out both name the text: give one of them")
    if not data:
        refuse_unused(command, ["--batch", "--context"], "--data")
    if batches is not None and batches < 1:
        raise ValueError(f"--batches must be at least 1, got {batches}")
    opened = open_source(source, step, device)
    if data:
        text, count, read = _given(opened, data, batch, context)
    else:
        text, count, read = _held_out(opened, held_out or source)
    if not as_json:
        print_reading(read)
    with progress("evaluating"), cast_once(opened.model):
        loss, tokens = mean_loss(
            opened.model, text, opened.device, precision=opened.precision, count=count if batches is None else batches
        )
    perplexity = math.exp(loss) if loss < 700 else None
    if as_json:
        found = {"source": str(source), "loss": loss if math.isfinite(loss) else None, "perplexity": perplexity}
        print(json.dumps(found | {"tokens": tokens, "data": read.to_dict()}, indent=2))
        return
    facts = [("model", opened.title), ("loss", f"{loss:.4f} nats a token, on {tokens:,} tokens")]
    print_facts([*facts, ("perplexity", "too large" if perplexity is None else f"{perplexity:.4g}")])


def _given(opened: Opened, data: list[str], batch: int, context: int | None) -> tuple[Batches, None, ReadReport]:
    """All batches of the text that --data names."""
    from octavo.text import read_text
    from octavo.train.data import Batches, lay_out

    if context is not None and not 1 <= context <= opened.context:
        raise ValueError(f"--context must be from 1 to the model's {opened.context}, got {context}")
    reading = read_text(data, opened.tokenizer.chat)
    tokens, _ = lay_out(reading.texts, opened.tokenizer)
    length = min(context or opened.context, max(len(tokens) - 1, 1))
    return Batches(tokens, length, min(batch, max((len(tokens) - 1) // length, 1)), None), None, reading.report


def _held_out(opened: Opened, run: Path) -> tuple[Batches, int, ReadReport]:
    """The batches that a run evaluates on, and how many of them it takes."""
    from octavo.artifact.run import RunFolder
    from octavo.train import finished
    from octavo.train.run_settings import read_settings

    folder = RunFolder(run)
    if not (folder.model / "config.json").is_file():
        raise ValueError(f"{run} is no run of octavo train, so no text was held out: give --data, or --held-out RUN")
    batches, read = finished.held_out(run, opened.tokenizer)
    if batches.context > opened.context:
        raise ValueError(f"the run {run} has sequences of {batches.context} tokens, the model sees {opened.context}")
    return batches, read_settings(folder).evaluate_batches, read
