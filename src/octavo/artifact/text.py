"""Text in files: which files a folder holds, and whether their bytes are text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path, *, leave_out: tuple[str, ...] = ()) -> Iterator[Path]:
    """Every file below `folder`, but hidden ones and those in folders that are hidden or called as in `leave_out`."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in leave_out and name[0] != "."]
        paths = (Path(root, name) for name in names if name[0] != ".")
        yield from (path for path in paths if path.is_file())


def decode(content: bytes) -> str | int:
    """The text (UTF-8 without NUL), or the offset of the first byte that makes it none."""
    nul = content.find(0)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if nul < 0 else min(nul, error.start)
    return text if nul < 0 else nul
