"""Printing for all commands: lines, tables and a progress bar.

In a pipe or a file a line is as long as its text, so that `grep` finds every name. On a terminal a column of prose is
wrapped between words, and names stay whole, if necessary on lines longer than the terminal.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table as Grid
from rich.text import Text

from octavo.util import Progress, Table, discard_output, printable

CLOSED_PIPE = 128 + 13  # the exit code of a program that SIGPIPE ended
_PROSE = 30  # columns that prose keeps on a narrow terminal
_LONGEST = 200  # characters of a name in a table
_NUMBER = re.compile(r"([+-]?(\d[\d,]*(\.\d+)?(e[+-]?\d+)?|inf|nan)[%x]?)?")  # of a column that is aligned on its right
_GAP = "  "  # between columns


class _Screen(Console):
    """A console that ends the program quietly when its output can no longer be written."""

    def on_broken_pipe(self) -> None:
        discard_output(sys.stdout)
        raise SystemExit(CLOSED_PIPE)


def say(text: str = "", style: str = "", *, error: bool = False) -> None:
    """Print plain text on one line, to standard error if it is about an error: no markup, no wrapping."""
    _Screen(stderr=error).print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(table: Table, *, header: bool = True) -> None:
    """Print a table without borders, and without its remark. Columns in `prose` may be wrapped between words on a
    terminal; the others are not wrapped, and cut in their middle if they are longer than any name."""
    title, columns, rows, right, prose, _ = table
    if title:
        say(title, "bold")
    cells = [[_cell(text, name in prose) for name, text in zip(columns, row, strict=True)] for row in rows]
    lines = [[_cell(name, prose=False) for name in columns], *cells] if header else cells
    widths = [max((cell_len(line[at]) for line in lines), default=0) for at in range(len(columns))]
    console = _Screen()
    if console.is_terminal and prose and sum(widths) + len(_GAP) * (len(widths) - 1) > console.width:
        grid = Grid(box=None, pad_edge=False, show_header=header)
        for at, name in enumerate(columns):
            grid.add_column(
                Text(lines[0][at]),
                justify="right" if name in right else "left",
                no_wrap=name not in prose,
                min_width=min(widths[at], _PROSE) if name in prose else widths[at],
            )
        for row in cells:
            grid.add_row(*map(Text, row))
        needed = grid.__rich_measure__(console, console.options.update(max_width=1_000_000))
        _Screen(width=max(console.width, needed.minimum)).print(grid, crop=False)
        return
    sides = [name in right for name in columns]
    texts = [_GAP.join(map(_aligned, line, widths, sides)).rstrip() for line in lines]  # rich takes long for a row
    if header:
        say(texts.pop(0), "bold")
    if texts:
        say("\n".join(texts))


def show(tables: Iterable[Table]) -> None:
    """Print the tables that have rows, each with its remark, and a line between them."""
    for table in tables:
        if table.rows:
            print_table(table)
            if table.remark:
                say(table.remark, "dim")
            say()


def print_rows(rows: Sequence[Mapping[str, str]], *, prose: tuple[str, ...] = (), title: str = "") -> None:
    """Print a table of rows, each the text by column. A column of numbers is aligned on its right. The columns are
    those of the rows in their order, without those that are empty in all of them."""
    every = dict.fromkeys(name for row in rows for name in row)
    names = tuple(name for name in every if any(row.get(name) for row in rows))
    cells = [tuple(row.get(name, "") for name in names) for row in rows]
    right = tuple(name for name in names if all(_NUMBER.fullmatch(row.get(name, "")) for row in rows))
    print_table(Table(title, names, cells, right, prose))


def _aligned(text: str, width: int, right: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def _cell(text: str, prose: bool) -> str:
    text = printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}")
    return text if prose or len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print pairs of a name and a sentence, one below the other."""
    print_table(Table("", ("name", "fact"), facts, prose=("fact",)), header=False)


@contextmanager
def progress(doing: str) -> Iterator[Progress]:
    """A progress bar on standard error, where that is a terminal, while the block runs; advance(done, total, doing)
    moves it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    first = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun, which share a terminal
    with Bar(*columns, console=console, transient=True, disable=not (console.is_terminal and first)) as bar:
        task = bar.add_task(doing, total=None)

        def advance(done: int, total: int, doing: str) -> None:
            bar.update(task, completed=done, total=total, description=doing)

        yield advance


# ---- Files that a command writes at its end. An existing file is replaced only if it is one that Octavo wrote.


_KINDS = {
    "a page": re.escape(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-"
    ),
    "a table": "octavo plan,",
    "a report": r'\{\s*"date": "[^"]+",\s*"command": "octavo verify ',
}  # how each begins


def check_output(path: Path | None, option: str, kind: str) -> None:
    """Raise a ValueError that names `option` unless a file of `kind` can be written at `path`, if one is given. A file
    that is there must be empty, or of the same kind and of Octavo."""
    if path is None or _is_stream(path):
        return
    target = Path(os.path.realpath(path))
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
        head = ""
        if target.exists():
            with target.open("rb") as file:
                head = file.read(4096).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}. Nothing was run") from error
    if head and not re.match(_KINDS[kind], head):
        advice = f"is not {kind} that Octavo wrote: give another name. Nothing was run"
        raise ValueError(f"{option} {path} exists, and {advice}")


def write_output(path: Path, text: str) -> None:
    """Write a file that `check_output` allowed, whole or not at all. Raises a WriteError, which names it."""
    from octavo.checkpoint.files import replace_file
    from octavo.checkpoint.folder import writing

    with writing(path):
        if _is_stream(path):
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(Path(os.path.realpath(path)), text)


def _is_stream(path: Path) -> bool:
    """True if the path is that of a terminal or a pipe, such as /dev/stdout."""
    return path.is_char_device() or path.is_fifo()
