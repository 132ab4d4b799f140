"""Printing for all commands: lines, tables and a progress bar.

In a pipe or a file a line is as long as its text, so that `grep` finds every name. On a terminal a column of prose is
wrapped between words, and names stay whole, if necessary on lines longer than the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from octavo.progress import Progress

CLOSED_PIPE = 128 + 13  # the exit code of a program that SIGPIPE ended
_PROSE = 30  # columns that prose keeps on a narrow terminal
_WIDE = 1_000_000


class _Screen(Console):
    """A console that ends the program quietly when its output can no longer be written."""

    def on_broken_pipe(self) -> None:
        discard_output()
        raise SystemExit(CLOSED_PIPE)


def discard_output() -> None:
    """Discard the text that standard output still buffers, so that Python does not fail to write it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def say(text: str = "", style: str = "", *, error: bool = False) -> None:
    """Print plain text on one line, to standard error if it is about an error: no markup, no wrapping."""
    _Screen(stderr=error).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    prose: Sequence[str] = (),
    title: str = "",
    header: bool = True,
) -> None:
    """Print a table without borders.

    Columns in `right` are aligned as numbers are. Those in `prose` may be wrapped between words on a terminal; the
    others are never cut or wrapped. `title` is a line above the table.
    """
    table = Table(box=None, pad_edge=False, show_header=header)
    for at, name in enumerate(columns):
        width = max(cell_len(text) for text in (name if header else "", *(row[at] for row in rows)))
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in prose,
            min_width=min(width, _PROSE) if name in prose else width,
        )
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    if title:
        say(title, "bold")
    console = _Screen()
    room = console.width if console.is_terminal else _WIDE
    needed = table.__rich_measure__(console, console.options.update(max_width=_WIDE))
    screen = _Screen(width=min(max(room, needed.minimum), needed.maximum))
    if console.is_terminal:
        screen.print(table, crop=False)
        return
    with screen.capture() as captured:
        screen.print(table, crop=False)
    for line in captured.get().splitlines():
        say(line.rstrip())  # a cell is filled up with blanks, in the last column too


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print pairs of a name and a sentence, one below the other."""
    print_table(("name", "fact"), facts, prose=("fact",), header=False)


@contextmanager
def progress(doing: str) -> Iterator[Progress]:
    """A progress bar on standard error while the block runs; none where that is no terminal.

    Example:

        with progress("packing") as advance:
            advance(1, 10, "packing")
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)

        def advance(done: int, total: int, doing: str) -> None:
            bar.update(task, completed=done, total=total, description=doing)

        yield advance
