"""The summary of a run for the terminal, and its figures for JSON."""

import math
from typing import Any, NamedTuple

import numpy as np

from octavo.report.heat_maps import METRICS, Columns, Metric, metric_grids, sampled_steps
from octavo.report.runs import RunData, Series
from octavo.telemetry.schema import Array, WatchedLayer
from octavo.telemetry.storage import Watched

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 32  # characters of a sparkline
_BY_KEY = {metric.key: metric for metric in METRICS}
_SHOWN = [_BY_KEY[key] for key in ("saturated", "flushed", "sqnr")]  # the metrics whose worst layers the terminal shows
_WORST = 4


class WorstLayer(NamedTuple):
    """An operand of a layer, its worst value of a metric as text, and a sparkline over the steps."""

    metric: str
    layer: str
    operand: str
    worst: str
    steps: str


def sparkline(values: Array) -> str:
    """A line of at most 32 block characters: means of parts, from the smallest value to the largest; × is inf or NaN.

    Example:
        >>> sparkline(np.array([1.0, 2.0, 4.0, 8.0]))
        '▁▂▄█'
    """
    parts = np.array_split(np.asarray(values, np.float64), min(_WIDTH, len(values))) if len(values) else []
    means = [float(part.mean()) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    return "".join(_block(mean, low, high) if math.isfinite(mean) else "×" for mean in means)


def worst_layers(watched: Watched) -> list[WorstLayer]:
    """The worst layers and operands of the metrics that matter most, the worst first. A share of 0 is not listed."""
    steps = sampled_steps(watched)
    grids = metric_grids(watched, Columns(steps, min(len(steps), _WIDTH))) if len(steps) else {}
    found = []
    for metric in _SHOWN:
        sign = -1 if metric.worst == "highest" else 1
        rows = [
            (sign * worst, layer, operand, worst, line)
            for operand, grid in grids.get(metric.key, {}).items()
            for layer, line in enumerate(grid)
            if (worst := _worst(line, metric)) is not None and not (metric.unit == "share" and worst == 0)
        ]
        for _, layer, operand, worst, line in sorted(rows, key=lambda row: row[:3])[:_WORST]:
            shown = line[~np.isnan(line)]
            name = watched.layers[layer].name
            found.append(WorstLayer(metric.label, name, operand, show(worst, metric.unit), sparkline(shown)))
    return found


def show(value: float, unit: str) -> str:
    """A value with its unit; a share in percent."""
    return f"{value:.3g}".rstrip() + (f" {unit}" if unit else "") if unit != "share" else f"{100 * value:.3g} %"


def to_dict(run: RunData) -> dict[str, Any]:
    """The figures of a run for JSON. inf and NaN become None."""
    return {
        "run": str(run.path),
        "name": run.name,
        "recipe": run.recipe or None,
        "step": run.last_step,
        "series": {key: _series(series) for key, series in run.series.items()},
        "precision": dict(run.precision),
        "remarks": list(run.remarks),
        "watched": None if run.watched is None else _watched(run.watched),
        "events": [event.to_dict() for event in run.watched.events] if run.watched is not None else [],
    }


def _series(series: Series) -> dict[str, Any]:
    finite = series.finite
    return {
        "last": series.last,
        "last_number": None if series.last_finite is None else series.last_finite[1],
        "lowest": float(finite.min()) if len(finite) else None,
        "highest": float(finite.max()) if len(finite) else None,
        "median": float(np.median(finite)) if len(finite) else None,
        "inf_or_nan_at": series.wrong_steps,
    }


def _watched(watched: Watched) -> dict[str, Any]:
    """The layers, each with the worst value of each metric over all samples."""
    steps = sampled_steps(watched)
    worst = metric_grids(watched, Columns(steps, 1)) if len(steps) else {}
    layers = [_layer(layer, number, worst) for number, layer in enumerate(watched.layers)]
    return {
        "interval": watched.interval,
        "samples": len(steps),
        "worst": {metric.key: metric.worst for metric in METRICS},
        "layers": layers,
    }


def _layer(layer: WatchedLayer, number: int, worst: dict[str, dict[str, Array]]) -> dict[str, Any]:
    figures: dict[str, dict[str, float | None]] = {}
    for key, grids in worst.items():
        for operand, grid in grids.items():
            figures.setdefault(operand, {})[key] = _worst(grid[number], _BY_KEY[key])
    return {**layer.to_dict(), "figures": figures}


def _worst(values: Array, metric: Metric) -> float | None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    return float(finite.max() if metric.worst == "highest" else finite.min())


def _block(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]
