"""The fenced code blocks of a page in Markdown: ```LANGUAGE [no-test]."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS)
NO_TEST = "no-test"
_NUMBER = re.compile(r"[-+]?\d[\d.,:]*(e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    page: str  # its path from the root of the repository
    line: int  # of its opening fence, from 1
    language: str  # the first word of the info string
    tested: bool  # no `no-test` follows the language
    text: str  # what stands between the fences

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def shows_output_of(self, other: "Block") -> bool:
        """True if this block is the output of `other`: a `text` block right after a `python` block."""
        end = other.line + other.text.count("\n") + 1
        return other.language == "python" and self.language == "text" and self.line == end + 2

    def commands(self) -> Iterator[tuple[list[str], list[str]]]:
        """Each command of a `bash` or `console` block: its words, and the lines that the page shows below it."""
        words: list[str] = []
        shown: list[str] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ")
            if self.language == "console" and command == line:
                shown.append(line)
            elif split := shlex.split(command, comments=True):
                if words:
                    yield words, shown
                words, shown = split, []
        if words:
            yield words, shown


def read_blocks(page: str) -> list[Block]:
    """The code blocks of a page, in order. A ValueError for a fence without a language, or an indented command."""
    blocks, opened, lines = [], None, []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1):
        if opened is None and line.startswith("```"):
            language, *options = line[3:].split() or [""]
            if not language or options not in ([], [NO_TEST]):
                raise ValueError(f"{page}:{number}: a code block begins with ```LANGUAGE or ```LANGUAGE {NO_TEST}")
            opened, lines = (number, language, not options), []
        elif opened is not None and line == "```":
            blocks.append(Block(page, *opened, "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line)
        elif re.match(r"    (\$|octavo|make|import|pip) ?", line):
            raise ValueError(f"{page}:{number}: a command must stand in a fenced block, where it is run")
    return blocks


def missing_lines(shown: list[str], printed: str) -> list[str]:
    """The shown lines that were not printed, in this order. All numbers are equal, and `...` stands for anything."""
    lines = iter([_plain(line) for line in printed.splitlines()])
    return [line for line in shown if line.strip() != "..." and not any(_matches(line, other) for other in lines)]


def different_lines(shown: str, printed: str) -> list[str]:
    """The lines that differ, as `shown | printed`. Numbers may differ by one in the last digit that is shown."""
    pairs = zip_longest(shown.splitlines(), printed.splitlines(), fillvalue="")
    return [f"{line} | {other}" for line, other in pairs if not _same_line(line, other)]


def _same_line(shown: str, printed: str) -> bool:
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", printed):
        return False
    found = ([match[0] for match in _NUMBER.finditer(line)] for line in (shown, printed))
    return all(a == b or _close(a, b) for a, b in zip(*found, strict=True))


def _close(shown: str, printed: str) -> bool:
    """True if two numbers that are printed alike differ by at most one in the last digit."""
    a, b = (Decimal(text.rstrip(".,:").replace(",", "")) for text in (shown, printed))
    return "." in shown and abs(a - b) <= Decimal(1).scaleb(min(a.as_tuple().exponent, b.as_tuple().exponent))


def _matches(shown: str, printed: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in _plain(shown).split("...")), printed) is not None


def _plain(line: str) -> str:
    """The line with `#` for each number and one blank for several."""
    return " ".join(_NUMBER.sub("#", line).split())
