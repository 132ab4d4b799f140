"""The speedup of a linear layer in FP8 over BF16: measurements of one GPU, and interpolation between them.

The speedup of a layer of K inputs and N outputs, for M tokens, is a ratio of times of forward and backward pass:

    speedup(M,K,N) = bf16_ms / fp8_ms

Each time is a sum of terms: the GEMMs grow with M*K*N, quantizing with M*K, M*N and K*N, launching with nothing. The
ratio bends where one term overtakes another, and is smooth in the logarithms of the sizes. So the grid has powers of
two, the interpolation is linear in log2 along each of the three axes, and sizes beyond an edge get the edge's value.
"""

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Self

Shape = tuple[int, int, int]  # M tokens, K inputs, N outputs


@dataclass(frozen=True)
class Machine:
    """The GPU and the versions of the software, on which the times depend."""

    gpu: str
    compute_capability: str
    cuda: str
    torch: str
    octavo: str


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of a forward and backward pass of one linear layer, in BF16 and in FP8."""

    recipe: str
    M: int
    K: int
    N: int
    bf16_ms: float
    fp8_ms: float

    def __post_init__(self) -> None:
        sizes_ok = all(isinstance(size, int) and size > 0 for size in self.shape)
        if not sizes_ok or not all(math.isfinite(ms) and ms > 0 for ms in (self.bf16_ms, self.fp8_ms)):
            raise ValueError(f"a measurement must have positive sizes and times, got {self}")

    @property
    def shape(self) -> Shape:
        return self.M, self.K, self.N

    @property
    def speedup(self) -> float:
        return self.bf16_ms / self.fp8_ms


@dataclass(frozen=True)
class Table:
    """The measurements of one machine.

    Args:
        machine: the machine on which they were taken.
        method: a description of how they were taken.
        grid: for each recipe all points of a grid of M, K and N, between which speedups are interpolated.
        shapes: single layers, which say nothing about layers of other sizes.
    """

    machine: Machine
    method: str
    grid: tuple[Measurement, ...] = ()
    shapes: tuple[Measurement, ...] = ()

    def __post_init__(self) -> None:
        for recipe, rows in Counter(row.recipe for row in self.grid).items():
            points = self._speedups(self.grid, recipe).keys()
            if not rows == len(points) == math.prod(len(axis) for axis in _axes(points)):
                raise ValueError(f"the grid of {recipe} must hold every combination of its M, K and N, each once")

    def predict(self, recipe: str, shape: Shape) -> float | None:
        """The speedup at (M, K, N), measured or interpolated; None if this table does not have it."""
        known = self._speedups(self.shapes, recipe)
        if shape in known:
            return known[shape]
        grid = self._speedups(self.grid, recipe)
        return interpolate(grid, shape) if grid else None

    @staticmethod
    def _speedups(rows: Sequence[Measurement], recipe: str) -> dict[Shape, float]:
        return {row.shape: row.speedup for row in rows if row.recipe == recipe}

    def to_json(self) -> str:
        """The table as JSON, with one measurement a line."""
        fields = {
            "machine": json.dumps(asdict(self.machine)),
            "method": json.dumps(self.method),
            "grid": _lines(self.grid),
            "shapes": _lines(self.shapes),
        }
        return "{\n" + ",\n".join(f'  "{name}": {text}' for name, text in fields.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The table that `to_json` wrote. A ValueError says what is wrong with other text."""
        fields = json.loads(text)
        try:
            grid, shapes = (tuple(Measurement(**row) for row in fields.pop(name)) for name in ("grid", "shapes"))
            return cls(Machine(**fields.pop("machine")), grid=grid, shapes=shapes, **fields)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is not a table of speedups: {type(error).__name__}: {error}") from error


def interpolate(grid: Mapping[Shape, float], shape: Shape) -> float:
    """The value at (M, K, N) between the eight points of a full `grid` around it, linear in log2 along each axis."""
    corners = product(*(_around(axis, size) for axis, size in zip(_axes(grid.keys()), shape, strict=True)))
    return sum(m_part * k_part * n_part * grid[m, k, n] for (m, m_part), (k, k_part), (n, n_part) in corners)


def interpolate_along(values: Mapping[int, float], size: int) -> float:
    """The value at `size` between the two entries of `values` around it, linear in log2."""
    return sum(part * values[point] for point, part in _around(sorted(values), size))


def _around(axis: Sequence[int], size: int) -> list[tuple[int, float]]:
    """The points of `axis` below and above `size` with their weights; one point at an edge or exactly there."""
    size = min(max(size, axis[0]), axis[-1])
    index = bisect_right(axis, size) - 1
    low = axis[index]
    if low == size:
        return [(low, 1.0)]
    high = axis[index + 1]
    above = math.log2(size / low) / math.log2(high / low)
    return [(low, 1 - above), (high, above)]


def _axes(points: Any) -> list[list[int]]:
    return [sorted(set(axis)) for axis in zip(*points, strict=True)]


def _lines(rows: Sequence[Measurement]) -> str:
    return "[" + ",".join(f"\n    {json.dumps(asdict(row))}" for row in rows) + ("\n  ]" if rows else "]")
