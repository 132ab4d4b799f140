"""octavo generate: text from a model."""

import sys
import unicodedata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo_cli.opened import SOURCE_HELP, open_source
from octavo_cli.options import Device, Step


def generate_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")],
    count: Annotated[int, typer.Option(metavar="NUMBER", help="Tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="NUMBER", help="0 takes the most likely token; higher is more varied.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(metavar="NUMBER", help="Draw from so many most likely tokens; 0 draws from all.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="The seed of the draws: the same seed, the same text.")
    ] = None,
    step: Step = None,
    device: Device = "auto",
) -> None:
    """Generate text from a prompt.

    A packed model computes with its eight-bit weights, the model of a run in the recipe that it was trained in, and
    any other model in BF16. The text is printed as it comes.

    Examples:

      octavo generate runs/first --prompt "def main():" --count 100 --seed 1

      octavo generate packed/first --prompt "def main():" --temperature 0
    """
    from octavo.generation.sampling import stream
    from octavo.nn import cast_once
    from octavo.runtime import end_tokens
    from octavo.train.evaluation import autocast

    opened = open_source(source, step, device)
    console = Console()
    with cast_once(opened.model), autocast(opened.precision, opened.device):
        pieces = stream(
            opened.model, opened.tokenizer, opened.context, prompt, count=count, temperature=temperature, top_k=top_k,
            seed=seed, stop=end_tokens(opened.description),
        )  # fmt: skip
        console.out(printable(prompt), end="", style="bold", highlight=False)
        for piece in pieces:
            console.out(printable(piece), end="", highlight=False)
            sys.stdout.flush()
    console.out("")


def printable(text: str) -> str:
    """`text` with U+FFFD for control characters, which a terminal would obey, other than tabs and ends of lines."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )
