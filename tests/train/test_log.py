"""A run goes on, and saves, when nobody reads its output any more."""

import errno
import io
import os
import signal
import subprocess

import pytest
from rich.console import Console

from octavo.artifact.run import RunFolder
from octavo.train.log import LastingStream, training_console


class Refusing(io.StringIO):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def flush(self):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_stream_that_cannot_be_written_is_said_once(number, capsys):
    console = Console(file=LastingStream(Refusing(number)))
    for _ in range(3):
        console.print("a line")
    (notice,) = capsys.readouterr().err.splitlines()
    assert os.strerror(number) in notice
    assert "metrics.jsonl" in notice


def test_a_stream_that_can_be_written_gets_every_line(capsys):
    console = training_console()
    console.print("one")
    console.print("two")
    assert capsys.readouterr() == ("one\ntwo\n", "")


def test_a_program_without_an_output_prints_nothing(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    training_console().print("a line")


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
def test_a_run_whose_reader_ends_goes_on_and_a_signal_still_saves(spawn, wait_for, tmp_path):
    """As `octavo train 2>&1 | head -1` does, and ssh when its connection ends."""
    run = RunFolder(tmp_path / "run")
    settings = {"recipe": "bf16", "steps": 100_000, "evaluate_every": 100_000, "save_every": 100_000}
    process = spawn(**settings, stderr=subprocess.STDOUT)
    assert process.stdout.readline()
    process.stdout.close()
    wait_for(process, lambda: run.metrics.exists() and run.metrics.read_bytes().count(b'"loss"') > 20)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0
    assert len(run.checkpoints()) == 1
