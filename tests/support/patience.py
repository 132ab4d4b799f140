"""Waiting for what must come. This module alone reads a clock, and only to end a test that hangs."""

import subprocess
import time

HANG = 600  # seconds that no wait takes, whatever else the machine does


def wait_for(process: "subprocess.Popen[str]", condition) -> None:
    """Return when the condition holds; fail when the process ends before, or hangs."""
    end = time.monotonic() + HANG
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert condition(), process.communicate() if process.poll() is not None else f"nothing came in {HANG} s"
