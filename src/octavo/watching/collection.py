"""Watching a model while it trains: `octavo.watch`.

    step n is sampled:   forward and backward add statistics to buffers on the device (`octavo.observation.operands`)
                         the optimizer's step is surrounded by reading gradients, weights and their change
                         Watch.step(): ranks are combined, the buffers are copied to the host without waiting
    during step n + 1:   a thread waits for the copy, computes the records and appends them to the files

The step is the number of optimizer steps that are done when it ends. The first step after the watch began, and each
multiple of the interval, has a full sample, which the files hold. The first step and each multiple of `CHECK_INTERVAL`
has a brief one, for the rules (`octavo.watching.rules`). Only modules in training mode are recorded.

A brief sample leaves out gradients, the change of the weights, histograms, and what quantization loses in decibels.
Where a step is to have both, the full one is taken, and the rules judge its numbers.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from octavo.checkpoint.folder import WriteError
from octavo.nn.module_tools import check_module
from octavo.nn.parallel_weights import device_of
from octavo.observation.operand_statistics import HEAD, MAXIMA, WIDTH, Store, clear, combine_all
from octavo.observation.operands import BRIEF, Sampling
from octavo.watching.records import alignment_records, expert_record, layer_records, operand_records, transfer
from octavo.watching.storage import EXPERTS, LIMIT, NO_EXPERTS, OPERANDS, Event, Records, WatchedLayer, WatchWriter
from octavo.watching.watched_layers import Layers, WeightStatistics

CHECK_INTERVAL = 10  # steps between brief samples
_KEPT = 16  # samples that `take` can return


@dataclass(frozen=True)
class Sample:
    """The records of one sampled step: arrays of `OPERAND`, `LAYER` and `EXPERTS` (`octavo.watching.storage`). Those
    for the rules are NaN where a brief sample has no number (`octavo.watching.records.operand_records`). There are
    records of single experts, numbered after the layers, and none of the stacks of their matrices."""

    step: int
    operands: Records
    layer_records: Records
    experts: Records = field(default_factory=NO_EXPERTS.copy)


class Watch:
    """Records how the linear layers of a converted model compute, in every `interval`-th training step: `octavo.watch`.

    Make it after `octavo.convert` and before the first step, so that compiled code is compiled once. Call `step` after
    each step of the optimizer. The numbers of the training do not change. Where the process is one of several
    (torch.distributed), all ranks must make one, and the records are those of all ranks; rank 0 writes them.

    Args:
        model: on its device.
        folder: of the run, made if there is none; the records are in its folder `watch` (`octavo.watching.storage`).
            None writes no files.
        interval: the steps between full samples, which the files hold. Every tenth step has a brief one, of the numbers
            that rules judge: see `take`.
        rows: of each operand that are read in a sampled step.
        dtype: of the GEMMs that are not quantized: that of autocast.
        limit: the largest size of the files in bytes. When they reach it, every second sample is dropped, and the
            interval doubles.
        resumed_at: the steps done when the watch begins, of a run that goes on. Records of later steps are dropped.

    Attributes:
        layers: as they ran in the last sample, by the number that records have for them.
        interval: the steps between full samples now.
        check_interval: the steps between brief samples.
        done: the steps of the optimizer that are done.
        samples: whether the step that runs has a sample, for which the watch reads the weights that it leaves.
        listeners: called with each full sample, a step after it was taken, in the thread of the training.

    Raises:
        TypeError: `model` is no module.
        ValueError: the model has no linear layer, is watched already, or a number is outside of its range.
        FileExistsError: the folder has the records of another watch, and `resumed_at` is 0.
        ArtifactError: the records in the folder of a resumed run are damaged, or of other layers.
        WriteError: the folder cannot be written.

    Example:
        >>> with octavo.watch(model, folder="runs/a") as watch:
        ...     for x, y in batches:
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         watch.step()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        folder: str | Path | None = None,
        interval: int = 100,
        rows: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        limit: int = LIMIT,
        resumed_at: int = 0,
    ) -> None:
        check_module(model, "watch")
        if min(interval, rows, limit) < 1 or resumed_at < 0 or any(n % 1 for n in (interval, rows, resumed_at)):
            given = interval, rows, limit, resumed_at
            raise ValueError(f"interval, rows, limit (from 1) and resumed_at (from 0) are integers, got {given}")
        self._layers = layers = Layers(model, dtype)
        if not layers.matrices:
            raise ValueError("the model has no linear layer to watch")
        self.check_interval, self.done, self._rows = CHECK_INTERVAL, resumed_at, rows
        self.layers: Sequence[WatchedLayer] = layers.describe()
        self._writer: WatchWriter | None = None
        if folder is not None and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            self._writer = WatchWriter(Path(folder), self.layers, interval=interval, limit=limit, resumed_at=resumed_at)
            interval = self._writer.interval
        self._device = device_of(next(model.parameters()))
        layers.attach(self._device)
        self._weights = WeightStatistics(model, layers, rows, self._device)
        self._experts = [(place, place.observer.experts) for place in layers.places if place.leaf]
        self._tables = [*layers.stats, *(table for _, tables in self._experts for table in tables.values())]
        self._cleared = [clear(torch.empty_like(table)) for table in self._tables]
        self._store = Store(layers.stats)
        self._release = weakref.finalize(self, _release, layers, self._weights, self._store)
        nothing = torch.empty(0, 0, dtype=torch.float64, device=self._device)
        self.interval = transfer([(nothing, 0)], interval)()[1]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-watch")
        self.listeners: list[Callable[[Sample], None]] = []
        self._pending: Future[tuple[Sample | None, Sample | None, int]] | None = None
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._new: deque[Sample] = deque(maxlen=_KEPT)
        self._closed = False
        self._begin(full=True, brief=True)

    def step(self) -> None:
        """End a training step, after the step of the optimizer. A ValueError if the watch is closed."""
        if self._closed:
            raise ValueError("the watch is closed: call step inside its with block, or make another watch")
        self.done += 1
        self._receive()
        if self.samples:
            self._pending = self._thread.submit(self._end(self.done))
        self._begin_next()

    def read_gradients(self) -> None:
        """Read the gradients now: call it before they are clipped. Otherwise they are read when the optimizer does."""
        self._weights.read_gradients()

    def take(self) -> list[tuple[Records, Records]]:
        """The records of operands and layers of each brief sample since the last call, up to 16. The experts of a stack
        are numbered after all layers (`octavo.watching.rules.SampleRules`)."""
        self._receive()
        taken = [(sample.operands, sample.layer_records) for sample in self._new]
        self._new.clear()
        return taken

    def latest(self) -> Sample | None:
        """The last full sample; None before the first sampled step has ended."""
        self._receive()
        return self._samples[-1] if self._samples else None

    def refresh(self) -> None:
        """Describe the layers anew, of which some have another recipe now."""
        self._receive()
        self._describe()

    def write_event(self, event: Event) -> None:
        """Append an event to the files of the run."""
        if self._writer is not None:
            self._writer.write_event(event)

    def undo_events(self, step: int) -> None:
        """Mark the events of the steps after `step` as undone: the run goes back to it."""
        if self._writer is not None:
            self._writer.undo_events_after(step)

    def go_back(self, step: int) -> None:
        """Drop the records of the steps after `step`, to which the run went back. The next step is the one after it."""
        self._receive()
        for samples in (self._samples, self._new):
            while samples and samples[-1].step > step:
                samples.pop()
        if self._writer is not None:
            self._writer.drop_after(step)
        self.done = step
        self._begin_next()

    def close(self) -> None:
        """Write the pending samples, and leave the model as it was before."""
        self._closed = True
        self._release()
        try:
            self._receive()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin_next(self) -> None:
        number = self.done + 1
        self._begin(full=number % self.interval == 0, brief=number % self.check_interval == 0)

    def _begin(self, *, full: bool, brief: bool) -> None:
        self._full, self._brief, self.samples = full, brief, full or brief
        if (full or brief) and self._tables:
            torch._foreach_copy_(self._tables, self._cleared)
        self._weights.begin(active=full)
        self._store.clear()
        Sampling.request(self._weights, self._rows if full else BRIEF if brief else 0)

    @torch.no_grad()
    def _end(self, step: int) -> Callable[[], tuple[Sample | None, Sample | None, int]]:
        """Combine the statistics of all ranks, and begin to copy them to the host. The result waits for the copy, and
        writes the full sample of `step`. It gives this sample, the numbers for the rules, and the largest interval of
        the ranks."""
        nothing = torch.empty(0, WIDTH, dtype=torch.float64, device=self._device)
        stats = torch.cat([nothing, *self._layers.stats])  # no layer may be converted
        stats = self._store.add_to(stats if self._full else stats[:, :HEAD])
        tables = [(stats, len(MAXIMA)), (self._weights.alignments(), 0)]
        if self._full:
            tables.append(self._weights.stats())
        tables += [(torch.stack([*each.values()], 1).flatten(0, 1), len(MAXIMA)) for _, each in self._experts]
        interval = self.interval if self._writer is None else self._writer.interval  # which may have doubled it
        wait, full, brief = transfer(tables, interval), self._full, self._brief

        def finish() -> tuple[Sample | None, Sample | None, int]:
            (stats, alignments, *others), largest = wait()
            of_layers = others.pop(0) if full else None
            experts = [each.reshape(-1, len(OPERANDS), HEAD) for each in others]
            alignment = np.full(self._layers.count, np.nan)  # mean |cosine| of gate and up, by layers, then experts
            for numbers, (cosine, rows) in zip(self._weights.aligned, alignments, strict=True):
                alignment[numbers] = cosine / rows if rows else np.nan
            judged = self._judged(step, stats, experts, alignment) if brief else None
            whole = self._whole(step, stats, experts, of_layers, alignment) if full else None
            if self._writer is not None and whole is not None:
                self._writer.write(whole.operands, whole.layer_records, whole.experts)
            return whole, judged, largest

        return finish

    def _receive(self) -> None:
        """Wait for the thread, and take the sample that it has finished."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            full, brief, interval = pending.result()
        except WriteError as error:
            self._writer = None
            warnings.warn(f"the run is no longer watched: {error}", RuntimeWarning, stacklevel=2)
            return
        self.interval = max(interval, self.interval)
        if brief is not None:
            self._new.append(brief)
        if full is None:
            return
        if self._layers.places and not len(full.operands) and not self._samples:
            message = (
                "the watch has recorded no operand in its first sample: the converted layers were not called in "
                "training mode, or ran in a CUDA graph, which cannot be sampled"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._samples.append(full)
        self._layers.note(full.operands)
        self._describe()
        for listener in self.listeners:
            listener(full)

    def _describe(self) -> None:
        layers = self._layers.describe()
        if layers != self.layers:
            self.layers = layers
            if self._writer is not None:
                self._writer.write_layers(layers)

    def _judged(self, step: int, stats: Any, experts: Sequence[Any], alignment: Any) -> Sample:
        """The numbers for the rules. A brief sample has moments about zero, and so have these."""
        records = [operand_records(step, *self._layers.operands(stats[:, :HEAD]), about_zero=True)]
        for (place, _), each in zip(self._experts, experts, strict=True):
            layers, operands = np.indices(each.shape[:2]).reshape(2, -1)
            layers += self._layers.firsts[place.layers[0]]
            records.append(operand_records(step, layers, operands, each.reshape(-1, HEAD), about_zero=True))
        return Sample(step, np.concatenate(records), alignment_records(step, alignment))

    def _whole(self, step: int, stats: Any, experts: Sequence[Any], of_layers: Any, alignment: Any) -> Sample:
        stats, found = stats.copy(), []
        for (place, _), each in zip(self._experts, experts, strict=True):
            own = stats[place.row : place.row + len(OPERANDS)]
            parts = torch.from_numpy(np.concatenate([own[:, None, :HEAD], each.swapaxes(0, 1)], 1))
            own[:, :HEAD] = combine_all(parts).numpy()
            found.append(expert_record(step, place.layers[0], each))
        of_weights = layer_records(step, self._layers.sizes(), of_layers, alignment)
        return Sample(step, operand_records(step, *self._layers.operands(stats)), of_weights, np.array(found, EXPERTS))


watch = Watch  # in a program, `octavo.watch(model)`


def _release(layers: Layers, weights: WeightStatistics, store: Store) -> None:
    """Leave the model as it was before its watch, which is closed, or which nobody has any more."""
    Sampling.request(weights, 0)
    store.close()
    weights.close()
    layers.detach()
