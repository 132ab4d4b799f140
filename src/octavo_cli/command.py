"""The classes of the commands, which read the words of the command line and print help.

Help is plain text. An example in it stands on one line, so that it can be copied.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from octavo_cli.choices import FLAGS, FORMER_SETTINGS, SETTINGS
from octavo_cli.display import CLOSED_PIPE, discard_output, say
from octavo_cli.other_names import OTHER_NAMES


class Command(TyperCommand):
    """A command with plain-text help. It suggests an option for an unknown one, and refuses one that is repeated."""

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:
        # "\b" keeps the lines of a paragraph as they are: an example is copied from one line.
        paragraphs = [f"\b\n{each}" if each.startswith("  ") else each for each in (help or "").split("\n\n")]
        super().__init__(*args, help="\n\n".join(paragraphs), **kwargs)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line: SOURCE for an argument, [SOURCE] for one that may be left out, --data TEXT."""
        pieces = ["[OPTIONS]"]
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                pieces.append(_shown(param) if param.required else f"[{_shown(param)}]")
            elif param.required:
                pieces.append(f"{param.opts[0]} {_shown(param)}")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params: list[Any] = self.get_params(ctx)
        arguments = [(_shown(p), p.help or "") for p in params if p.param_type_name == "argument"]
        options = [p.get_help_record(ctx) for p in params if p.param_type_name != "argument"]
        for title, rows in (("Arguments", arguments), ("Options", [row for row in options if row])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._refuse_repetition(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Typer brings its own copy of click in some versions, so the class has no name that holds in all.
            unknown = getattr(error, "option_name", None)
            if type(error).__name__ == "NoSuchOption" and unknown is not None:
                refuse_option(ctx, unknown, self._option_names(ctx))
            raise

    def _refuse_repetition(self, ctx: Any, args: list[str]) -> None:
        options: dict[str, Any] = {
            name: param
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        given = set()
        words = iter(args)
        for word in words:
            name, equals, _ = word.partition("=")
            option = options.get(name)
            if word == "--":
                return
            if option is None:
                continue
            if option.name in given and not option.multiple:
                ctx.fail(f"{name} must be given once; got it more than once")
            given.add(option.name)
            if not equals and not option.is_flag:
                next(words, None)  # the value, which can look like an option

    def _option_names(self, ctx: Any) -> list[str]:
        return [name for param in self.get_params(ctx) for name in param.opts if name.startswith("--")]


class NumberCommand(Command):
    """A command with a number as its argument. A negative number is read as the argument and not as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move negative numbers behind `--`, the end of the options."""
        before = args.index("--") if "--" in args else len(args)
        numbers = [word for word in args[:before] if _is_negative(word)]
        if numbers:
            others = [word for word in args[:before] if not _is_negative(word)]
            args = [*others, "--", *numbers, *args[before + 1 :]]
        return super().parse_args(ctx, args)


class SettingsCommand(Command):
    """A command that takes settings of training in addition to its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse a word that is neither an option nor a setting, before PyTorch is imported."""
        flags = (*FLAGS, *FORMER_SETTINGS)
        known = [*self._option_names(ctx), *(f"--{name}" for name in (*SETTINGS, *FORMER_SETTINGS))]
        known += [f"--no-{name}" for name in flags]
        for word in args:
            name = word.partition("=")[0]
            if name.startswith("--") and name.replace("_", "-") not in known:
                refuse_option(ctx, name, known)
            if re.match("-[a-z]", word) and word != "-h" and not _is_negative(word):
                refuse_option(ctx, word, known)
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """All commands. `octavo help COMMAND` is another way to write `octavo COMMAND --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Ctrl-C and a closed pipe end it as they end other Unix tools."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("interrupted", error=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            discard_output()
            raise typer.Exit(CLOSED_PIPE) from None


def refuse_option(ctx: Any, unknown: str, known: Iterable[str]) -> None:
    """End with an error that says which of the options in `known` the option `unknown` may stand for."""
    name, names = unknown.lstrip("-").replace("_", "-").lower(), {option.lstrip("-") for option in known}
    elsewhere = OTHER_NAMES.get(name, "")
    if "out" in (name, elsewhere) and any(
        p.name == "out" and p.param_type_name == "argument" for p in ctx.command.params
    ):
        advice = "OUT is given without an option, as the usage above shows."
    elif name in names or elsewhere in names:
        advice = f"Did you mean --{name if name in names else elsewhere}?"
    elif " " in elsewhere:
        advice = elsewhere
    else:
        near = difflib.get_close_matches(name, sorted(names), n=1)
        advice = f"Did you mean --{near[0]}?" if near else ""
    ctx.fail(f"No such option: {unknown}. {advice}".strip())


def _is_negative(word: str) -> bool:
    return re.fullmatch(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-inf|-nan", word, re.IGNORECASE) is not None


def _shown(param: Any) -> str:
    """The word that stands for the value of an argument or option."""
    return str(param.metavar or param.name.upper())
