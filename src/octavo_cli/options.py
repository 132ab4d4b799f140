"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from octavo_cli.choices import LAYOUTS

BUDGET_HELP = "kl=0.01 (nats a token), ppl=0.5%, or of an encoder cosine=0.999; --budget can be repeated"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
Freeze = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER",
        help="Run the model on this many prompts of --data, and store the scales of its inputs: static.",
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(LAYOUTS)}. The last two are for vLLM: transformers computes nonsense from them, or fails.",
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist.")]
Packed = Annotated[Path, typer.Argument(metavar="PACKED", help="A packed folder.")]
Step = Annotated[
    int | None, typer.Option(metavar="NUMBER", help="Take the checkpoint of this step; without it, the newest.")
]
