"""octavo generate: text from a packed model."""

from __future__ import annotations

import unicodedata
from typing import Annotated

import typer
from rich.console import Console

from octavo_cli.options import Device, Packed


def generate(
    folder: Packed,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to go on from.")],
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
    device: Device = "auto",
) -> None:
    """Generate text from a prompt.

    The model computes with its eight-bit weights, and the text is printed as it comes.

    Example:

      octavo generate packed/first --prompt "def main():" --count 100 --seed 1
    """
    from octavo import serve
    from octavo.models.stream import stream

    model, tokenizer, context = serve.load(folder, device)
    serve.warm_up(model, context)
    pieces = stream(
        model,
        tokenizer,
        context,
        prompt,
        count=count,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop=serve.end_tokens(folder),
    )
    console = Console()
    console.out(printable(prompt), end="", style="bold", highlight=False)
    for piece in pieces:
        console.out(printable(piece), end="", highlight=False)
    console.out("")


def printable(text: str) -> str:
    """`text` with U+FFFD for control characters, which a terminal would obey, other than tabs and ends of lines."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )
