"""The application: all commands, and the messages and exit codes of errors."""

import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from octavo.util import discard_output, printable
from octavo.version import __version__
from octavo_cli.command import Command, Commands
from octavo_cli.display import CLOSED_PIPE, say
from octavo_cli.doctor import doctor_command, formats_command
from octavo_cli.generate import evaluate_command, generate_command
from octavo_cli.pack import calibrate_command, pack_command, unpack_command
from octavo_cli.plan import plan_command
from octavo_cli.train import bisect_command, compare_command, report_command, train_command
from octavo_cli.verify import inspect_command, verify_command

app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (plan_command, train_command, compare_command, report_command, bisect_command),
    "Quantize": (calibrate_command, pack_command, unpack_command, verify_command),
    "Run": (evaluate_command, generate_command),
    "Look up": (inspect_command, formats_command, doctor_command),
}
# Settings of training, and a negative number, look like options that a command does not have.
_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
_CONTEXTS = {"plan": _SETTINGS, "train": _SETTINGS, "bisect": _SETTINGS, "formats": {"ignore_unknown_options": True}}
for _group, _commands in _GROUPS.items():
    for _command in _commands:
        _name = _command.__name__.removesuffix("_command")
        _context = _CONTEXTS.get(_name)
        app.command(_name, cls=Command, context_settings=_context, rich_help_panel=_group)(_command)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """FP8 for PyTorch over the whole life of a model: train, evaluate, calibrate, pack, verify and run."""


_FAULT = (
    "Octavo did not foresee this: please report the lines above, the command and the output of octavo doctor, as an "
    "issue of the repository that Octavo was installed from"
)
_ADVICE = {
    errno.EACCES: "let this user read and write it",
    errno.EISDIR: "a file is required: give another name",
    errno.ENAMETOOLONG: "give a name of at most 255 bytes",
    errno.ENOSPC: "free some space, or give a folder on another disk",
    errno.ENOTDIR: "a folder is required: give another name",
    errno.EROFS: "give a folder that can be written",
}


def _is_fault(error: Exception) -> bool:
    """True if an error has no message for the user. A plain RuntimeError is a message where Octavo raises it, and else
    a fault, such as a product of shapes that do not fit."""
    if isinstance(error, ModuleNotFoundError | RecursionError | NotImplementedError):
        return True
    if type(error) is RuntimeError:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        return not (line.startswith("raise ") and str(frame.f_globals.get("__name__")).startswith("octavo"))
    return not isinstance(error, ValueError | OSError | ImportError | RuntimeError | MemoryError)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _ADVICE:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}: {_ADVICE[error.errno]}"
    return str(error) or type(error).__name__


def run() -> None:
    """Run the command line, and end the program with its exit code. An error that the user can mend is one message, any
    other is a fault with its traceback. If the reader of standard output ends first, as `head` does, the program ends
    quietly."""
    if not os.environ.get("COLUMNS", "0").strip("0"):
        os.environ.pop("COLUMNS", None)  # a terminal of unknown width: rich would print nothing
    code: int | str | None = 1
    hide_logs()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(str(message))}\n"
    try:
        app(prog_name="octavo")
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        fault = _is_fault(error)
        if fault:
            say(traceback.format_exc().rstrip(), error=True)
        say(f"error: {_FAULT if fault else _message(error)}", "red", error=True)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
        code = code or CLOSED_PIPE
    sys.exit(code)


# ---- Log messages of other packages that a command hides: no user can act on them, and Octavo runs nothing that they
# name.


_HIDDEN = {
    # of its own compiled kernels, when it is imported, which transformers does for every model
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "torch.utils._pytree": ("is an Enum subclass and is now natively supported",),  # about classes of torchao
    "torch._higher_order_ops.wrap": ("Detected that context_fn is passed",),  # `octavo.train.model` passes it
}


def hide_logs() -> None:
    """Hide these messages in this process. All others are shown."""
    for name in _HIDDEN:
        logging.getLogger(name).addFilter(
            lambda record: not any(phrase in str(record.msg) for phrase in _HIDDEN[record.name])
        )
