"""Measured rates, from the JSON files beside this one.

They are the memory and rates of GPUs, the speed of a layer in FP8 over BF16 by shape, and the speeds of packed schemes.
"""

import functools
import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import product
from typing import Any, Self

import torch

from octavo.checkpoint.scheme import Scheme
from octavo.recipe import Gemm, Recipe, get_recipe
from octavo.util import nearest, plural, reading

# ---- GPUs: memory and rates of the data sheet, and the rates that were measured on them. A data sheet's rate of matrix
# products is a peak that none reaches: where nothing was measured, the plan takes the share that an H100 reaches for
# the same shapes, and says so.


COPY_SHARE = 2996 / 3350  # of the data sheet's bandwidth: a copy on an H100 (bench/results/gpu_ceilings.json)
SHEET = "data sheet, times the share that an H100 reaches"
ATTENTION_SHARE = 483 / 989.4  # of the data sheet's BF16 rate: the two kernels in bench/results/gpu_stack.json
HOST_CORES = 16  # of the host whose rates are below


@dataclass(frozen=True)
class Gpu:
    """A GPU. Bytes, bytes a second and FLOP/s."""

    key: str
    name: str
    architecture: str  # its key in `octavo.ops.launching`, which decides the GEMMs
    device: str  # a pattern of the name that its driver gives, and GPUs that differ in memory and links alone
    memory: float
    bandwidth: float
    bf16: float
    fp8: float | None  # None where there is no FP8 GEMM
    fp32: float  # without tensor cores
    link: float  # a direction, to the other GPUs of the node, over NVLink, Infinity Fabric or PCIe
    source: str  # of the figures
    grid: str | None = None  # the file beside this one with the times of linear layers, if they were measured
    copy: float | None = None  # measured, reads and writes
    attention: float | None = None  # measured, of the products of its forward and backward pass
    measured: str = ""  # the source of what was measured
    # Of an H200's host, an Intel Xeon with AMX. Both are fitted to bench/results/gpu_offload.json.
    host_copy: float = 47.6e9  # a direction between CPU and GPU
    host_adam: float = HOST_CORES * 270e6  # parameters a second that AdamW updates; each takes 28 bytes

    @property
    def copy_rate(self) -> float:
        return self.copy or self.bandwidth * COPY_SHARE

    @property
    def attention_rate(self) -> float:
        return self.attention or self.bf16 * ATTENTION_SHARE


@functools.cache
def _read(file: str) -> dict[str, Any]:
    """The object in a file beside this one. Keys that are digits, numbers of tokens, are numbers."""
    text = (files("octavo.rates") / file).read_text()
    return json.loads(text, object_hook=lambda o: {int(key) if key.isdigit() else key: x for key, x in o.items()})


