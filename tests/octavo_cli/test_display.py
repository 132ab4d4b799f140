"""Tables and lines: whole names in a pipe and on a narrow terminal, and nothing that a terminal would obey."""

import io
import sys
from functools import partial

import pytest
import torch
from rich.console import Console
from verify_examples import change_tensors

from octavo.util import Table
from octavo_cli import display
from octavo_cli.display import print_rows, print_table, progress, say

LONG = "model.layers.0.self_attn.a_projection_with_a_long_name.weight"
WORDS = "one reason in several words that a narrow terminal has to wrap between two of them"


@pytest.fixture
def terminal(monkeypatch):
    """terminal(width): a terminal to print to, as a list whose one entry is the text."""

    def make(width):
        file = io.StringIO()
        screen = partial(Console, width=width, force_terminal=True, color_system=None, file=file)
        monkeypatch.setattr(display, "_Screen", screen)
        return file

    return make


def test_in_a_pipe_nothing_is_cut_and_numbers_are_aligned_on_their_right(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    first = {"tensor": LONG, "empty": "", "why": WORDS, "MB": "1.00", "gap": "+1.5%"}
    print_rows([first, {"tensor": "b", "MB": "22.00", "gap": ""}], prose=("why",))
    lines = capsys.readouterr().out.splitlines()
    expected = [["tensor", "why", "MB", "gap"], [LONG, *WORDS.split(), "1.00", "+1.5%"], ["b", "22.00"]]
    assert [line.split() for line in lines] == expected
    ends = {line.index(end) + len(end) for line, end in zip(lines, ("MB", "1.00", "22.00"), strict=True)}
    assert ends == {lines[1].index("1.00") + 4}


@pytest.mark.parametrize("width", [None, 400])
def test_a_row_that_fits_takes_few_calls(terminal, capsys, width):
    """rich makes thousands of calls for a row, which took 90 s for 20,000 tensors."""
    if width:
        terminal(width)
    rows, calls = 500, []
    sys.setprofile(lambda *_: calls.append(1))
    try:
        print_table(Table("", ("tensor", "why", "MB"), [(LONG, WORDS, "1.00")] * rows, ("MB",), ("why",)))
    finally:
        sys.setprofile(None)
    assert len(calls) < 300 * rows


HOSTILE = "\x1b]0;owned\x07[red]a\x1b[2J\rb\x9b31mc\udcff"
SHOWN = "\ufffd]0;owned\ufffd[red]a\ufffd[2J\ufffdb\ufffd31mc\ufffd"


def test_nothing_in_a_name_is_obeyed_by_a_terminal_or_taken_for_markup(terminal, capsys):
    say(HOSTILE, error=True)
    assert capsys.readouterr().err == f"{SHOWN}\n"
    for width in (40, 400):
        file = terminal(width)
        print_table(Table(HOSTILE, (HOSTILE, "why"), [(f"{HOSTILE}\nb", HOSTILE)], prose=("why",)))
        assert file.getvalue().split() == [SHOWN, SHOWN, "why", f"{SHOWN}\ufffdb", SHOWN]


@pytest.mark.parametrize("command", ["inspect", "generate", "verify"])
def test_a_file_whose_names_are_meant_for_the_terminal(octavo, copy_of, packed, command):
    folder = copy_of("llama")
    change_tensors(folder, lambda tensors: tensors.update({HOSTILE[:-1]: torch.ones(2)}))
    words = {"generate": ("--prompt", "a"), "verify": ("--against", packed["llama"].run), "inspect": ()}[command]
    _, out, err = octavo(command, folder, *words)
    assert SHOWN[:-1] in out + err
    assert not [c for c in out + err if not c.isprintable() and c != "\n"]


def test_a_name_beyond_all_measure_is_cut_in_its_middle(capsys):
    print_table(Table("", ("tensor", "why"), [("a" * 5000 + "z", "w" * 300)], prose=("why",)))
    name, why = capsys.readouterr().out.splitlines()[1].split()
    assert (name, why) == ("a" * 100 + "…" + "a" * 99 + "z", "w" * 300)


def test_no_bar_and_no_blank_line_where_there_is_no_terminal(capsys):
    with progress("packing") as advance:
        advance(1, 2, "packing")
    assert capsys.readouterr() == ("", "")
