"""Writing the checkpoints of a run while it trains on."""

import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from octavo.artifact.atomic_folder import WriteError, remove_folder, write_error
from octavo.artifact.dcp_writer import SafetensorsWriter
from octavo.artifact.run import RunFolder
from octavo.train.checkpoint import TrainState, checkpoint_tensors, describe_checkpoint
from octavo.train.host_copy import HostCopy
from octavo.train.ranks import rank, world_size

_PATIENCE = timedelta(hours=1)  # of the ranks that have written for the slowest
_PATIENCE_AFTER_ERROR = 600  # seconds for the last checkpoint, when the run has failed: another rank may be lost


class CheckpointWriter:
    """Writes checkpoints in a thread, with torch.distributed.checkpoint, each whole or not at all.

    `save` copies the state to memory of the CPU (pinned, where it comes from a GPU) and returns; the copy, as large as
    the state, stays for the next one. As a context manager it waits for the last checkpoint. Every rank of the run
    must make it, and call `save` at the same steps.

    Args:
        run: the folder of the run.
        keep: number of checkpoints; older ones are removed when a new one is whole.
    """

    def __init__(self, run: RunFolder, keep: int) -> None:
        self.run, self.keep = run, keep
        # A group of its own: its messages must not meet those of the thread that trains.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE) if world_size() > 1 else None
        self._copy = HostCopy()
        self._pending: _Background | None = None
        if rank() == 0:
            for leftover in run.path.glob(".step-*.partial"):  # of a run that was killed while it saved
                shutil.rmtree(leftover)

    def save(self, state: TrainState) -> None:
        """Begin to write the checkpoint of `state.step`, after the one before it is done.

        Raises:
            WriteError: the files of the checkpoint before could not be written; all older ones are still there.
        """
        self.wait()
        tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(state).items()}
        self._copy.update(tensors)
        target, description = self.run.checkpoint(state.step), describe_checkpoint(state)
        self._pending = _Background(lambda: self._write(target, tensors, description))

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint could not be written: `wait` then raises its error."""
        return self._pending is not None and self._pending.error is not None

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises the WriteError of `save`."""
        if self._pending is not None:
            self._pending.join()
            pending, self._pending = self._pending, None
            if pending.error is not None:
                raise pending.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.wait()
            elif self._pending is not None and isinstance(error, Exception):  # a second signal stops at once
                self._pending.join(_PATIENCE_AFTER_ERROR)
        finally:
            if self._pending is None or not self._pending.is_alive():
                self._copy.close()

    def _write(self, target: Path, tensors: dict[str, Tensor], description: str) -> None:
        metadata, planner = {"model": {"format": "pt"}}, _CopyPlanner(self._copy)
        try:
            with SafetensorsWriter(target, {"train.json": description}, metadata) as writer:
                if self._group is None:
                    _save_alone(tensors, planner, writer)
                else:
                    save(tensors, storage_writer=writer, planner=planner, process_group=self._group)
        except CheckpointException as error:
            raise _readable(error, target) from error
        if rank() == 0:
            for old in self.run.checkpoints()[: -self.keep]:
                remove_folder(old)


class _Background(threading.Thread):
    """A call in a thread, which does not keep the process alive: a lost rank would never answer it."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._call = call
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error


class _CopyPlanner(DefaultSavePlanner):
    """Plans by the shapes and the placements of the tensors of the run, and writes a copy of them."""

    def __init__(self, copy: HostCopy) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copy = copy

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copy[index.fqn]


def _save_alone(tensors: dict[str, Tensor], planner: DefaultSavePlanner, writer: SafetensorsWriter) -> None:
    """The steps of `torch.distributed.checkpoint.save` in a single process, where it warns that there are no others."""
    planner.set_up_planner(tensors, None, True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def _readable(error: CheckpointException, target: Path) -> Exception:
    """The first failure of a rank, as the writer of a single process raises it."""
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, WriteError):
        return cause
    if isinstance(cause, OSError):
        return write_error(target, cause)
    return RuntimeError(f"could not write {target}: {type(cause).__name__}: {cause}")
