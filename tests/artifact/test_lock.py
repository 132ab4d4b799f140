"""One writer a folder, and a second one loses nothing."""

import json
import os
import re
import subprocess
import sys
import threading

import pytest

from octavo.artifact.atomic_folder import WriteError, check_absent, whole_folder, write_error
from octavo.artifact.lock import FolderLock, LockedError

HOLD = """
import sys
from pathlib import Path
from octavo.artifact.lock import FolderLock
lock = FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_told_who_the_first_one_is(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError) as caught:
            FolderLock(tmp_path / "run").acquire()
        said = rf"{tmp_path}/run is in use: process {holder.pid} on \S+ \(-c {tmp_path}/run\), since \d{{4}}-\d\d-\d\d "
        assert re.match(said, str(caught.value)), caught.value
        with pytest.raises(LockedError, match=f"process {holder.pid}"):
            check_absent(tmp_path / "run")
        holder.kill()
        holder.wait()
    assert (tmp_path / ".run.lock").exists()
    check_absent(tmp_path / "run")
    with FolderLock(tmp_path / "run"):  # what a killed program leaves behind locks nothing
        assert json.loads((tmp_path / ".run.lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_held_once_and_given_up_once(tmp_path):
    lock = FolderLock(tmp_path / "new" / "run")
    with lock, lock.acquire():
        with pytest.raises(LockedError, match="is in use"):
            FolderLock(tmp_path / "new" / "run" / ".." / "run").acquire()
        FolderLock(tmp_path / "new" / "other").acquire().release()
    lock.release()
    FolderLock(tmp_path / "new" / "run").acquire().release()
    assert list((tmp_path / "new").iterdir()) == []


def test_many_writers_take_turns(tmp_path):
    """The file is removed at the end of each turn: a writer that opened it just before must not think it holds it."""
    inside, most, failures = 0, 0, 0

    def work():
        nonlocal inside, most, failures
        for _ in range(50):
            try:
                with FolderLock(tmp_path / "run"):
                    inside += 1
                    most = max(most, inside)
                    inside -= 1
            except LockedError:
                failures += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, inside) == (1, 0)
    assert failures < 200


def test_of_two_writers_of_one_folder_the_first_finishes_unharmed(tmp_path):
    with whole_folder(tmp_path / "packed") as folder:
        (folder / "a").write_text("1")
        with pytest.raises(LockedError, match="choose another folder"), whole_folder(tmp_path / "packed"):
            pytest.fail("the block must not run")
        (folder / "b").write_text("2")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "packed"]


def test_a_place_that_cannot_be_written_is_not_called_full(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(WriteError, match="a part of that path is a file") as caught,
        whole_folder(tmp_path / "file/new"),
    ):
        pytest.fail("the block must not run")
    for error, reason, other in (
        (caught.value, "file", "MB"),
        (write_error(tmp_path / "a/b", OSError(30, "Read-only file system")), "cannot be written", "MB"),
        (write_error(tmp_path / "a/b", PermissionError(13, "Permission denied")), "choose another", "room"),
        (
            write_error(tmp_path / "a/b", OSError(28, "No space left on device")),
            "MB are free there): make room",
            "other",
        ),
        (write_error(tmp_path / "a/b", OSError(5, "Input/output error")), "Input/output error", "MB"),
    ):
        assert reason in str(error)
        assert other not in str(error)
