"""The histograms of a watched run: of each operand and gradient at some of the sampled steps, in binades."""

from typing import Any

import numpy as np
import torch

from octavo.numerics.codec import decode
from octavo.numerics.formats import FP8_FORMATS
from octavo.report.encoding import to_base64
from octavo.telemetry.schema import BINADES, OPERANDS, Records
from octavo.telemetry.storage import Watched


def histograms_at(watched: Watched, steps: list[int]) -> dict[str, Any]:
    """The histograms at `steps` for the page.

    Returns:
        `steps`, and `operands`: for each of x, w, dy, and "gradient" (of the weight), base64 of `shares`, uint16
        [steps, layers, 40], and of `amax`, float32 [steps, layers]; of operands also `scale` and `smallest_scale`.
    """
    found: dict[str, Any] = {}
    for number, operand in enumerate(OPERANDS):
        records = _at(watched.operands, steps)
        fields = {"shares": "binades", "amax": "amax", "scale": "scale", "smallest_scale": "smallest_scale"}
        found[operand] = _arrays(records[records["operand"] == number], steps, len(watched.layers), fields)
    fields = {"shares": "gradient_binades", "amax": "gradient_amax"}
    found["gradient"] = _arrays(_at(watched.layer_records, steps), steps, len(watched.layers), fields)
    return {"steps": steps, "operands": {name: arrays for name, arrays in found.items() if arrays}}


def code_points(name: str) -> list[float]:
    """The positive numbers of an FP8 format, ascending."""
    codes = torch.arange(FP8_FORMATS[name].max_code + 1, dtype=torch.uint8)
    return [float(x) for x in decode(codes, FP8_FORMATS[name]).tolist() if x > 0]


def _at(records: Records, steps: list[int]) -> Records:
    """The records of some steps. Records stand in the order of the steps."""
    if not len(records):
        return records
    starts = np.searchsorted(records["step"], steps, side="left")
    ends = np.searchsorted(records["step"], steps, side="right")
    return np.concatenate([records[start:end] for start, end in zip(starts, ends, strict=True)])


def _arrays(records: Records, steps: list[int], layers: int, fields: dict[str, str]) -> dict[str, str]:
    if not len(records):
        return {}
    place = np.searchsorted(steps, records["step"]), records["layer"]
    arrays: dict[str, str] = {}
    for name, key in fields.items():
        shape = (len(steps), layers, BINADES) if name == "shares" else (len(steps), layers)
        array = np.zeros(shape, np.uint16 if name == "shares" else np.float32)
        array[place] = records[key]
        arrays[name] = to_base64(array, "<u2" if name == "shares" else "<f4")
    return arrays
