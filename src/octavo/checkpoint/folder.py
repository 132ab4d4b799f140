"""A folder that appears whole or not at all, and the files of a model folder that are copied into another.

All files are written to a hidden folder beside it, flushed to the disk, and renamed. So every reader sees a whole
folder. After a full disk or a kill only the hidden folder is left, and the next writer removes it. One program at a
time writes a folder.
"""

import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from octavo.checkpoint.files import SUFFIX, ArtifactError, check_path

# ---- One writer a folder: a run or an output folder belongs to one program at a time.
#
# The lock of FOLDER is the file .FOLDER.lock beside it, held with flock(2) and removed at the end. The operating system
# gives the lock up when its program ends, however it ends, so the file that a killed program leaves behind locks
# nothing. The file says who holds the lock.


_PATIENCE = 0.1  # seconds: `check_unlocked` of another program holds the lock for an instant


class LockedError(RuntimeError):
    """Another program, or another part of this one, writes to the folder; the message says which."""


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which need not exist. A LockedError if another program, or another part of this one,
    holds it for longer than 0.1 s; a WriteError if the system refuses to write."""
    check_path(Path(os.path.abspath(folder)))
    path, patience = _lock_file(folder), time.monotonic() + _PATIENCE
    descriptor: int | None = None
    while descriptor is None:
        try:
            with writing(folder):
                descriptor = _attempt(folder, path)
        except LockedError:
            if time.monotonic() > patience:
                raise
            time.sleep(_PATIENCE / 5)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is given up: afterwards the file may be another holder's
        os.close(descriptor)


def _attempt(folder: Path, path: Path) -> int | None:
    """The descriptor of the locked file; None if its last holder removed the file meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor, folder)
        if _is_file(descriptor, path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_this_program()).encode())
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


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


# ---- A folder that appears whole or not at all.


class WriteError(RuntimeError):
    """A folder could not be written. Whatever existed there before is unchanged."""


def check_absent(target: Path) -> None:
    """Check, before long work begins, that `target` can be written. A FileExistsError if it exists, a LockedError if
    another program writes it."""
    _check_new(target)
    check_unlocked(target)


def partial_folder(target: Path) -> Path:
    """The hidden folder that `whole_folder` writes before it becomes `target`."""
    return target.parent / f".{target.name}.partial"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `target` when the block ends without an error. Raises the errors of
    `check_absent`, and a WriteError if the disk is full, or refused the write for another reason."""
    _check_new(target)
    partial = partial_folder(target)
    with locked_folder(target):
        _check_new(target)  # the last holder of the lock may have made it
        try:
            shutil.rmtree(partial, ignore_errors=True)
            with writing(target):
                partial.mkdir()
                yield partial
                _flush(partial)
                partial.rename(target)
                _flush_entry(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder that is, until then, whole or not there."""
    hidden = partial_folder(folder)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """In this block, an OSError becomes the WriteError of `path`."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path, error: OSError) -> WriteError:
    """The error for a write to `path` that the system refused. Its message says why and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or "requested and" in str(error):  # so says numpy of a full disk
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
    check_path(Path(os.path.abspath(target)))
    if target.exists():
        raise FileExistsError(f"{target} exists already: choose another folder")


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


# ---- The files of a model folder that are neither its config.json nor its tensors, copied to another folder.
#
# These are the tokenizer and the generation settings. A sentence-transformers folder also has modules that follow the
# model: modules.json names a folder for each (1_Pooling, 2_Dense, ...), which may hold tensors.


_DESCRIBES = (".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken")
_NOT_COPIED = ("config.json", "octavo.json", "hf_quant_config.json")  # a layout may have the last
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MODULES, CARD = "modules.json", "README.md"


def check_links(folder: Path) -> None:
    """Raise an ArtifactError if a file that describes a model, or one of its tensors, is a link out of `folder`.

    A folder from elsewhere could otherwise bring a private file of this machine into what users publish. A snapshot in
    the cache of the Hugging Face hub is made of links to the blobs of its repository.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in (*_DESCRIBES, SUFFIX):
            _check_link(path, folder)


def read_card(folder: Path) -> str:
    """The model card of a folder; "" without one. An ArtifactError if it is a link out of `folder`."""
    path = folder / CARD
    if not path.is_file():
        return ""
    _check_link(path, folder)
    return path.read_text(encoding="utf-8", errors="replace")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _check_link(path: Path, folder: Path) -> None:
    home, found = folder.resolve(), path.resolve()
    blobs = [home.parents[1] / "blobs"] if home.parent.name == "snapshots" else []
    if not any(found.is_relative_to(inside) for inside in (home, *blobs)):
        raise ArtifactError(
            f"{path} must be a file of the folder itself; it is a link to {found}, and what is made of the folder "
            "would hold that file: if it belongs to the model, put a copy in the place of the link"
        )


def copy_description(source: Path, target: Path) -> None:
    """Copy the files of a model folder that are neither config.json nor tensors. An ArtifactError if a file is a link
    out of `source` (`check_links`), if modules.json is damaged or names a folder outside of `source`, or if a module
    there has its tensors in a pickle."""
    check_links(source)
    for path in sorted(source.iterdir()):
        described = path.suffix in _DESCRIBES and not path.name.endswith(".index.json")
        if path.is_file() and described and path.name not in _NOT_COPIED:
            shutil.copyfile(path, target / path.name)
    for name in _modules(source):
        _copy_module(source / name, target / name)


def _modules(source: Path) -> Iterator[str]:
    """The folders of the modules that follow the model."""
    listed = source / MODULES
    if not listed.is_file():
        return
    try:
        modules: Any = json.loads(listed.read_text(encoding="utf-8"))
        names = [str(module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{listed} must be a list of modules, each with a path ({error!r})") from error
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ArtifactError(f"{listed} names {name!r}: the folders of modules must lie in the folder itself")
        # The model itself lies in "", and a module without settings, such as Normalize, may have no folder.
        if PurePosixPath(name).parts and (source / name).is_dir():
            for path in (source / name, *(source / name).rglob("*")):
                _check_link(path, source)
            yield name


def _copy_module(source: Path, target: Path) -> None:
    """Copy the folder of a module with its tensors; a pickle is left behind where there are safetensors."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    pickles = [path for path in files if path.suffix in _PICKLES]
    if pickles and not any(path.suffix == SUFFIX for path in files):
        raise ArtifactError(
            f"{pickles[0]} is a pickle, which can run code and is not copied: save the model with safetensors "
            "(sentence-transformers' save does)"
        )
    for path in files:
        if path not in pickles:
            copied = target / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
