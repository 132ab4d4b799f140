"""One writer a folder: a run or an output folder belongs to one program at a time.

The lock of FOLDER is the file .FOLDER.lock beside it, held with flock(2) and removed at the end. The operating system
gives the lock up when its program ends, however it ends, so the file that a killed program leaves behind locks nothing.
The file says who holds the lock.
"""

import fcntl
import json
import os
import shlex
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Self

_PATIENCE = 0.1  # seconds: `check_unlocked` of another program holds the lock for an instant


class LockedError(RuntimeError):
    """Another program, or another part of this one, writes to the folder; the message says which."""


class FolderLock:
    """The lock of a folder, which need not exist. A context manager; `acquire` and `release` may be called instead.

    Example:
        >>> with FolderLock(Path("runs/first")):
        ...     ...  # nobody else writes to runs/first
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, _lock_file(folder)
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        """Take the lock, within 0.1 s or not at all; nothing happens if this object holds it already.

        Raises:
            LockedError: somebody else holds it.
            OSError: the parent folder cannot be written.
        """
        patience = time.monotonic() + _PATIENCE
        while self._descriptor is None:
            try:
                self._descriptor = self._attempt()
            except LockedError:
                if time.monotonic() > patience:
                    raise
                time.sleep(_PATIENCE / 5)
        return self

    def release(self) -> None:
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)  # before it is given up: afterwards the file may be another holder's
            os.close(self._descriptor)
            self._descriptor = None

    def _attempt(self) -> int | None:
        """The descriptor of the locked file; None if its last holder removed the file meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, self.folder)
            if _is_file(descriptor, self.path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(_this_program()).encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def check_unlocked(folder: Path) -> None:
    """Raise a LockedError if somebody holds the lock of `folder` now. Changes nothing."""
    try:
        descriptor = os.open(_lock_file(folder), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        _lock(descriptor, folder)
    finally:
        os.close(descriptor)


def _lock_file(folder: Path) -> Path:
    folder = Path(os.path.abspath(folder))
    return folder.parent / f".{folder.name}.lock"


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _describe(os.read(descriptor, 1 << 16))
        raise LockedError(
            f"{folder} is in use: {holder} writes to it. Wait until that has ended, or choose another folder"
        ) from None


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _this_program() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    }


def _describe(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} ({holder['command']}), since {holder['since']},"
    except (ValueError, KeyError, TypeError):
        return "another program"  # it has only just taken the lock
