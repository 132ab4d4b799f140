"""The option --data of the commands that read prompts: its help, its words, and the lines on the text that was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from octavo_cli.command import Command
from octavo_cli.display import say

if TYPE_CHECKING:
    from octavo.text import ReadReport

DATA = "--data"
RUN_OPTIONS = (DATA, "--samples", "--context", "--device")  # how pack and convert-layout run a model on text
DATA_HELP = "Text: stdlib, files, folders, globs, .jsonl (text, prompt or messages), hf:DATASET; --data can be repeated"


def print_reading(report: ReadReport) -> None:
    """Print the report of the text that was read."""
    for line in report.lines():
        say(line)


def required_data(data: list[str] | None) -> list[str]:
    """The words of --data, which --freeze needs."""
    if not data:
        raise ValueError("--freeze runs the model on text: give --data, text files, folders, .jsonl or hf:DATASET")
    return data


class DataCommand(Command):
    """A command whose option --data takes several words, as a shell makes of `--data books/*.txt`.

    The arguments of the command come before: the words after --data are its own only if the arguments have been given.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        given = list(args)
        ctx.allow_extra_args = True
        super().parse_args(ctx, list(given))
        if ctx.args and ctx.args == _further_words(given):
            ctx.params["data"] = [*(ctx.params["data"] or ()), *ctx.args]
            ctx.args = []
        elif ctx.args:
            ctx.allow_extra_args = False
            super().parse_args(ctx, given)  # which says what is wrong
        return ctx.args


def _further_words(args: list[str]) -> list[str]:
    """The words after each `--data VALUE`, up to the next option."""
    found: list[str] = []
    inside = False
    value = False  # whether the next word is the value of --data
    for word in args:
        if word.startswith("-") and not value:
            inside, value = word.partition("=")[0] == DATA, word == DATA
        elif value:
            value = False
        elif inside:
            found.append(word)
    return found
