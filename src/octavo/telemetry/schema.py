"""The records of a watched run.

RUN/watch/
  layers.json      the layers, by the number that records have for them, and the version of this schema
  operands.bin     one `OPERAND` record for each operand of each layer and sampled step
  layers.bin       one `LAYER` record for each layer and sampled step
  experts.bin      one `EXPERTS` record for each stack of experts' matrices and sampled step
  events.jsonl     one `Event` a line

The .bin files hold records of a fixed size, little endian, in the order of the steps, and nothing else.
`docs/watch.md` says what each number means.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Records = Array  # of `OPERAND`, `LAYER` or `EXPERTS`

VERSION = 1
OPERANDS = ("x", "w", "dy")  # by the number in OPERAND["operand"]
GEMMS = ("y", "dx", "dw", "recomputation")
# Entry k of the binades is FULL_SHARE times the share of elements with 2^(e-k) <= |x| < 2^(e-k+1), where 2^e is the
# largest power of two up to amax. The last entry has all smaller ones. Zeros are the rest: in none.
BINADES = 40
FULL_SHARE = 65535

# Bits of OPERAND["flags"]
RECOMPUTED = 1  # activation checkpointing computed the operand a second time in this step
UNQUANTIZED = 2  # the GEMMs read it in high precision: scales and errors are those of no format, NaN

OPERAND = np.dtype(
    [
        ("step", "<u4"),
        ("layer", "<u2"),
        ("operand", "u1"),
        ("flags", "u1"),
        ("amax", "<f4"),
        ("rms", "<f4"),
        ("scale", "<f4"),  # the largest; x ≈ x_q * scale
        ("smallest_scale", "<f4"),
        ("saturated", "<f4"),  # share of elements beyond the largest code, which they became
        ("flushed", "<f4"),  # share of elements that were not zero and became zero
        ("sqnr", "<f4"),  # dB
        ("kurtosis", "<f4"),  # fourth standardized moment: 3 of normal numbers
        ("crest", "<f4"),  # amax / rms
        ("zero_rows", "<f4"),  # share of rows that are all zero
        ("nonfinite", "<f4"),  # share of elements
        ("shift_lost", "<f4"),  # of dy: share of the bytes of g, not zero, that became zero in h_q of dw; else 0
        (
            "gap",
            "<f4",
        ),  # of a scale that was fixed before: log2(amax that the scale expects / amax that came); else NaN
        ("binades", "<u2", (BINADES,)),  # see BINADES
    ]
)

LAYER = np.dtype(
    [
        ("step", "<u4"),
        ("layer", "<u2"),
        ("pad", "<u2"),
        ("gradient_norm", "<f4"),  # of the weight, before clipping
        ("gradient_amax", "<f4"),
        ("gradient_nonfinite", "<f4"),  # share of elements
        ("weight_smallest", "<f4"),
        ("weight_largest", "<f4"),
        ("weight_norm", "<f4"),
        ("update_ratio", "<f4"),  # norm of the step's change of w / norm of w, over sampled rows
        ("alignment", "<f4"),  # of the gate and up layers of a SwiGLU: mean |cosine| of matching rows; else NaN
        ("gradient_binades", "<u2", (BINADES,)),
    ]
)

EXPERTS = np.dtype(
    [
        ("step", "<u4"),
        ("layer", "<u2"),  # the stack of their matrices
        ("experts", "<u2"),
        ("fullest", "<u2"),  # the expert with most rows
        ("idle", "<u2"),  # experts without a row
        ("worst", "<u2", (3,)),  # the expert whose x, w and dy have the lowest SQNR in the sample
        ("pad", "<u2"),
        ("load", "<f4"),  # rows of the fullest expert / mean rows of an expert
        ("sqnr", "<f4", (3,)),  # of the worst x, w and dy, dB; NaN if unknown
    ]
)


@dataclass(frozen=True)
class GemmRun:
    """The precision that a GEMM ran in.

    Attributes:
        precision: "fp8", or the dtype of unquantized operands: "bf16", "fp16", "fp32".
        kernel: the backend, such as "cublaslt" or "emulated".
        why: the reason, in words, where the precision or the kernel is not the fastest.
    """

    precision: str
    kernel: str
    why: str = ""


@dataclass(frozen=True)
class WatchedLayer:
    """A layer of a watched model.

    Attributes:
        name: in the model.
        kind: the name of its class.
        shape: (N, K) of the whole weight.
        recipe: the name of its recipe; "" where it was not converted.
        formats: the format of each operand, "bf16" where it is not quantized: {"x": "e4m3", ...}.
        granularity: of the scales of each operand, "" where it is not quantized.
        gemms: how y, dx, dw and the recomputation of y ran; a GEMM that did not run is missing.
        experts: of a stack of experts' matrices, their number; 0 for another layer.
    """

    name: str
    kind: str
    shape: tuple[int, int]
    recipe: str
    formats: dict[str, str]
    granularity: dict[str, str]
    gemms: dict[str, GemmRun]
    experts: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> WatchedLayer:
        """The layer of `to_dict`. A KeyError or TypeError if a field is missing or unknown."""
        gemms = {name: GemmRun(**run) for name, run in fields["gemms"].items()}
        rows, columns = fields["shape"]
        return cls(**{**fields, "shape": (int(rows), int(columns)), "gemms": gemms})


@dataclass(frozen=True)
class Event:
    """A finding of a rule.

    Attributes:
        step: the sampled step.
        rule: its name, such as "saturation_spike".
        layer: the layer's name; None for the whole model.
        operand: "x", "w", "dy" or "y"; None where the finding is of none.
        value, limit: the number that was found, and the one that it passed; None where it is not finite.
        message: one sentence.
        action: what the trainer did: None, "promote", "e5m2" or "rollback".
        undone: whether the run went back to an earlier step later, so that its model has not seen this one.
        expert: the number of the expert that it is of, where the layer is a stack of experts' matrices.
    """

    step: int
    rule: str
    layer: str | None
    operand: str | None
    value: float | None
    limit: float | None
    message: str
    action: str | None = None
    undone: bool = False
    expert: int | None = None

    def describe(self) -> str:
        """The rule, the layer and the message."""
        return f"{self.rule}: {self.layer + ': ' if self.layer else ''}{self.message}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without inf and NaN."""
        numbers = {"value": self.value, "limit": self.limit}
        return asdict(self) | {name: x if x is not None and math.isfinite(x) else None for name, x in numbers.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Event:
        """The event of `to_dict`. A TypeError if a field is missing or unknown."""
        return cls(**fields)


def columns(records: Records) -> dict[str, Array]:
    """The fields of records, each a column; the binades are columns `binades_0` to `binades_39`.

    Example:
        >>> frame = pandas.DataFrame(columns(read_watch(run).operands))  # doctest: +SKIP
        >>> table = pyarrow.table(columns(read_watch(run).operands))  # doctest: +SKIP
    """
    found = {}
    for name in records.dtype.names or ():
        field = records[name]
        if field.ndim == 1:
            found[name] = np.ascontiguousarray(field)
        else:
            found |= {f"{name}_{k}": np.ascontiguousarray(field[:, k]) for k in range(field.shape[1])}
    return found
