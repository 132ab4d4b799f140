"""The watch of a run of the trainer: `octavo.watch` by the table `[watch]`, drawn on the run's boards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.artifact.run import RunFolder
from octavo.telemetry import Sample, Watch, watch
from octavo.telemetry.schema import BINADES, FULL_SHARE, OPERANDS, Records
from octavo.train.checkpoint import TrainState
from octavo.train.config import Config
from octavo.train.evaluation import AUTOCAST
from octavo.train.metrics import Metrics

OF_OPERANDS = ("amax", "sqnr", "saturated", "flushed")
OF_LAYERS = ("gradient_norm", "update_ratio", "alignment")


@contextmanager
def watched(config: Config, state: TrainState, run: RunFolder, metrics: Metrics) -> Iterator[Watch | None]:
    """Watch the model of a run while it trains; None where `watch.interval` is 0."""
    if not config.watch.interval:
        yield None
        return
    with watch(
        state.model,
        folder=run.path,
        interval=config.watch.interval,
        rows=config.watch.rows,
        dtype=AUTOCAST.get(config.precision, torch.float32),
        resumed_at=state.step,
    ) as found:
        if metrics.boards:
            found.listeners.append(lambda sample: draw_sample(metrics, found, sample))
        yield found


def draw_sample(metrics: Metrics, watch: Watch, sample: Sample) -> None:
    """Draw some numbers of each layer, and the histogram of log2 |x| of each operand and gradient."""
    numbers: dict[str, float] = {}
    for record in sample.operands:
        name = f"watch/{watch.layers[record['layer']].name}/{OPERANDS[record['operand']]}"
        numbers |= {f"{name}/{field}": float(record[field]) for field in OF_OPERANDS}
        _draw_binades(metrics, sample.step, name, float(record["amax"]), record["binades"])
    for record in sample.layer_records:
        name = f"watch/{watch.layers[record['layer']].name}"
        numbers |= {f"{name}/{field}": float(record[field]) for field in OF_LAYERS}
        _draw_binades(
            metrics, sample.step, f"{name}/gradient", float(record["gradient_amax"]), record["gradient_binades"]
        )
    metrics.draw(sample.step, {name: value for name, value in numbers.items() if math.isfinite(value)})


def _draw_binades(metrics: Metrics, step: int, name: str, amax: float, binades: Records) -> None:
    if math.isfinite(amax) and amax > 0:
        top = math.frexp(amax)[1]  # the first binade ends at 2^top
        edges = [float(top - BINADES + k) for k in range(BINADES + 1)]
        shares = [count / FULL_SHARE for count in reversed(binades.tolist())]
        metrics.draw_histogram(step, f"{name}/log2", edges, shares)
