"""Starting processes, and ranks under torchrun: a command, as a user does, or a function under its agent alone."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from patience import HANG
from ranks import use_server
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher import LaunchConfig, elastic_launch

import octavo


def with_source(**variables: str) -> dict[str, str]:
    """This process's environment and `variables`, in which Python finds the Octavo that is tested before any other. The
    folders of PYTHONPATH come after it: on some machines all packages are found there."""
    folders = [str(Path(octavo.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables


def torchrun(folder: Path, *words: str, processes: int = 2) -> "subprocess.CompletedProcess[str]":
    """The end of `torchrun ... words` in `folder`, on this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    environment = with_source(OMP_NUM_THREADS="1")
    return subprocess.run(
        [*start, *words], cwd=folder, env=environment, text=True, capture_output=True, timeout=HANG, check=False
    )


def run_elastic(folder: Path, function, *args, processes: int = 2, restarts: int = 0) -> None:
    """What `torchrun --standalone` does with a script, with a function of a module: its ranks start in some 50 ms.

    The output of a rank is in `folder`/RUN/attempt_ATTEMPT/RANK/stdout.log and stderr.log. A ChildFailedError, as
    torchrun prints it, if a rank fails and none of the `restarts` of all ranks is left.
    """
    use_server()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=restarts, start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
    )  # fmt: skip
    # The agent sets handlers of its own, for good.
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        elastic_launch(config, function)(*args)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