@functools.cache
def known_gpus() -> dict[str, Gpu]:
    """All GPUs by the name that `--gpu` takes."""
    return {key: Gpu(key, **row) for key, row in _read("gpus.json").items()}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name; case, spaces and dashes do not matter. The error names the nearest."""
    gpus, plain = known_gpus(), "".join(c for c in name.lower() if c.isalnum())
    if plain in gpus:
        return gpus[plain]
    raise ValueError(f"--gpu must be one of {', '.join(gpus)}; got {name!r}{nearest(plain, gpus)}")


# Dense BF16 FLOP/s of GPUs that no plan has a row for, by a pattern of the device's name, from their data sheets.
_OTHER_PEAKS = {r"H100 NVL": 835.5e12, r"H100 PCIe": 756.5e12, r"GB200": 2500e12, r"\bL4\b": 121e12}


def peak_flops(name: str) -> float | None:
    """The peak of dense BF16 arithmetic, FLOP/s, of the GPU with this name; None for one that is not known.

    Example:
        >>> peak_flops("NVIDIA H200")
        989400000000000.0
    """
    known = _OTHER_PEAKS | {gpu.device: gpu.bf16 for gpu in known_gpus().values()}
    return next((peak for pattern, peak in known.items() if re.search(pattern, name)), None)


# ---- The speedup of a linear layer in FP8 over BF16: measurements of one GPU, and interpolation between them.
#
# The speedup of a layer of K inputs and N outputs, for M tokens, is a ratio of times of forward and backward pass:
#
#     speedup(M,K,N) = bf16_ms / fp8_ms
#
# Each time is a sum of terms: the GEMMs grow with M*K*N, quantizing with M*K, M*N and K*N, launching with nothing. The
# ratio bends where one term overtakes another, and is smooth in the logarithms of the sizes. So the grid has powers of
# two, the interpolation is linear in log2 along each of the three axes, and sizes beyond an edge get the edge's value.


LEAST_SPEEDUP = 1.05  # from which a layer gains: layers predicted at 1.03x and 1.05x made a GPT 0.5 % slower
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
    """The measurements of one machine. Each recipe has all points of a grid of M, K and N, between which speedups are
    interpolated, and single `shapes`, which say nothing about layers of other sizes."""

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
        """The table as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The table that `to_json` wrote. Other text is a ValueError, which names the fault."""
        with reading("the text", "a table of speedups"):
            fields = json.loads(text)
            grid, shapes = (tuple(Measurement(**row) for row in fields.pop(name)) for name in ("grid", "shapes"))
            return cls(Machine(**fields.pop("machine")), grid=grid, shapes=shapes, **fields)


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


# ---- The time of linear layers and of grouped ones (experts), from measured rates where there are any.
#
# h100.json has measured times of a linear layer's forward and backward pass, over a grid of (M, K, N), in BF16 and by
# recipe, quantization included. Between the points of the grid the *rate* 6 M K N / seconds is interpolated. For
# layers with fewer inputs or outputs than the grid has, the *time* is extrapolated on a line through the two smallest
# sizes: FLOPs and bytes are linear in K and in N, and launches are constant. So a smaller layer has a lower rate. The
# sizes of the grid are powers of two, whose outputs fill the GPU; others may not.
#
# Small layers of the grid were measured for milliseconds. In a long run the GPU lowers its clock to stay within its
# power: in the grid BF16 layers that take 30 ms or more have 668 to 689 TFLOP/s, and small ones up to 785. So no BF16
# GEMM of a plan is faster than the largest of the grid. FP8 has no such limit here, since its rates do not fall so.
#
# A GPU without measurements gets the share of its data sheet's peak that the H100 reaches at the same shape.
#
# Of grouped GEMMs the rates of two shapes were measured (bench.gpu.moe; `make docs` writes expert_rates.json): 4,096
# rows an expert of 4096 x 14336, and 512 rows of 2048 x 768. They are interpolated by the rows of an expert. Casts are
# counted as traffic, and no GEMM is faster than its weights are read. Other recipes than `rowwise` take as many times
# longer as in linear layers of the shape.


REFERENCE = "h100"  # the GPU whose shares of the data sheet others get


@functools.cache
def _grid(file: str, recipe: str) -> dict[Shape, float]:
    """FLOP/s of a linear layer, forward and backward, at each measured (M, K, N); "bf16" is a recipe here."""
    table = Table.from_json((files("octavo.rates") / file).read_text())
    measured = "rowwise" if recipe == "bf16" else recipe
    return {
        row.shape: 6e3 * row.M * row.K * row.N / (row.bf16_ms if recipe == "bf16" else row.fp8_ms)
        for row in table.grid
        if row.recipe == measured
    }


def product_origin(gpu: Gpu, recipe: Recipe, products: Sequence[tuple[Shape, int]]) -> str:
    """Where the times of GEMMs come from, each given by (M, K, N) and its copies: measured, interpolated, or else."""
    if gpu.grid is None:
        return SHEET
    if recipe.exact_backward:
        return f"y of rowwise, dx and dw of bf16, since {recipe.name} was not measured"
    grid, shapes = _grid(gpu.grid, recipe.name), [shape for shape, copies in products if copies == 1]
    if not grid:
        return f"those of blockwise, since {recipe.name} was not measured"
    least = min(grid)[1]
    found = "measured" if grid.keys() >= {*shapes} else "interpolated between measured layers"
    if any(min(k, n) < least for _, k, n in shapes):
        found += f"; the time of layers below {least:,} inputs or outputs is extrapolated"
    return found + ("" if len(shapes) == len(products) else "; experts from two measured layers")


def _gemm_seconds(gpu: Gpu, recipe: Recipe, shape: Shape) -> list[float]:
    """Seconds of y, dx and dw, each with a third of the casts."""
    if recipe.exact_backward:
        in_bf16 = _gemm_seconds(gpu, get_recipe("bf16"), shape)[1:]
        return [_gemm_seconds(gpu, get_recipe("rowwise"), shape)[0], *in_bf16]
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


def _seconds(grid: Mapping[Shape, float], shape: tuple[int, ...]) -> float:
    """Seconds of a layer; below the grid those on the line through its two smallest sizes, at no higher rate."""
    for axis in (1, 2):
        least, following, *_ = sorted({point[axis] for point in grid})
        if (size := shape[axis]) < least:
            first, second = (_seconds(grid, (*shape[:axis], at, *shape[axis + 1 :])) for at in (least, following))
            below = first - (second - first) / (following / least - 1) * (1 - size / least)
            return max(below, first * (size / least))
    m, k, n = shape
    return 6.0 * m * k * n / interpolate(grid, (m, k, n))


def _share(gpu: Gpu, recipe: Recipe) -> float:
    """The peak of a GPU that was not measured over that of the one that was."""
    reference = known_gpus()[REFERENCE]
    if recipe.quantized and gpu.fp8 and reference.fp8:
        return gpu.fp8 / reference.fp8
    return gpu.bf16 / reference.bf16


def grouped_seconds(gpu: Gpu, recipe: Recipe, shape: Shape, groups: int) -> float:
    """Seconds of forward and backward pass of `groups` matrices [N, K], each with M rows of its own."""
    m, k, n = shape
    rate = interpolate_along(_read("expert_rates.json")["rates"]["rowwise" if recipe.quantized else "bf16"], m)
    products = 6.0 * m * k * n / (rate * _share(gpu, recipe))
    reading = (4.0 if recipe.quantized else 6.0) * k * n / gpu.copy_rate  # y and dx read the weight, dw writes BF16
    casts = _cast_bytes(shape) / gpu.copy_rate if recipe.quantized else 0.0
    slower = 1.0
    if recipe.quantized and recipe.fusable is None:
        slower = product_seconds(gpu, recipe, shape) / product_seconds(gpu, get_recipe("rowwise"), shape)
    return groups * (max(products, reading) + casts) * slower


def product_seconds(gpu: Gpu, recipe: Recipe, shape: Shape, copies: int = 1) -> float:
    """Seconds of forward and backward pass of a layer at (M, K, N), its quantization included; or of its copies as one
    grouped layer."""
    return sum(_gemm_seconds(gpu, recipe, shape)) if copies == 1 else grouped_seconds(gpu, recipe, shape, copies)


def forward_seconds(gpu: Gpu, recipe: Recipe, shape: Shape, copies: int) -> float:
    """Seconds of the forward pass of a layer, or of its copies as one grouped layer, which takes a third of both."""
    if copies > 1:
        return grouped_seconds(gpu, recipe, shape, copies) / 3
    return _gemm_seconds(gpu, recipe, shape)[0]


def layer_speedup(gpu: Gpu, recipe: Recipe, shape: Shape, copies: int = 1) -> float:
    """The speed of a layer by `recipe`, as a multiple of that in BF16."""
    return product_seconds(gpu, Recipe("bf16"), shape, copies) / product_seconds(gpu, recipe, shape, copies)


# ---- How much longer a layer's GEMMs take because their outputs do not fill the GPU.
#
# A kernel divides its output into tiles, and a multiprocessor computes one tile at a time. So the tiles run in waves,
# and in the last wave some multiprocessors have nothing to do (NVIDIA, Matrix Multiplication Background User's Guide,
# "Wave Quantization"). 200 tiles take as long as 264 on 132 multiprocessors: dw [5120, 1280] of ViT-H's MLP is such an
# output.
#
# The measured layers have powers of two. Their outputs are 2^n tiles, of which 128 are a wave,
# or 256 two waves: 97 % of the multiprocessors have work, and that is in their times. Fewer tiles than multiprocessors
# count as a full wave: there cuBLASLt divides the sum of each output among several multiprocessors.


MULTIPROCESSORS = 132  # of the H100 and of the H200
MEASURED = 128  # of them have work in the measured layers
# Rows and columns of a tile, in the names of cuBLASLt's kernels (bench/results/gpu_stack.json and gpu_vision.json). In
# BF16 it has several, of which the plan takes the one that fills most; with scales by row it has one.
BF16_TILES = ((256, 128), (128, 256), (320, 128), (192, 192))
FP8_TILES = ((128, 128),)


def slowdowns(recipe: Recipe, shape: Shape) -> tuple[float, float, float]:
    """The times of y, dx and dw of a linear layer at (M, K, N), each as a multiple of that in a measured layer."""
    m, k, n = shape
    return _slowdown(m, n, recipe.y), _slowdown(m, k, recipe.dx), _slowdown(n, k, recipe.dw)


def _slowdown(rows: int, columns: int, gemm: Gemm | None) -> float:
    filled = []  # by each tile, the multiprocessors that have work, as a share of those in a measured layer
    for tile_rows, tile_columns in BF16_TILES if gemm is None else FP8_TILES:
        count = -(-rows // tile_rows) * -(-columns // tile_columns)
        waves = -(-count // MULTIPROCESSORS)
        share = rows * columns / (tile_rows * tile_columns * MEASURED * waves)
        filled.append(1.0 if waves == 1 else min(1.0, share))
    return 1 / max(filled)


def experts_speedup(preset: str) -> float | None:
    """The speed over BF16 of Mixtral's experts on a Hopper, forward and backward; None for presets not measured."""
    return _read("expert_rates.json")["speeds"].get(preset)


