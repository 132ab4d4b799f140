"""A folder that appears whole or not at all.

Everything is written to a hidden sibling, flushed to the disk, and renamed: whoever sees the folder sees all of it, and
a full disk or a kill leaves only the sibling behind, which the next writer clears away.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class WriteError(RuntimeError):
    """A folder could not be written; what stood there before still does."""


def check_absent(target: Path) -> None:
    """Raise FileExistsError if `target` exists: for work that should find out before it begins."""
    if target.exists():
        raise FileExistsError(f"{target} exists already: choose another folder, or remove it first")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `target` when the block ends without an error.

    Raises:
        FileExistsError: `target` exists.
        WriteError: the disk is full, or refused the write for another reason.
    """
    check_absent(target)
    partial = target.parent / f".{target.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _flush(partial)
        partial.rename(target)
        _flush_entry(target.parent)
    except OSError as error:
        free = shutil.disk_usage(target.parent).free if target.parent.exists() else 0
        raise WriteError(
            f"could not write {target}: {error}. {free / 1e6:.0f} MB are free there; nothing that existed was changed"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _flush_entry(path)
    _flush_entry(folder)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
