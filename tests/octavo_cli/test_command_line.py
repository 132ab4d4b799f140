"""What all commands share: help and typing mistakes without PyTorch, options, completion, errors and exit codes."""

import errno
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints
from unittest import TestCase
from unittest.mock import Mock

import pytest
import torch
import typer
from launch import with_source
from typer.testing import CliRunner

from octavo import __version__
from octavo.checkpoint.layouts import LAYOUTS
from octavo.checkpoint.scheme import SCHEMES
from octavo.inference.engine import AUTO
from octavo.inference.kv_cache import ATTENTIONS, DTYPES, Length
from octavo.numerics import FORMATS, Cast
from octavo.ops import quantize
from octavo.ops.gemm import scaled_mm_reference
from octavo.ops.launching import Operands
from octavo.packing.gguf_export import WEIGHTS
from octavo.plan.serving import CACHE_BYTES
from octavo.rates.measured import known_gpus
from octavo.recipe import PRESETS
from octavo.train.config import PRESETS as MODEL_PRESETS
from octavo_cli import shared
from octavo_cli.app import OTHER_COMMANDS, Command, app

Octavo = Callable[..., tuple[Any, str, str]]
COMMANDS = (
    "plan", "train", "compare", "report", "bisect", "calibrate", "pack", "unpack", "verify", "evaluate", "generate",
    "inspect", "formats", "doctor",
)  # fmt: skip

# --- Answered without PyTorch

