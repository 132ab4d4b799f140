"""What a person sees first: help, the version, and the answer to a typing mistake, at once and without PyTorch."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import __version__

SOURCE = Path(__file__).parents[2] / "src"
CALL = """
import sys
sys.argv = ["octavo", *sys.argv[1:]]
from octavo_cli import main
try:
    main()
finally:
    heavy = {"torch", "numpy", "octavo", "safetensors", "transformers"} & sys.modules.keys()
    print("loaded:", *sorted(heavy), file=sys.stderr)
"""


def fresh(*words):
    """The command in a process of its own: (exit code, standard output, standard error, what it loaded)."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", CALL, *words], capture_output=True, text=True, env=environment, check=False
    )
    errors, _, loaded = done.stderr.rpartition("loaded:")
    return done.returncode, done.stdout, errors, loaded.split()


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (["--help"], 0, "Usage: octavo"),
        (["-h"], 0, "Usage: octavo"),
        (["help"], 0, "Usage: octavo"),
        (["--version"], 0, f"octavo {__version__}\n"),
        (["train", "-h"], 0, "octavo train --resume runs/first"),
        (["pack", "--help"], 0, "octavo pack runs/first packed/first"),
        (["help", "verify"], 0, "octavo verify packed/qwen"),
        (["pakc"], 2, "No such command 'pakc'. Did you mean 'pack'"),
        (["help", "pakc"], 2, "Did you mean 'pack'"),
        (["pack", "a", "b", "--shceme", "block"], 2, "--scheme"),
        (["inspect"], 2, "Missing argument"),
    ],
)
def test_help_and_typing_mistakes_are_answered_without_pytorch(words, code, answer):
    returned, out, err, loaded = fresh(*words)
    assert (returned, loaded) == (code, [])
    assert answer in (err if code else out)


def test_help_takes_less_than_half_a_second():
    """Of the processor's time, which other processes do not lengthen as much as they do the clock's."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        fresh("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5
