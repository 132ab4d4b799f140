"""A folder that appears whole or not at all.

All files are written to a hidden folder beside it, flushed to the disk, and renamed. So every reader sees a whole
folder. After a full disk or a kill only the hidden folder is left, and the next writer removes it. One program at a
time writes a folder (`octavo.artifact.lock`).
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.artifact.lock import FolderLock, check_unlocked


class WriteError(RuntimeError):
    """A folder could not be written. Whatever existed there before is unchanged."""


def check_absent(target: Path) -> None:
    """Check, before long work begins, that `target` can be written.

    Raises:
        FileExistsError: `target` exists.
        LockedError: another program writes it.
    """
    _check_new(target)
    check_unlocked(target)


def partial_folder(target: Path) -> Path:
    """The hidden folder that `whole_folder` writes before it becomes `target`."""
    return target.parent / f".{target.name}.partial"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `target` when the block ends without an error.

    Raises:
        FileExistsError: `target` exists.
        LockedError: another program writes it.
        WriteError: the disk is full, or refused the write for another reason.
    """
    _check_new(target)
    partial = partial_folder(target)
    with locked_folder(target):
        _check_new(target)  # the last holder of the lock may have made it
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            _flush(partial)
            partial.rename(target)
            _flush_entry(target.parent)
        except OSError as error:
            raise write_error(target, error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder that is, until then, whole or not there."""
    hidden = partial_folder(folder)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def locked_folder(folder: Path) -> FolderLock:
    """Take the lock of `folder`.

    Raises:
        LockedError: another program holds it.
        WriteError: the system refuses to write there.
    """
    try:
        return FolderLock(folder).acquire()
    except OSError as error:
        raise write_error(folder, error) from error


def write_error(path: Path, error: OSError) -> WriteError:
    """The error for a write to `path` that the system refused. Its message says why and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next(parent for parent in Path(os.path.abspath(path)).parents if parent.exists())
        reason = f"the disk is full ({shutil.disk_usage(existing).free / 1e6:.0f} MB are free there): make room"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        reason = f"that place cannot be written ({error.strerror}): choose another"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        reason = f"a part of that path is a file, not a folder ({error.strerror}): choose another"
    else:
        reason = str(error)
    return WriteError(f"could not write {path}: {reason}; nothing that existed was changed")


def _check_new(target: Path) -> None:
    if target.exists():
        raise FileExistsError(f"{target} exists already: choose another folder, or remove it first")


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
