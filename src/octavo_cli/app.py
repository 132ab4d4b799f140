"""The application: all commands, the words of other tools for them, and the messages and exit codes of errors."""

import errno
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from octavo.util import discard_output, printable
from octavo.version import __version__
from octavo_cli.display import CLOSED_PIPE, say
from octavo_cli.doctor import doctor_command, formats_command
from octavo_cli.generate import evaluate_command, generate_command
from octavo_cli.pack import calibrate_command, pack_command, unpack_command
from octavo_cli.plan import plan_command
from octavo_cli.shared import DATA
from octavo_cli.train import bisect_command, compare_command, report_command, train_command
from octavo_cli.verify import inspect_command, verify_command


class Command(TyperCommand):
    """A command. It refuses a number that is inf or NaN. --data takes several words, as a shell makes of `--data
    books/*.txt`, where the arguments stand before it."""

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:
        # "\b" keeps the lines of the examples, so that they can be copied.
        super().__init__(*args, help=(help or "").replace("\n\n  ", "\n\n\b\n  "), **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, list(self._spread(ctx, args)))
        for param in self.get_params(ctx):
            value = ctx.params.get(param.name)
            if param.param_type_name == "option" and isinstance(value, float) and not math.isfinite(value):
                ctx.fail(f"{param.opts[0]} must be a finite number; got {value}")
        return rest

    def _spread(self, ctx: Any, args: list[str]) -> Iterator[str]:
        """The words with --data before each of its values."""
        params: list[Any] = self.get_params(ctx)
        options = {name: p for p in params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
        missing = sum(p.param_type_name == "argument" and p.required for p in params)
        more = False  # whether words that are no options belong to --data
        words = iter(args)
        for word in words:
            name, equals, _ = word.partition("=")
            option = options.get(name)
            if word == "--":
                yield from (word, *words)
            elif option is not None:
                more = name == DATA and missing <= 0
                yield word
                yield from islice(words, int(not equals and not option.is_flag))  # the value can look like an option
            elif word.startswith("-"):
                more = False
                yield word
            else:
                missing -= not more
                yield from (DATA, word) if more else (word,)


class Commands(TyperGroup):
    """All commands, in groups. `octavo help COMMAND` is another way to write `octavo COMMAND --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A byte that Python cannot decode is passed on as a surrogate.
        if undecoded := [ascii(word) for word in args if re.search("[\ud800-\udfff]", word)]:
            advice = "rename the file or folder, or set PYTHONUTF8=1 if its name is in UTF-8"
            ctx.fail(f"the words of a command must be UTF-8, got {undecoded[0]}: {advice}")
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        named: list[tuple[str, Any]] = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        for group, members in groupby(named, key=lambda each: each[1].rich_help_panel):
            with formatter.section(group):
                formatter.write_dl([(name, command.get_short_help_str(100)) for name, command in members])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first word; that of another tool is answered with the command that does it."""
        if (advice := OTHER_COMMANDS.get(args[0].lower())) and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}. {advice}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Ctrl-C and a closed pipe end it as they end other Unix tools."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("interrupted", error=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            discard_output(sys.stdout)
            raise typer.Exit(CLOSED_PIPE) from None


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


# ---- The words that other tools have for a command of Octavo, and the command that does it.


_PACK, _VERIFY = "octavo pack MODEL OUT", "octavo verify PACKED --against MODEL"
_EVALUATE, _LAYOUT = "octavo evaluate SOURCE --data TEXT", "octavo unpack PACKED OUT --layout NAME"
_GGUF, _SMOOTH, _ROTATE = f"{_PACK}.gguf --layout gguf", f"{_PACK} --smooth CALIBRATION", f"{_PACK} --rotate"
_SERVE = """vLLM serves a packed folder: vllm serve FOLDER
and answers: curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \
-d '{"model": "FOLDER", "prompt": "Once upon a time", "max_tokens": 50}'"""
_WORDS = {
    _SERVE: "serve",
    "octavo pack MODEL FOLDER, then vllm serve FOLDER": "deploy",
    _PACK: "quantize compress",
    f"{_PACK}, and {_LAYOUT} for another layout": "convert",
    _LAYOUT: "convert-layout",
    f"{_GGUF} for llama.cpp; octavo unpack PACKED OUT for BF16": "export",
    _GGUF: "export-gguf gguf",
    "octavo unpack PACKED OUT": "dequantize",
    "octavo generate SOURCE --prompt TEXT": "sample chat run infer complete",
    _EVALUATE: "eval perplexity",
    f"{_EVALUATE}, or {_VERIFY}": "test",
    _VERIFY: "validate",
    f"{_VERIFY} for a folder, octavo doctor for this machine": "check",
    "octavo train --model FOLDER --data TEXT": "finetune fine-tune",
    "octavo train --data TEXT": "pretrain",
    "octavo train --resume RUN": "resume",
    "octavo plan MODEL": "estimate cost",
    "octavo generate SOURCE --time": "bench benchmark",
    "octavo report RUN": "plot dashboard",
    "octavo inspect PACKED": "show",
    "octavo inspect PACKED for a folder, octavo doctor for this machine": "info",
    "octavo compare RUN RUN": "diff",
    "octavo formats RECIPE": "recipe",
    f"{_SMOOTH}, or {_ROTATE}": "fold",
    _SMOOTH: "smoothquant",
    _ROTATE: "rotate",
}
OTHER_COMMANDS = {word: advice for advice, words in _WORDS.items() for word in words.split()}


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
