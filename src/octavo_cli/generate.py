"""octavo generate: text from a packed model."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def generate(
    folder: Annotated[Path, typer.Argument(help="The folder that octavo pack made.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    count: Annotated[int, typer.Option(min=0, help="Tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the most likely token; higher is more varied.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many most likely tokens; 0 from all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Of the draws: the same seed, the same text.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Go on from a prompt with a packed model, computing with its eight-bit weights, and print the text as it comes.

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