CALL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from octavo_cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["octavo", *words]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    heavy = {"torch", "numpy", "safetensors", "transformers"} & sys.modules.keys()
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted(heavy)]))
"""
ANSWERS: list[tuple[list[str], int, str]] = [
    (["--help"], 0, "Usage: octavo"),
    (["-h"], 0, "Usage: octavo"),
    (["help"], 0, "Usage: octavo"),
    (["--version"], 0, f"octavo {__version__}\n"),
    (["train", "-h"], 0, "octavo train --resume runs/first"),
    (["pack", "-h"], 0, "  octavo pack models/qwen packed/qwen --scheme block --layout fp8 --tensor-parallel 1,2,4\n"),
    (["help", "verify"], 0, "octavo verify packed/qwen --against models/qwen"),
    (["pakc"], 2, "No such command 'pakc'. Did you mean 'pack'"),
    (["help", "pakc"], 2, "Did you mean 'pack'"),
    (["serve"], 2, "No such command 'serve'. vLLM serves a packed folder: vllm serve FOLDER\n"),
    (["help", "quantize"], 2, "octavo pack MODEL OUT"),
    (["Chat"], 2, "octavo generate SOURCE --prompt TEXT"),
    (["fold", "a", "b"], 2, "octavo pack MODEL OUT --smooth CALIBRATION"),
    (["pack", "a", "b", "--shceme", "block"], 2, "--scheme"),
    (["plan", "gpt2", "--network", "nan"], 2, "--network must be a finite number; got nan"),
    (["inspect"], 2, "Missing argument"),
    (["train", "--out", "r\udcfcn"], 2, r"words of a command must be UTF-8, got 'r\udcfcn': rename the file or folder"),
    (["pack", "r\udcfcn", "b"], 2, "the words of a command must be UTF-8"),
]  # fmt: skip


def test_help_and_typing_mistakes_are_answered_without_pytorch() -> None:
    call = [sys.executable, "-c", CALL, json.dumps([words for words, _, _ in ANSWERS])]
    done = subprocess.run(call, capture_output=True, text=True, env=with_source(COLUMNS="120"), check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (words, code, answer), (returned, out, err, loaded) in zip(ANSWERS, found, strict=True):
        assert (returned, loaded) == (code, []), words
        assert answer in (err if code else out), words


def test_the_commands_are_listed_in_groups(printed) -> None:
    lines = printed("--help").splitlines()
    assert [line.split()[0] for line in lines[lines.index("Train:") :] if line.startswith("  ")] == list(COMMANDS)
    # every other word stands for a command that exists
    named = {name for advice in OTHER_COMMANDS.values() for name in re.findall(r"octavo ([a-z-]+)", advice)}
    assert named <= set(COMMANDS)
    assert not OTHER_COMMANDS.keys() & set(COMMANDS)


@pytest.mark.parametrize(
    ("words", "offered"), [("tr", {"train"}), ("train --res", {"--resume"}), ("pack --sch", {"--scheme"})]
)
def test_a_shell_completes_commands_and_options(octavo, monkeypatch, words, offered):
    given = ["octavo", *words.split()]
    variables = {"_OCTAVO_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(given), "COMP_CWORD": str(len(given) - 1)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = octavo()
    assert (code, set(out.split()), err) == (0, offered, "")


def test_help_lists_what_the_library_takes() -> None:
    assert tuple(FORMATS) == shared.FORMATS
    assert ATTENTIONS == shared.ATTENTIONS
    assert tuple(CACHE_BYTES) == shared.CACHES
    assert tuple(known_gpus()) == shared.GPUS
    assert tuple(WEIGHTS) == shared.GGUF_WEIGHTS
    assert {AUTO, *DTYPES} - {"fp32", "fp16"} == set(shared.KV_CACHES)
    assert tuple(name for name, layout in LAYOUTS.items() if layout.written) == shared.LAYOUTS
    assert tuple(MODEL_PRESETS) == shared.MODEL_PRESETS
    assert tuple(PRESETS) == shared.RECIPES
    assert tuple(SCHEMES) == shared.SCHEMES


# --- Options: --data takes several words, and no number is inf or NaN

several = typer.Typer()


@several.command(cls=Command)
def command(
    model: Path, out: Path, data: Annotated[list[str], typer.Option()], samples: int = 1, dry: bool = False
) -> None:
    print(model, out, data, samples)


@several.callback()
def main() -> None:
    """Makes `command` the name of a command."""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("M OUT --data a", 0, "M OUT ['a'] 1\n"),
        ("M OUT --data a b c", 0, "M OUT ['a', 'b', 'c'] 1\n"),
        ("M OUT --data a --data b", 0, "M OUT ['a', 'b'] 1\n"),
        ("M OUT --data a b --dry --data=c d --samples 1", 0, "M OUT ['a', 'b', 'c', 'd'] 1\n"),
        ("--data a M OUT", 0, "M OUT ['a'] 1\n"),
        ("M --data a OUT", 0, "M OUT ['a'] 1\n"),
        ("--data a --samples 1 M OUT", 0, "M OUT ['a'] 1\n"),
        ("M OUT --data -x b", 0, "M OUT ['-x', 'b'] 1\n"),
        ("M OUT --data --samples --samples 3", 0, "M OUT ['--samples'] 3\n"),
        ("M OUT more --data a", 2, "Got unexpected extra argument(s) (more)"),
        ("--data a b M OUT", 2, "Got unexpected extra argument(s) (OUT)"),
        ("M --data a b OUT", 2, "Got unexpected extra argument(s) (OUT)"),
        ("M OUT more", 2, "Missing option '--data'"),
    ],
)
def test_words_of_the_option_and_arguments_are_told_apart(words: str, code: int, said: str) -> None:
    result = CliRunner().invoke(several, ["command", *words.split()])
    assert result.exit_code == code
    assert said in result.output


FLOATS = [
    (each.name, f"--{name.replace('_', '-')}")
    for each in app.registered_commands
    for name, kind in get_type_hints(each.callback).items()
    if float in (kind, *get_args(kind))
]


@pytest.mark.parametrize("value", ["nan", "-inf", "1e999"])
@pytest.mark.parametrize(("name", "option"), FLOATS)
def test_no_number_is_inf_or_nan(octavo: Octavo, name: str, option: str, value: str) -> None:
    code, out, err = octavo(name, "a", *(["b"] if name == "pack" else []), option, value)
    assert (code, out) == (2, "")
    assert f"{option} must be a finite number; got {float(value)}" in err


# --- The end of a command


@pytest.fixture
def ending(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, str, str]]:
    """ending(fail): how a command ends in which the library calls `fail`."""

    def call(fail: Callable[[], Any]) -> tuple[Any, str, str]:
        monkeypatch.setattr("octavo.numerics.formats.get_format", lambda name: fail())
        return octavo("formats", "0.1")

    return call


_MISFITS = (quantize(torch.zeros(2, 3), Cast()), quantize(torch.zeros(2, 4), Cast()))
FAULTS = {
    "TypeError": Mock(side_effect=TypeError("Octavo added a word to a number")),
    "KeyError": Mock(side_effect=KeyError("x")),
    "RecursionError": Mock(side_effect=RecursionError("too deep")),
    "NotImplementedError": lambda: torch.zeros(2).to(torch.float8_e4m3fn).amax(),
    "RuntimeError": lambda: scaled_mm_reference(Operands.of(*_MISFITS)),  # raised by torch in a function of Octavo
    "ModuleNotFoundError": Mock(side_effect=ModuleNotFoundError("No module named 'regex'")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_octavo_has_its_traceback_and_says_where_to_report_it(ending: Any, name: str) -> None:
    code, out, err = ending(FAULTS[name])
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):")
    assert "in formats_command" in err
    *_, raised, last = err.splitlines()
    assert raised.startswith(name)
    assert "please report the lines above" in last


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("steps must be 1 or more"), "steps must be 1 or more"),
        (MemoryError(), "MemoryError"),
        (ImportError("transformers is needed"), "transformers is needed"),
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
        (torch.distributed.DistStoreError("rank 1 did not come"), "rank 1 did not come"),
        (FileNotFoundError("model.safetensors is missing"), "model.safetensors is missing"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device: free some space"),
        (OSError(errno.EISDIR, "Is a directory", "run/metrics.jsonl"), "run/metrics.jsonl: Is a directory: a file is"),
        (OSError(errno.ENOTDIR, "Not a directory", "a.txt/b"), "a.txt/b: Not a directory: a folder is required"),
        (lambda: Length(4, "cpu").advance(5), "a cache of 4 tokens is full"),  # a RuntimeError that Octavo raises
    ],
)
def test_an_error_that_the_user_can_mend_is_one_line(ending: Any, error: Any, message: str) -> None:
    code, out, err = ending(Mock(side_effect=error) if isinstance(error, Exception) else error)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith(f"error: {message}")


def test_ctrl_c_is_not_a_traceback(ending: Any) -> None:
    assert ending(Mock(side_effect=KeyboardInterrupt())) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("words", "function", "message"),
    [
        ("calibrate llama out --data text.txt", "calibration.calibrate", "the blocks that were done are kept beside"),
        ("bisect tiny.toml", "bisection.bisect", "the short runs that ended are in runs/bisect; the same command"),
    ],
)
def test_an_interrupt_says_how_to_continue(octavo, here, monkeypatch, words, function, message):
    monkeypatch.setattr(f"octavo.{function}", Mock(side_effect=KeyboardInterrupt))
    code, _, err = octavo(*words.split())
    assert code == 130
    assert err.startswith(f"interrupted: {message}")


def test_ctrl_c_while_the_commands_are_imported_is_not_a_traceback() -> None:
    code = """
