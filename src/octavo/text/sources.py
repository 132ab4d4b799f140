"""Finding the files of a source: Python's standard library, a file, a folder or a glob."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from octavo.text.document import DataError
from octavo.text.report import Tally

DATASET = "hf:"
STDLIB = "stdlib"
LEFT_OUT_FOLDERS = ("__pycache__", "site-packages")


def absolute_source(source: str) -> str:
    """`source` in a form that names the same data from every working directory."""
    if source == STDLIB:
        return source
    if source.startswith(DATASET):
        name, mark, options = source.removeprefix(DATASET).partition("?")
        return DATASET + (_absolute(name) if os.path.isdir(name) else name) + mark + options
    return _absolute(source)


def _absolute(source: str) -> str:
    path = os.path.expanduser(source)
    if os.path.isabs(path):
        return path
    here = os.getcwd()
    # A working directory can have the characters of a glob in its name.
    return os.path.join(glob.escape(here) if _is_glob(path) else here, path)


def _is_glob(path: str) -> bool:
    return glob.has_magic(path) and not os.path.exists(path)


def find_files(source: str, tally: Tally) -> tuple[list[Path], bool]:
    """The files of a source other than a data set, and whether the source names the file itself.

    `tally` counts the entries of a folder that are not readable files, such as links to folders.

    Raises:
        DataError: the source does not exist, or leads to no file.
    """
    if source == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        return [path for path in _walk(folder, tally) if path.suffix == ".py"], False
    path = os.path.expanduser(source)
    if os.path.isfile(path):
        return [Path(path)], True
    if path and os.path.isdir(path):
        files = list(_walk(Path(path), tally))
        if not files:
            raise DataError(f"the folder {source} must hold files; it has none (hidden files do not count)")
        return files, False
    if not glob.has_magic(path):
        raise DataError(
            f"data source {source!r} must be {STDLIB}, a file, a folder, a glob or {DATASET}DATASET; there is no such "
            f"file or folder{'' if os.path.isabs(path) else f' in {Path.cwd()}'}"
        )
    files = [Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    if not files:
        raise DataError(f"the glob {source} must match files; it matches none from {Path.cwd()}")
    return files, False


def _walk(folder: Path, tally: Tally) -> Iterator[Path]:
    """Every file below `folder`, except hidden files and files in folders that are hidden or in LEFT_OUT_FOLDERS."""

    def unreadable(error: OSError) -> None:
        tally.skip(str(error.filename), "unreadable", 0)

    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT_FOLDERS and name[0] != ".")
        for name in folders:
            if os.path.islink(os.path.join(root, name)):
                tally.skip(os.path.join(root, name), "a link to a folder", 0)
        for name in sorted(names):
            path = Path(root, name)
            if name[0] == ".":
                continue
            if path.is_file():
                yield path
            else:
                tally.skip(str(path), "not a regular file", 0)
