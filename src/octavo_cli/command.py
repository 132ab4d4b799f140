"""The classes of the commands, and the words of other tools."""

import math
import re
import sys
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from octavo.util import discard_output
from octavo_cli.display import CLOSED_PIPE, say
from octavo_cli.shared import DATA


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