# ---- The speed of each packing scheme over BF16, as it was measured, to say where a packed model is slower.
#
# scheme_speeds.json holds, by tokens and scheme, the time of the linear layers of Llama-3-8B in BF16 over their time in
# the scheme, with the quantization of their inputs (bench.gpu.linears; `make docs` writes the file). expert_speeds.json
# holds the same of two layers of experts, by the sizes of their matrices (bench.gpu.moe).


SAME_CHIP = ("H100", "H200")  # parts of the names of GPUs that the file holds for


def slower_note(schemes: Counter[Scheme], device: torch.device) -> str:
    """The layers whose scheme was measured to be slower than BF16 on `device`; "" for none, or if nothing is known.
    `schemes` counts the layers of each. Other GPUs than Hopper's were not measured; a CPU emulates every scheme.
    """
    found = {scheme: _slower(measured_speeds(), scheme) for scheme in schemes} if _is_measured(device) else {}
    slower = {scheme: figures for scheme, figures in found.items() if figures}
    notes = [f"{plural(schemes[each], 'layer')} of the scheme {each.name} ({slower[each]})" for each in slower]
    if not notes:
        return ""
    return (
        f"these layers are slower than BF16 on this GPU: {'; '.join(notes)}, as measured with the layers of "
        "Llama-3-8B. docs/performance.md has the speed of each scheme"
    )


