"""The commands together, and what becomes of their errors."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from octavo_cli.calibrate import calibrate
from octavo_cli.data import DataCommand
from octavo_cli.doctor import doctor
from octavo_cli.export_gguf import export_gguf
from octavo_cli.fold import fold
from octavo_cli.formats import formats
from octavo_cli.generate import generate
from octavo_cli.inspect import inspect
from octavo_cli.pack import pack
from octavo_cli.train import CONTEXT, train
from octavo_cli.unpack import convert_layout, unpack
from octavo_cli.verify import verify


class Commands(TyperGroup):
    """The commands, with `octavo help [COMMAND]` as another way to write `octavo [COMMAND] --help`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the words before the name of the command."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(formats)
app.command()(doctor)
app.command(context_settings=CONTEXT)(train)
app.command(cls=DataCommand)(calibrate)
app.command()(fold)
app.command(cls=DataCommand)(pack)
app.command()(generate)
app.command()(inspect)
app.command()(unpack)
app.command("convert-layout")(convert_layout)
app.command("export-gguf")(export_gguf)
app.command(cls=DataCommand)(verify)


def version() -> str:
    """The version of octavo, read from its file: importing the package imports PyTorch."""
    spec = find_spec("octavo")
    assert spec is not None
    assert spec.origin is not None
    return str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])


def _show_version(asked: bool) -> None:
    if asked:
        print(f"octavo {version()}")
        raise typer.Exit


@app.callback()
def octavo(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """FP8 for PyTorch over the whole life of a model: train, calibrate, fold, pack, generate, and look inside."""


def run() -> None:
    """Run the command line; an error of the user's is one message and exit code 1, not a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
