"""The time of linear layers and of grouped ones (experts), from measured rates where there are any.

`octavo.nn.speedup` ships measured times of a linear layer's forward and backward pass, over a grid of (M, K, N), in
BF16 and by recipe, quantization included. Between the points of the grid the *rate* 6 M K N / seconds is interpolated.
For layers with fewer inputs or outputs than the grid has, the *time* is extrapolated on a line through the two smallest
sizes: FLOPs and bytes are linear in K and in N, and launches are constant. So a smaller layer has a lower rate.
The sizes of the grid are powers of two, whose outputs fill the GPU; others may not (`octavo.plan.waves`).

Small layers of the grid were measured for milliseconds. In a long run the GPU lowers its clock to stay within its
power: in the grid BF16 layers that take 30 ms or more have 668 to 689 TFLOP/s, and small ones up to 785. So no BF16
GEMM of a plan is faster than the largest of the grid. FP8 has no such limit here, since its rates do not fall so.

A GPU without measurements gets the share of its data sheet's peak that the H100 reaches at the same shape.

Of grouped GEMMs the rates of two shapes were measured (bench.gpu.moe; `make docs` writes expert_rates.json): 4,096 rows
an expert of 4096 x 14336, and 512 rows of 2048 x 768. They are interpolated by the rows of an expert. Casts are counted
as traffic, and no GEMM is faster than its weights are read.
"""

import functools
import json
from collections.abc import Mapping
from importlib.resources import files

from octavo.nn.speedup.table import Shape, Table, interpolate, interpolate_along
from octavo.plan.hardware import Gpu, known_gpus
from octavo.plan.waves import slowdowns
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
    return sum(_gemm_seconds(gpu, recipe, shape))


def _gemm_seconds(gpu: Gpu, recipe: Recipe, shape: Shape) -> list[float]:
    """Seconds of y, dx and dw, each with a third of the casts."""
    reference, (m, k, n) = known_gpus()[REFERENCE], shape
    assert reference.grid is not None
    grid = _grid(reference.grid, recipe.name) or _grid(reference.grid, "blockwise")
    casts = _cast_bytes(shape) / reference.copy_rate / 3 if recipe.quantized else 0.0
    alone = _seconds(grid, shape) / 3 - casts
    least = 0.0 if recipe.quantized else 2.0 * m * k * n / grid[max(grid)]
    return [(max(alone * more, least) + casts) / _share(gpu, recipe) for more in slowdowns(recipe, shape)]


def _cast_bytes(shape: Shape) -> float:
    """x and dy are read in BF16, written in eight bits and transposed; the weight is cast and transposed too."""
    m, k, n = shape
    return 5.0 * (m * (k + n) + k * n)


def _seconds(grid: Mapping[Shape, float], shape: Shape) -> float:
    m, k, n = shape
    k_least, k_next = _two_smallest(grid, 1)
    if k < k_least:
        return _below(_seconds(grid, (m, k_least, n)), _seconds(grid, (m, k_next, n)), k / k_least, k_next / k_least)
    n_least, n_next = _two_smallest(grid, 2)
    if n < n_least:
        return _below(_seconds(grid, (m, k, n_least)), _seconds(grid, (m, k, n_next)), n / n_least, n_next / n_least)
    return 6.0 * m * k * n / interpolate(grid, shape)


def _two_smallest(grid: Mapping[Shape, float], axis: int) -> list[int]:
    return sorted({shape[axis] for shape in grid})[:2]


def _below(least: float, following: float, size: float, next_size: float) -> float:
    """Seconds at `size` < 1, on the line through `least` at 1 and `following` at `next_size`, at no higher rate."""
    return max(least - (following - least) / (next_size - 1) * (1 - size), least * size)


def _share(gpu: Gpu, recipe: Recipe) -> float:
    """The peak of a GPU that was not measured over that of the one that was."""
    reference = known_gpus()[REFERENCE]
    if gpu.grid is not None:
        return 1.0
    if recipe.quantized and gpu.fp8 and reference.fp8:
        return gpu.fp8 / reference.fp8
    return gpu.bf16 / reference.bf16


def grouped_seconds(gpu: Gpu, recipe: Recipe, shape: Shape, groups: int) -> float:
    """Seconds of forward and backward pass of `groups` matrices [N, K], each with M rows of its own."""
    m, k, n = shape
    rate = interpolate_along(_expert_rates()["rowwise" if recipe.quantized else "bf16"], m)
    products = 6.0 * m * k * n / (rate * _share(gpu, recipe))
    reading = (4.0 if recipe.quantized else 6.0) * k * n / gpu.copy_rate  # y and dx read the weight, dw writes BF16
    casts = _cast_bytes(shape) / gpu.copy_rate if recipe.quantized else 0.0
    return groups * (max(products, reading) + casts)


@functools.cache
def _expert_rates() -> Mapping[str, Mapping[int, float]]:
    """FLOP/s of both passes by recipe and rows of an expert."""
    found = json.loads((files("octavo.plan") / "expert_rates.json").read_text())["rates"]
    return {recipe: {int(rows): rate for rows, rate in row.items()} for recipe, row in found.items()}


def product_seconds(gpu: Gpu, recipe: Recipe, shape: Shape, copies: int) -> float:
    """Seconds of forward and backward pass of a layer, or of its copies as one grouped layer."""
    return linear_seconds(gpu, recipe, shape) if copies == 1 else grouped_seconds(gpu, recipe, shape, copies)


def forward_seconds(gpu: Gpu, recipe: Recipe, shape: Shape, copies: int) -> float:
    """Seconds of the forward pass of a layer, or of its copies as one grouped layer, which takes a third of both."""
    if copies > 1:
        return grouped_seconds(gpu, recipe, shape, copies) / 3
    return _gemm_seconds(gpu, recipe, shape)[0]


def layer_speedup(gpu: Gpu, recipe: Recipe, shape: Shape, copies: int = 1) -> float:
    """The speed of a layer by `recipe`, as a multiple of that in BF16."""
    return product_seconds(gpu, Recipe("bf16"), shape, copies) / product_seconds(gpu, recipe, shape, copies)
