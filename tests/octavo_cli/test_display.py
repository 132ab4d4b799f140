"""Tables and lines: whole names in a pipe and on a narrow terminal."""

import io

import pytest
from rich.console import Console

from octavo_cli import display
from octavo_cli.display import print_facts, print_table, progress, say

LONG = "model.layers.0.self_attn.a_projection_with_a_long_name.weight"
WORDS = "one reason in several words that a narrow terminal has to wrap between two of them"


@pytest.fixture
def terminal(monkeypatch):
    """terminal(width): a terminal to print to, as a list whose one entry is the text."""

    def make(width):
        file = io.StringIO()

        class Terminal(Console):
            def __init__(self, **options):
                given = {"width": width, "force_terminal": True, "color_system": None, "file": file}
                super().__init__(**(given | options))

        monkeypatch.setattr(display, "_Screen", Terminal)
        return file

    return make


def test_in_a_pipe_nothing_is_cut_or_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("tensor", "why", "MB"), [(LONG, WORDS, "1.00"), ("b", "", "22.00")], right=["MB"], prose=["why"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split() == [LONG, *WORDS.split(), "1.00"]
    assert lines[2].rstrip().endswith(" 22.00")
    assert {line.rindex(end) + len(end) for line, end in zip(lines, ("MB", "1.00", "22.00"), strict=True)} == {
        len(lines[1].rstrip())
    }


def test_a_narrow_terminal_shows_whole_names(terminal):
    file = terminal(50)
    print_table(("tensor", "why"), [(LONG, WORDS)], prose=["why"])
    text = file.getvalue()
    assert LONG in text
    assert text.replace(LONG, "").split() == ["tensor", "why", *WORDS.split()]
    assert "…" not in text


def test_a_wide_enough_terminal_wraps_prose_within_its_width(terminal):
    file = terminal(80)
    print_table(("name", "why"), [("short", WORDS)], prose=["why"])
    assert max(len(line.rstrip()) for line in file.getvalue().splitlines()) <= 80
    assert file.getvalue().split() == ["name", "why", "short", *WORDS.split()]


def test_brackets_are_printed_as_they_are(capsys):
    print_facts([("left in BF16", "[red]no[/red] markup")])
    say("[bold]this[/bold] too")
    out = capsys.readouterr().out
    assert out.splitlines()[0].split("  ")[-1].strip() == "[red]no[/red] markup"
    assert "[bold]this[/bold] too" in out


def test_no_bar_and_no_blank_line_where_there_is_no_terminal(capsys):
    with progress("packing") as advance:
        advance(1, 2, "packing")
        advance(2, 2, "checking")
    assert capsys.readouterr() == ("", "")
