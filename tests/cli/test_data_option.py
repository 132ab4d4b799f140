"""--data takes several words, as a shell makes of a glob, and does not take the arguments of the command."""

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from octavo_cli.data import DataCommand

app = typer.Typer()


@app.command(cls=DataCommand)
def command(
    model: Path, out: Path, data: Annotated[list[str], typer.Option()], samples: int = 1, dry: bool = False
) -> None:
    print(model, out, data, samples)


@app.callback()
def main() -> None:
    """Makes `command` the name of a command."""


def run(words):
    return CliRunner().invoke(app, ["command", *words.split()])


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("M OUT --data a", ["a"]),
        ("M OUT --data a b c", ["a", "b", "c"]),
        ("M OUT --data a --data b", ["a", "b"]),
        ("M OUT --data a b --dry --data=c d --samples 1", ["a", "c", "b", "d"]),
        ("--data a M OUT", ["a"]),
        ("M --data a OUT", ["a"]),
        ("--data a --samples 1 M OUT", ["a"]),
        ("M OUT --data -x b", ["-x", "b"]),
    ],
)
def test_words_of_the_option_and_arguments_are_told_apart(words, data):
    result = run(words)
    assert (result.exit_code, result.output) == (0, f"M OUT {data} 1\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("M OUT more --data a", "Got unexpected extra argument(s) (more)"),
        ("--data a b M OUT", "Got unexpected extra argument(s) (OUT)"),
        ("M --data a b OUT", "Got unexpected extra argument(s) (OUT)"),
        ("M OUT more", "Missing option '--data'"),
    ],
)
def test_words_that_could_be_either_are_an_error(words, message):
    result = run(words)
    assert result.exit_code == 2
    assert message in result.output
