"""The command `octavo`: one thin file a command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from octavo.cli.calibrate import calibrate
from octavo.cli.doctor import doctor
from octavo.cli.export_gguf import export_gguf
from octavo.cli.fold import fold
from octavo.cli.formats import formats
from octavo.cli.generate import generate
from octavo.cli.inspect import inspect
from octavo.cli.pack import pack
from octavo.cli.train import CONTEXT, train
from octavo.cli.unpack import convert_layout, unpack
from octavo.cli.verify import verify

app = typer.Typer(
    help="FP8 for PyTorch over the whole life of a model: train, calibrate, fold, pack, generate, and look inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(formats)
app.command()(doctor)
app.command(context_settings=CONTEXT)(train)
app.command()(calibrate)
app.command()(fold)
app.command()(pack)
app.command()(generate)
app.command()(inspect)
app.command()(unpack)
app.command("convert-layout")(convert_layout)
app.command("export-gguf")(export_gguf)
app.command()(verify)


def main() -> None:
    """Run the command line; an error of the user's is one message and exit code 1, not a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
