"""The application: all commands, and the messages and exit codes of errors."""

import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from octavo_cli.bench import bench_command
from octavo_cli.bisect import bisect_command
from octavo_cli.calibrate import calibrate_command
from octavo_cli.command import Command, Commands, NumberCommand, SettingsCommand
from octavo_cli.compare import compare_command
from octavo_cli.data import DataCommand
from octavo_cli.display import CLOSED_PIPE, discard_output, say
from octavo_cli.doctor import doctor_command
from octavo_cli.evaluate import evaluate_command
from octavo_cli.export_gguf import export_gguf_command
from octavo_cli.fold import fold_command
from octavo_cli.formats import formats_command
from octavo_cli.generate import generate_command
from octavo_cli.inspect import inspect_command
from octavo_cli.logs import hide_logs
from octavo_cli.pack import pack_command
from octavo_cli.plan import plan_command
from octavo_cli.recipe import recipe_command
from octavo_cli.report import report_command
from octavo_cli.train import CONTEXT, train_command
from octavo_cli.unpack import convert_layout, unpack_command
from octavo_cli.verify import verify_command

app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor", cls=Command)(doctor_command)
app.command("formats", cls=NumberCommand)(formats_command)
app.command("recipe", cls=Command)(recipe_command)
app.command("plan", cls=SettingsCommand, context_settings=CONTEXT)(plan_command)
app.command("train", cls=SettingsCommand, context_settings=CONTEXT)(train_command)
app.command("generate", cls=Command)(generate_command)
app.command("evaluate", cls=DataCommand)(evaluate_command)
app.command("compare", cls=Command)(compare_command)
app.command("report", cls=Command)(report_command)
app.command("bisect", cls=SettingsCommand, context_settings=CONTEXT)(bisect_command)
app.command("calibrate", cls=DataCommand)(calibrate_command)
app.command("fold", cls=Command)(fold_command)
app.command("pack", cls=DataCommand)(pack_command)
app.command("verify", cls=DataCommand)(verify_command)
app.command("bench", cls=Command)(bench_command)
app.command("inspect", cls=Command)(inspect_command)
app.command("unpack", cls=Command)(unpack_command)
app.command("convert-layout", cls=DataCommand)(convert_layout)
app.command("export-gguf", cls=Command)(export_gguf_command)


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
    """FP8 for PyTorch over the whole life of a model: train, evaluate, calibrate, pack, verify and run."""


def run() -> None:
    """Run the command line, and end the program with its exit code.

    An error that the user can mend is one message and exit code 1, not a traceback. A warning is one line. If the
    reader of standard output ends first, as `head` does, the program ends quietly with the exit code of other Unix
    tools.

    Raises:
        ModuleNotFoundError: a package is not installed whole. The traceback shows the module that needs it. (For a
            package of an extra, `octavo.extras.import_extra` raises an ImportError, which is one message.)
    """
    code: int | str | None = 1
    hide_logs()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        app(prog_name="octavo")
    except SystemExit as ended:
        code = ended.code
    except ModuleNotFoundError:
        raise
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        say(f"error: {error}", "red", error=True)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        code = code or CLOSED_PIPE
    sys.exit(code)
