"""TensorBoard and Weights & Biases: the numbers of a run, and histograms of its samples, besides metrics.jsonl."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.extras import import_extra


class Board(Protocol):
    """A place where numbers and histograms are drawn by step."""

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Draw numbers by name."""

    def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        """Draw counts [n] between edges [n + 1]."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the folder `tensorboard` of a run, without those of the steps after `step`."""

    def __init__(self, run: Path, step: int) -> None:
        self._writer = event_writer()(run / "tensorboard", purge_step=step + 1 if step else None)

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        middles = (np.array(edges[:-1]) + np.array(edges[1:])) / 2
        total, mean = sum(counts), float(np.dot(middles, counts))
        square = float(np.dot(middles**2, counts))
        limits, values = list(edges[1:]), list(counts)
        self._writer.add_histogram_raw(name, edges[0], edges[-1], total, mean, square, limits, values, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. The environment decides where it goes: WANDB_MODE, WANDB_PROJECT and others.

    Args:
        run: the folder; a resumed run continues the one whose id is in its file wandb/octavo-id.
        settings: of the run.
    """

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        self._wandb = wandb()
        identity = run / "wandb" / "octavo-id"
        if not identity.is_file():
            identity.parent.mkdir(exist_ok=True)
            identity.write_text(uuid.uuid4().hex[:8])
        self._run = self._wandb.init(
            id=identity.read_text().strip(), resume="allow", name=run.name, dir=str(run), config=dict(settings)
        )
        # Its own steps cannot go back, as those of a run can.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        drawn = self._wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
        self._run.log({"step": step, name: drawn})

    def close(self) -> None:
        self._run.finish()


def event_writer() -> Any:
    """TensorBoard's SummaryWriter; an ImportError names the extra that has it."""
    return import_extra("torch.utils.tensorboard", "tensorboard", "--tensorboard needs tensorboard").SummaryWriter


def wandb() -> Any:
    """The package wandb; an ImportError names the extra that has it."""
    return import_extra("wandb", "wandb", "--wandb needs wandb")
