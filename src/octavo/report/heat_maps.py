"""The records of a watched run as grids of layers and steps, small enough for a page.

The samples of a long run share columns: a column of a grid shows the worst of its samples, the highest or the lowest as
`Metric.worst` says. A value is a code of 16 bits:

    0 to 65533   low to high: evenly spaced, or of a logarithmic metric 0 for zero and 1 to 65533 for low to high
    65534        inf or NaN came
    65535        no value
"""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.numerics.formats import FP8_FORMATS, decode
from octavo.watching.storage import BINADES, OPERANDS, Array, Records, Watched

MISSING, WRONG, LAST = 65535, 65534, 65533


@dataclass(frozen=True)
class Metric:
    """A number of the records that a heat map can show."""

    key: str  # its field in the records
    label: str
    unit: str = ""  # "share" (0 to 1, shown in percent), "dB", "octaves" or ""
    log: bool = False  # colours are spaced logarithmically
    worst: str = "highest"  # of the samples of a column, the one that is shown: "highest" or "lowest"
    operands: bool = True  # one grid for each operand; otherwise one grid of the layers


METRICS = (
    Metric("saturated", "saturated share", "share", log=True),
    Metric("flushed", "flushed share", "share", log=True),
    Metric("sqnr", "SQNR", "dB", worst="lowest"),
    Metric("amax", "amax", log=True),
    Metric("kurtosis", "kurtosis", log=True),
    Metric("gap", "range of the scale over amax", "octaves", worst="lowest"),
    Metric("nonfinite", "share of inf and NaN", "share", log=True),
    Metric("shift_lost", "bytes of dy lost in dw", "share", log=True),
    Metric("gradient_norm", "norm of the weight's gradient", log=True, operands=False),
    Metric("update_ratio", "update / weight", log=True, operands=False),
    Metric("weight_norm", "norm of the weight", log=True, operands=False),
    Metric("alignment", "alignment of gate and up", operands=False),
)


Columns = list[tuple[int, int]]  # of the grids: the first and the last step of each


def columns_of(steps: Array, most: int) -> Columns:
    """At most `most` columns, and at most as many as the sampled `steps`, which are ascending."""
    parts = np.array_split(steps, min(len(steps), most)) if len(steps) else []
    return [(int(part[0]), int(part[-1])) for part in parts]


def sampled_steps(watched: Watched) -> Array:
    """The steps that have records, ascending."""
    return np.unique(np.concatenate([watched.operands["step"], watched.layer_records["step"]]))


def metric_grids(watched: Watched, columns: Columns) -> dict[str, dict[str, Array]]:
    """The worst values of each metric as [layers, columns] float64: by the metric's key, then by operand. The operand
    of a metric of layers is "layer". NaN stands for no value. A metric or an operand without values is left out, and so
    is a share of inf and NaN that is always 0."""
    grids = _fill(len(watched.layers), columns, watched.operands, OPERANDS)
    grids |= _fill(len(watched.layers), columns, watched.layer_records, ("layer",))
    if not any((grid > 0).any() for grid in grids["nonfinite"].values()):
        del grids["nonfinite"]
    return {key: found for key, found in grids.items() if found}


def _fill(layers: int, columns: Columns, records: Records, operands: tuple[str, ...]) -> dict[str, dict[str, Array]]:
    metrics = [metric for metric in METRICS if metric.operands == (operands == OPERANDS)]
    shape, starts = (len(operands), layers, len(columns)), np.array([first for first, _ in columns], np.uint32)
    grids = {metric.key: np.full(shape, np.nan) for metric in metrics}
    column = np.searchsorted(starts, records["step"], side="right") - 1
    cells: Any = records["operand"] if len(operands) > 1 else 0, records["layer"], column
    for metric in metrics:
        worst = np.fmax if metric.worst == "highest" else np.fmin
        worst.at(grids[metric.key], cells, _values(records, metric))
    return {
        key: {name: values for name, values in zip(operands, grid, strict=True) if not np.isnan(values).all()}
        for key, grid in grids.items()
    }


def encode_grid(values: Array, metric: Metric) -> dict[str, Any]:
    """The codes of [layers, columns] values for the page: low, high, whether there are zeros, and base64 of uint16."""
    finite = np.isfinite(values)
    used = values[finite & (values > 0)] if metric.log else values[finite]
    low, high = (float(used.min()), float(used.max())) if used.size else (0.0, 0.0)
    place = np.zeros_like(values)
    if metric.log and used.size:
        place[finite & (values > 0)] = 1 + np.log(used / low) / max(np.log(high / low), 1e-30) * (LAST - 1)
    elif high > low:
        place = (np.where(finite, values, low) - low) / (high - low) * LAST
    codes = np.rint(place).astype(np.uint16)
    codes[np.isinf(values)] = WRONG
    codes[np.isnan(values)] = MISSING
    zero = bool((values[finite] == 0).any())
    return {"low": low, "high": high, "zero": zero, "codes": to_base64(codes, "<u2")}


def _values(records: Records, metric: Metric) -> Array:
    values = records[metric.key].astype(np.float64)
    if metric.key == "sqnr":  # inf: no error at all
        values[np.isinf(values)] = np.nan
    if metric.key == "shift_lost":  # of dy alone
        values[records["operand"] != OPERANDS.index("dy")] = np.nan
    if metric.key in ("amax", "gradient_norm"):
        values[np.isnan(values)] = np.inf
    return values


def spread(steps: Array, count: int) -> list[int]:
    """At most `count` of `steps`, evenly spaced, with the first and the last."""
    places = np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int)
    return [int(step) for step in steps[np.unique(places)]]


def histograms_at(watched: Watched, steps: list[int]) -> dict[str, Any]:
    """The histograms at `steps` for the page: of x, w, dy and "gradient" (of the weight) `shares`, uint16 [steps,
    layers, 40], and `amax`, float32 [steps, layers]; operands have `scale` and `smallest_scale` too. All are base64."""
    tables = watched.operands, watched.layer_records
    operands, gradients = (records[np.isin(records["step"], steps)] for records in tables)
    fields = {name: name for name in ("amax", "scale", "smallest_scale")}
    found = {
        operand: _arrays(operands[operands["operand"] == number], steps, len(watched.layers), "binades", fields)
        for number, operand in enumerate(OPERANDS)
    }
    found["gradient"] = _arrays(gradients, steps, len(watched.layers), "gradient_binades", {"amax": "gradient_amax"})
    return {"steps": steps, "operands": {name: arrays for name, arrays in found.items() if arrays}}


def code_points(name: str) -> list[float]:
    """The positive numbers of an FP8 format, ascending."""
    codes = torch.arange(FP8_FORMATS[name].max_code + 1, dtype=torch.uint8)
    return [float(x) for x in decode(codes, FP8_FORMATS[name]).tolist() if x > 0]


def _arrays(records: Records, steps: list[int], layers: int, binades: str, fields: dict[str, str]) -> dict[str, str]:
    if not len(records):
        return {}
    place = np.searchsorted(steps, records["step"]), records["layer"]
    shares = np.zeros((len(steps), layers, BINADES), "<u2")
    shares[place] = records[binades]
    arrays = {"shares": to_base64(shares, "<u2")}
    for name, key in fields.items():
        array = np.zeros((len(steps), layers), "<f4")
        array[place] = records[key]
        arrays[name] = to_base64(array, "<f4")
    return arrays


def to_base64(values: Array, dtype: str) -> str:
    """The values in C order as base64 of `dtype`, such as "<u2", which elements.js decodes when it needs them."""
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()
