"""Continuing a run whose job is started again with the same command: by torchrun after a failure, or by a scheduler."""

import os
import shutil
from pathlib import Path

from rich.console import Console

from octavo.artifact.atomic_folder import locked_folder
from octavo.artifact.run import RunFolder
from octavo.train.config import Config, ConfigError
from octavo.train.loop import Trainer
from octavo.train.ranks import gather, rank, same_outcome
from octavo.train.run_settings import read_settings
from octavo.train.start import resume_run, settle, start_run


def was_restarted() -> bool:
    """Whether torchrun has started the job again, because a process failed (`--max-restarts`). Every rank must call
    this: torchrun tells a restart only to the machine of the process that failed."""
    return any(gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))


def start_or_resume(config: Config, console: Console) -> Trainer:
    """The run in `config.out` at its newest checkpoint; a new run if the folder has none. Every rank must call this.

    Raises:
        ConfigError: the folder holds a run with other settings.
        Exception: those of `octavo.train.start.start_run` and `resume_run`.
    """
    resumes = False
    with same_outcome():
        if rank() == 0:
            resumes = _has_checkpoint(config)
    resumes = gather(resumes)[0]  # rank 0 decides, as it looked at the folder before the others write to it
    return resume_run(Path(config.out), (), console) if resumes else start_run(config, console)


def _has_checkpoint(config: Config) -> bool:
    """Whether the folder of the run has a checkpoint. What a run without one left is removed."""
    run = RunFolder(Path(config.out))
    if not run.config.is_file():
        return False
    found, given = read_settings(run).to_dict(), settle(config).to_dict()
    for name, value in given.items():
        if name != "out" and found.get(name) != value:
            raise ConfigError(
                f"{run.path} holds a run with other settings: {name} is {found.get(name)!r} there, and {value!r} here. "
                f"Continue that run with --resume {run.path}, or choose another --out"
            )
    if run.checkpoints():
        return True
    with locked_folder(run.path):
        shutil.rmtree(run.path)
    return False
