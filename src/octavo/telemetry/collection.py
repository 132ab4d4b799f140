"""Watching a model while it trains: `octavo.watch`.

    step n is sampled:   forward and backward add statistics to buffers on the device (`octavo.ops.observation`)
                         the optimizer's step is surrounded by reading gradients, weights and their change
                         Watch.step(): ranks are combined, the buffers are copied to the host without waiting
    during step n + 1:   a thread waits for the copy, computes the records and appends them to the files

The step is the number of optimizer steps that are done when it ends. Sampled are the first step after the watch began,
and each multiple of the interval. Only modules in training mode are recorded.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from octavo.artifact.atomic_folder import WriteError
from octavo.ops.observation import Sampling
from octavo.ops.statistics import MAXIMA, WIDTH, clear_statistics
from octavo.telemetry.gradients import WeightStatistics
from octavo.telemetry.layers import Layers, gate_and_up
from octavo.telemetry.records import LAYER_MAXIMA, combined, layer_records, operand_records
from octavo.telemetry.schema import OPERANDS, RECOMPUTED, Event, WatchedLayer
from octavo.telemetry.storage import LIMIT, Records, WatchWriter
from octavo.telemetry.transfer import Transfer

_KEPT = 16  # samples that `take` can return


def watch(
    model: nn.Module,
    *,
    folder: str | Path | None = None,
    interval: int = 50,
    rows: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    limit: int = LIMIT,
    resumed_at: int = 0,
) -> Watch:
    """Record how the linear layers of a converted model compute, in every `interval`-th training step.

    Call it after `octavo.convert` and before the first step, so that compiled code is compiled once. Call `step` after
    each step of the optimizer. The numbers of the training do not change. Where the process is one of several
    (torch.distributed), all ranks must call it, and the records are those of all ranks; rank 0 writes them.

    Args:
        model: on its device.
        folder: of the run; the records are in its folder `watch` (`octavo.telemetry.schema`). None writes no files.
        interval: the steps between samples.
        rows: of each operand that are read in a sampled step.
        dtype: of the GEMMs that are not quantized: that of autocast.
        limit: the largest size of the files in bytes. When they reach it, every second sample is dropped, and the
            interval doubles.
        resumed_at: the steps done when the watch begins. Records of later steps in the folder are dropped.

    Raises:
        ValueError: the model has no linear layer, is watched already, or `interval` or `rows` is less than 1.
        ArtifactError: the records in the folder of a resumed run are damaged.
        WriteError: the folder cannot be written.

    Example:
        >>> with octavo.watch(model, folder="runs/a") as watch:
        ...     for x, y in batches:
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         watch.step()
    """
    return Watch(model, folder, interval, rows, dtype, limit, resumed_at)


@dataclass(frozen=True)
class Sample:
    """The records of one sampled step: arrays of `OPERAND` and `LAYER` (`octavo.telemetry.schema`)."""

    step: int
    operands: Records
    layer_records: Records


class Watch:
    """A model that is being watched: see `watch`.

    Attributes:
        layers: as they ran in the last sample, by the number that records have for them.
        interval: the steps between samples now.
        done: the steps of the optimizer that are done.
        sampled: whether the step that comes next, or that runs now, is sampled.
        listeners: called with each sample, a step after it was taken, in the thread of the training.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path | None,
        interval: int,
        rows: int,
        dtype: torch.dtype,
        limit: int,
        resumed_at: int,
    ) -> None:
        if interval < 1 or rows < 1:
            raise ValueError(f"interval and rows must be at least 1, got {interval} and {rows}")
        self._layers = Layers(model)
        if not self._layers.modules:
            raise ValueError("the model has no linear layer to watch")
        self._rows, self._dtype, self.interval, self.done = rows, dtype, interval, resumed_at
        self._seen: list[set[str]] = [set() for _ in self._layers.modules]
        self.layers: Sequence[WatchedLayer] = self._layers.describe(dtype, self._seen)
        self._writer: WatchWriter | None = None
        if folder is not None and _rank() == 0:
            self._writer = WatchWriter(Path(folder), self.layers, interval=interval, limit=limit, resumed_at=resumed_at)
            self.interval = self._writer.interval
        self._device = _device_of(model)
        self._layers.attach(self._device)
        self._weights = WeightStatistics(self._layers.modules, gate_and_up(model), rows, self._device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-watch")
        self.listeners: list[Callable[[Sample], None]] = []
        self._pending: Future[tuple[Sample, int]] | None = None
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        self.sampled, self._taken, self._closed = False, resumed_at, False
        self._arm(first=True)

    def step(self) -> None:
        """End a training step, after the step of the optimizer. A ValueError if the watch is closed."""
        if self._closed:
            raise ValueError("the watch is closed: call step inside its with block, or make another watch")
        self.done += 1
        self._receive()
        if self.sampled:
            self._send()
        self._arm()

    def read_gradients(self) -> None:
        """Read the gradients now: call it before they are clipped. Otherwise they are read when the optimizer does."""
        if self.sampled:
            self._weights.read_gradients()

    def take(self) -> list[tuple[Records, Records]]:
        """The records of operands and layers of each sample since the last call, up to 16."""
        self._receive()
        taken = [(sample.operands, sample.layer_records) for sample in self._samples if sample.step > self._taken]
        self._taken = max((sample.step for sample in self._samples), default=self._taken)
        return taken

    def latest(self) -> Sample | None:
        """The last sample; None before the first sampled step has ended."""
        self._receive()
        return self._samples[-1] if self._samples else None

    def refresh(self) -> None:
        """Describe the layers anew, of which some have another recipe now."""
        self._receive()
        self._describe(force=True)

    def write_event(self, event: Event) -> None:
        """Append an event to the files of the run."""
        if self._writer is not None:
            self._writer.write_event(event)

    def go_back(self, step: int) -> None:
        """Drop the records of the steps after `step`, to which the run went back. The next step is the one after it."""
        self._receive()
        self._samples = deque((sample for sample in self._samples if sample.step <= step), _KEPT)
        self._taken = min(self._taken, step)
        if self._writer is not None:
            self._writer.drop_after(step)
        self.done = step
        self._arm()

    def close(self) -> None:
        """Write what is pending, and leave the model as it was before."""
        self._closed = True
        Sampling.request(self, 0)
        for hook in self._hooks:
            hook.remove()
        self._layers.detach()
        try:
            self._receive()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _arm(self, *, first: bool = False) -> None:
        """Decide whether the next step is sampled."""
        self.sampled = first or (self.done + 1) % self.interval == 0
        if self.sampled:
            for stats in self._layers.stats:
                clear_statistics(stats)
            self._weights.clear()
        Sampling.request(self, self._rows if self.sampled else 0)

    def _before_update(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if self.sampled:
            self._weights.before_update(_parameters(optimizer))

    def _after_update(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if self.sampled:
            self._weights.after_update(_parameters(optimizer))

    @torch.no_grad()
    def _send(self) -> None:
        """Combine the statistics of all ranks, and begin to copy them to the host."""
        nothing = torch.empty(0, WIDTH, dtype=torch.float64, device=self._device)  # no layer may be converted
        operands, weights = torch.cat([nothing, *self._layers.stats]), self._weights.stats()
        tables = (operands, len(MAXIMA)), (weights, len(LAYER_MAXIMA))
        self._pending = self._thread.submit(self._finish, self.done, Transfer(tables, self.interval))

    def _finish(self, step: int, transfer: Transfer) -> tuple[Sample, int]:
        """In the thread: the records of a step, which are written, and the interval of rank 0."""
        (operand_stats, layer_stats), interval = transfer.wait()
        layers, operands, places = self._layers.operands()
        sample = Sample(
            step,
            operand_records(step, layers, operands, combined(operand_stats, places)),
            layer_records(step, self._layers.sizes(), layer_stats),
        )
        if self._writer is not None:
            self._writer.write(sample.operands, sample.layer_records)
        return sample, interval

    def _receive(self) -> None:
        """Wait for the thread, and take the sample that it has finished."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            sample, interval = pending.result()
        except WriteError as error:
            self._writer = None
            warnings.warn(f"the run is no longer watched: {error}", RuntimeWarning, stacklevel=2)
            return
        self.interval = max(interval, self.interval)
        if self._layers.places and not len(sample.operands) and not self._samples:
            warnings.warn(
                "the watch has recorded no operand in its first sample: the converted layers were not called in "
                "training mode, or ran in a CUDA graph, which cannot be sampled",
                RuntimeWarning,
                stacklevel=2,
            )
        self._samples.append(sample)
        self._note_what_ran(sample)
        for listener in self.listeners:
            listener(sample)

    def _note_what_ran(self, sample: Sample) -> None:
        for record in sample.operands:
            seen = {OPERANDS[record["operand"]]} | ({"recomputed"} if record["flags"] & RECOMPUTED else set())
            self._seen[record["layer"]] |= seen
        self._describe()

    def _describe(self, *, force: bool = False) -> None:
        layers = self._layers.describe(self._dtype, self._seen)
        if force or layers != self.layers:
            self.layers = layers
            if self._writer is not None:
                self._writer.write_layers(layers)


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _device_of(model: nn.Module) -> torch.device:
    """That of the first parameter; of weights that are kept on the host, and computed with on a GPU, the GPU."""
    parameter = next(model.parameters())
    if hasattr(parameter, "device_mesh"):
        kind = parameter.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return parameter.device


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
