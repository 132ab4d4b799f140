"""--data takes several words, as a shell makes of a glob; options that take one value are given once."""

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


@pytest.mark.parametrize("words", ["--samples 2 --samples 3", "--samples=2 --samples 2", "--dry --no-dry"])
def test_an_option_of_one_value_is_given_once(words):
    result = run(f"M OUT --data a {words}")
    assert result.exit_code == 2
    assert f"{words.split()[-1] if 'dry' in words else '--samples'} must be given once" in result.output


@pytest.mark.parametrize("words", ["--data --samples --samples 3", "--samples 3 --data a -- --samples"])
def test_a_value_that_looks_like_an_option_is_not_one(words):
    assert "must be given once" not in run(f"M OUT {words}").output
