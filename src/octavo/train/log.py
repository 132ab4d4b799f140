"""The console of a training run. The run continues when its output can no longer be written."""

import os
import sys
from typing import IO, Any, cast

from rich.console import Console

from octavo.train.ranks import rank


def training_console() -> Console:
    """A console on standard output. If that can no longer be written, it says so once and prints nothing more.

    Standard output may be a pipe whose reader ended (`octavo train | head`), a terminal that was closed, or a file on
    a full disk. None of these ends a run: its numbers are in metrics.jsonl.
    """
    if sys.stdout is None or rank() > 0:  # the program was started without one, or another rank prints
        return Console(quiet=True)
    return Console(file=cast(IO[str], LastingStream(sys.stdout)))


def print_line(console: Console, text: str) -> None:
    """Print plain text as it is: no markup, no colour, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class LastingStream:
    """A text stream whose `write` and `flush` never raise an OSError: after the first one they do nothing."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._gone = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, action: Any) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError as error:
            self._gone = True
            _discard(self._stream)
            _notify(f"the log cannot be printed any more ({error}): the run continues, metrics.jsonl has its numbers")


def _discard(stream: IO[str]) -> None:
    """Send the buffered text of `stream` to the null device: Python flushes it once more when the program ends."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return  # a stream without a file descriptor


def _notify(message: str) -> None:
    if sys.stderr is None:
        return
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)