def slower_experts_note(scheme: Scheme, sizes: tuple[int, int], device: torch.device) -> str:
    """That experts of `scheme` were measured to be slower than BF16 on `device`; "" if not, or if nothing is known.

    `sizes` are [N, K] of a gate and up matrix. The measured layer whose matrices are the most alike in size counts.
    """
    shape, speeds = experts_like(math.prod(sizes) / 2)
    figures = _slower(speeds, scheme) if _is_measured(device) else ""
    if not figures:
        return ""
    return (
        f"experts of the scheme {scheme.name} are slower than BF16 on this GPU: {figures}, as measured with "
        f"{shape['experts']} experts of {shape['width']:,} x {shape['mlp_width']:,}. Pack experts by channel instead"
    )


def speeds_note(schemes: Iterable[str]) -> str:
    """The speed over BF16 of the linear layers by each of `schemes`, for one token and for a long prompt, in words."""
    speeds = measured_speeds()
    few, many = speeds[min(speeds)], speeds[max(speeds)]
    known = [f"{name} {few[name]:.2f}x and {many[name]:.2f}x" for name in schemes if name in few and name in many]
    tokens = f"{plural(min(speeds), 'token')} and at {plural(max(speeds), 'token')}"
    where = f"BF16's speed at {tokens} (Llama-3-8B's layers, H200)"
    return f"{', '.join(known)} of {where}" if known else ""


def _is_measured(device: torch.device) -> bool:
    return device.type == "cuda" and any(part in torch.cuda.get_device_name(device) for part in SAME_CHIP)


def _slower(speeds: Mapping[int, Mapping[str, float]], scheme: Scheme) -> str:
    """The speeds of a scheme below that of BF16, in words."""
    found = {tokens: of_tokens[scheme.name] for tokens, of_tokens in speeds.items() if scheme.name in of_tokens}
    return ", ".join(f"{speed:.2f}x at {plural(tokens, 'token')}" for tokens, speed in found.items() if speed < 1)


def experts_like(size: float) -> tuple[Mapping[str, int], Mapping[int, Mapping[str, float]]]:
    """The measured layer of experts whose matrices are the nearest to `size` elements: its sizes, and its speed over
    BF16 by the number of tokens and the scheme."""
    layers = ((layer["shape"], layer["speeds"]) for layer in _read("expert_speeds.json")["layers"])
    return min(layers, key=lambda each: abs(math.log(size / (each[0]["width"] * each[0]["mlp_width"]))))


def measured_speeds() -> Mapping[int, Mapping[str, float]]:
    """The speed over BF16 by the number of tokens and the name of the scheme."""
    return _read("scheme_speeds.json")["speeds"]


def fp8_speed(passes: str, tokens: int) -> float:
    """The speed of attention in FP8 over BF16 for texts of so many tokens.

    `passes` are forward, forward and backward, or forward from an FP8 KV cache.
    """
    return interpolate_along(_read("attention_speeds.json")["speeds"][passes], tokens)