import builtins, sys
real = builtins.__import__
def interrupted(name, *rest, **more):
    if name == "typer":
        raise KeyboardInterrupt
    return real(name, *rest, **more)
builtins.__import__ = interrupted
from octavo_cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=with_source(), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_name_of_300_letters_is_refused(refused: Callable[..., str]) -> None:
    for words in (("train", "n" * 300), ("pack", "n" * 300, "out"), ("report", "n" * 300), ("plan", "n" * 300)):
        assert "give a name of at most 255 bytes" in refused(*words)


@pytest.mark.parametrize("width", ["", "0"])
def test_an_unknown_width_of_the_terminal_shows_all(octavo, monkeypatch, width):
    usual = octavo("formats")
    set_variable = monkeypatch.setenv  # the fixture gives a width of its own
    monkeypatch.setattr(monkeypatch, "setenv", lambda name, _: set_variable(name, width))
    assert octavo("formats") == usual


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "formats"])
def test_a_reader_that_goes_away_ends_a_command_quietly(words: str) -> None:
    """The reader is gone before the first byte, as `head` is before the last of a long table."""
    reading, writing = os.pipe()
    os.close(reading)
    called = [sys.executable, "-m", "octavo", *words.split()]
    done = subprocess.run(called, stdout=writing, stderr=subprocess.PIPE, text=True, env=with_source(), check=False)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (1, 141)


def test_a_warning_is_one_line() -> None:
    script = "import warnings, octavo_cli.app as a; a.app = lambda **_: warnings.warn('odd scales'); a.run()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "warning: odd scales\n"


def test_only_the_known_messages_of_other_packages_are_hidden(printed) -> None:
    printed("formats", "0.1")
    with TestCase().assertLogs() as logs, TestCase().assertLogs("torch") as of_torch:  # which does not propagate
        logging.getLogger("torchao").warning("Failed to load _C.so: no such symbol")
        logging.getLogger("torch.utils._pytree").warning("%s is an Enum subclass and is now natively supported by", int)
        assert logs.output + of_torch.output == []
        for name in ("torchao", "torch.utils._pytree", "octavo", "torchao.optim"):
            logging.getLogger(name).warning("something else, by %s", name)
    assert len(logs.output + of_torch.output) == 4


@pytest.mark.slow
def test_torchao_is_imported_in_silence() -> None:
    pytest.importorskip("torchao")
    code = "from octavo_cli.app import hide_logs; hide_logs(); import torchao.optim"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=with_source())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
