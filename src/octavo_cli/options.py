"""Arguments and options that several commands share."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo_cli.choices import LAYOUTS

BUDGET_HELP = "kl=0.01 (nats a token), ppl=0.5%, or of an encoder cosine=0.999; --budget can be repeated"


def changed(context: typer.Context) -> list[str]:
    """The options of the command line, such as --data, whose values are not the defaults."""
    return [
        param.opts[0]
        for param in context.command.params
        if param.param_type_name == "option"
        and (source := context.get_parameter_source(str(param.name))) is not None
        and source.name == "COMMANDLINE"
        and context.params[str(param.name)] != param.default
    ]


def refuse_unused(context: typer.Context, unused: Collection[str], needed: str) -> None:
    """Raise a ValueError if the command line has an option of `unused`, which do nothing without `needed`."""
    for name in changed(context):
        if name in unused:
            raise ValueError(f"{name} is for {needed}, which is not given: add it, or leave {name} out")


def option(metavar: str, help: str) -> Any:
    """An option with a value, for which the help shows `metavar`."""
    return typer.Option(metavar=metavar, help=help)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Device = Annotated[str, option("NAME", "auto, cpu, cuda or cuda:N.")]
Freeze = Annotated[
    int | None,
    option("NUMBER", "Run the model on this many prompts of --data, and store the scales of its inputs: static."),
]
Layout = Annotated[
    str,
    option(
        "NAME", f"{', '.join(LAYOUTS)}. The last two are for vLLM: transformers computes nonsense from them, or fails."
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist.")]
Packed = Annotated[Path, typer.Argument(metavar="PACKED", help="A packed folder.")]
PromptBatch = Annotated[int, option("NUMBER", "Prompts that run at once.")]
PromptSeed = Annotated[int, option("NUMBER", "Seed of the choice of prompts.")]
PromptTokens = Annotated[int, option("NUMBER", "Most tokens of a prompt.")]
Step = Annotated[int | None, option("NUMBER", "Take the checkpoint of this step; without it, the newest.")]
