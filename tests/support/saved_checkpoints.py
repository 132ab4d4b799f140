"""One checkpoint of a run, written and waited for."""

from pathlib import Path

from octavo.artifact.run import RunFolder
from octavo.train.checkpoint import TrainState
from octavo.train.checkpoint_writer import CheckpointWriter


def save_checkpoint(run: RunFolder, state: TrainState, keep: int) -> Path:
    """Write the checkpoint of `state.step`, wait for it, and remove all but the newest `keep`. Every rank calls it.

    Raises:
        WriteError: the files could not be written; all older checkpoints are still there.
    """
    with CheckpointWriter(run, keep) as writer:
        writer.save(state)
    return run.checkpoint(state.step)
