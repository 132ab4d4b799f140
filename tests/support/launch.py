"""Starting a command under torchrun, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

import octavo


def torchrun(folder: Path, *words: str, processes: int = 2) -> "subprocess.CompletedProcess[str]":
    """The end of `torchrun ... words` in `folder`, on this machine."""
    source = str(Path(octavo.__file__).parent.parent)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--standalone",
        *words,
    ]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=240)
