"""What the commands that read prompts have in common: the help of --data, and the lines on what was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from octavo.text import ReadReport

DATA_HELP = "Text: stdlib, a file, folder or glob, .jsonl (text, prompt or messages), or hf:DATASET. Repeatable"


def print_reading(console: Console) -> Callable[[ReadReport], None]:
    """A function that prints what was read and what was skipped."""

    def show(report: ReadReport) -> None:
        for line in report.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show
