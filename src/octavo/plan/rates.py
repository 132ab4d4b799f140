"""The time of linear layers and of memory traffic, from measured rates where there are any.

`octavo.nn.speedup` ships measured times of a linear layer's forward and backward pass, over a grid of (M, K, N), in
BF16 and by recipe, quantization included. Between the points of the grid the *rate* 6 M K N / seconds is interpolated.
A GPU without measurements gets the share of its data sheet's peak that the H100 reaches at the same shape.
"""

import functools
from importlib.resources import files

from octavo.nn.speedup.table import Shape, Table, interpolate
from octavo.plan.hardware import Gpu, known_gpus
from octavo.recipe import Recipe

REFERENCE = "h100"  # the GPU whose shares of the data sheet others get


@functools.cache
def _grid(file: str, recipe: str) -> dict[Shape, float]:
    """FLOP/s of a linear layer, forward and backward, at each measured (M, K, N); "bf16" is a recipe here."""
    table = Table.from_json((files("octavo.nn.speedup") / file).read_text())
    measured = "rowwise" if recipe == "bf16" else recipe
    return {
        row.shape: 6e3 * row.M * row.K * row.N / (row.bf16_ms if recipe == "bf16" else row.fp8_ms)
        for row in table.grid
        if row.recipe == measured
    }


def has_measured(gpu: Gpu, recipe: Recipe) -> bool:
    """Whether the linear layers of `recipe` were measured on `gpu`."""
    return gpu.grid is not None and bool(_grid(gpu.grid, recipe.name))


def linear_seconds(gpu: Gpu, recipe: Recipe, shape: Shape) -> float:
    """Seconds of forward and backward pass of a linear layer at (M, K, N), its quantization included."""
    m, k, n = shape
    reference = known_gpus()[REFERENCE]
    assert reference.grid is not None
    assert reference.fp8 is not None
    grid = _grid(reference.grid, recipe.name) or _grid(reference.grid, "blockwise")
    rate = interpolate(grid, shape)
    if gpu.grid is None:
        rate *= gpu.fp8 / reference.fp8 if recipe.quantized and gpu.fp8 else gpu.bf16 / reference.bf16
    return 6.0 * m * k * n / rate


def layer_speedup(gpu: Gpu, recipe: Recipe, shape: Shape) -> float:
    """The speed of a linear layer by `recipe`, as a multiple of that in BF16."""
    return linear_seconds(gpu, Recipe("bf16"), shape) / linear_seconds(gpu, recipe, shape)
