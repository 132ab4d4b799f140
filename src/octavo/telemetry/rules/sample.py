"""A sample as arrays with one number for each operand of each layer, and what the rules remember of earlier samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.numerics.formats import FP8_FORMATS
from octavo.telemetry.schema import FULL_SHARE, OPERANDS, UNQUANTIZED, Records, WatchedLayer

Grid = npt.NDArray[np.float64]  # [layers, 3]: one number for each operand x, w, dy of each layer
Mask = npt.NDArray[np.bool_]

RECENT = 16  # samples that a history has
_ALMOST_ALL = 0.999


@dataclass(frozen=True)
class SampleGrids:
    """The records of one sampled step, each field as a grid of the operands of all layers.

    Args:
        operands, layer_records: of one step, with the dtypes of `octavo.telemetry.schema`.
        layers: of the model, by the number that records have for them.
    """

    operands: Records
    layer_records: Records
    layers: Sequence[WatchedLayer]

    def __getitem__(self, name: str) -> Grid:
        """A field of the operands' records; NaN where there is no record."""
        return self._grid(self.operands[name])

    @property
    def quantized(self) -> Mask:
        """The operands that a GEMM read in eight bits."""
        found: Mask = self._grid(self.operands["flags"] & UNQUANTIZED) == 0
        return found

    @property
    def nonzero(self) -> Grid:
        """The share of elements that are not zero."""
        return self._grid(self.operands["binades"].sum(axis=1) / FULL_SHARE)

    @property
    def all_zero(self) -> Mask:
        """The operands that are all zero before they are quantized."""
        found: Mask = (self["amax"] == 0) & self.quantized
        return found

    @property
    def all_flushed(self) -> Mask:
        """The operands whose elements other than zero nearly all become zero in eight bits."""
        flushed = self["flushed"]
        found: Mask = (flushed > 0) & (flushed >= _ALMOST_ALL * self.nonzero)
        return found & self.quantized

    @property
    def binades(self) -> Grid:
        """The binades of the operands' formats, from the smallest subnormal number to the largest: 17.8 of e4m3."""
        names = [[layer.formats.get(operand, "") for operand in OPERANDS] for layer in self.layers]
        known = {name: np.log2(f.max / f.smallest_subnormal) for name, f in FP8_FORMATS.items()}
        return np.array([[known.get(name, np.nan) for name in row] for row in names])

    def of_layers(self, name: str) -> Grid:
        """A field of the layers' records, [layers, 1]; NaN where there is no record."""
        found = np.full((len(self.layers), 1), np.nan)
        found[self.layer_records["layer"], 0] = self.layer_records[name]
        return found

    def _grid(self, values: npt.NDArray[Any]) -> Grid:
        found = np.full((len(self.layers), len(OPERANDS)), np.nan)
        found[self.operands["layer"], self.operands["operand"]] = values
        return found


@dataclass
class History:
    """The numbers of earlier samples that rules compare with. A resumed run begins a new history.

    Attributes:
        amax, kurtosis: [RECENT, layers, 3], of the last samples in any order; NaN where there was none.
        zeros: [layers, 3], the number of samples in a row, up to the last, in which an operand was all zero.
        samples: the number of samples.
    """

    layers: int
    samples: int = 0
    amax: npt.NDArray[np.float64] = field(init=False)
    kurtosis: npt.NDArray[np.float64] = field(init=False)
    zeros: Grid = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.layers, len(OPERANDS))
        self.amax, self.kurtosis = np.full((RECENT, *shape), np.nan), np.full((RECENT, *shape), np.nan)
        self.zeros = np.zeros(shape)

    @property
    def known(self) -> Grid:
        """[layers, 3], the number of the last samples in which the amax was a number."""
        found: Grid = np.isfinite(self.amax).sum(0).astype(np.float64)
        return found

    def add(self, sample: SampleGrids) -> None:
        """Take a sample into the history."""
        for name, recent in (("amax", self.amax), ("kurtosis", self.kurtosis)):
            recent[self.samples % RECENT] = np.where(np.isfinite(sample[name]), sample[name], np.nan)
        self.zeros = np.where(sample.all_zero, self.zeros + 1, 0)
        self.samples += 1
