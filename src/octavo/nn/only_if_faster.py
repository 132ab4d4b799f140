"""The layers that FP8 would not speed up, for `convert(..., only_if_faster=True)`."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from octavo.checkpoint.files import replace_file
from octavo.nn.conversion_report import ForwardPass, Row
from octavo.nn.delayed import update_scales
from octavo.nn.fused_modules import FusedModule
from octavo.nn.linear import Linear, RecipeLayer
from octavo.ops import Backend
from octavo.ops.launching import recording_stream
from octavo.rates.measured import LEAST_SPEEDUP, Machine, Measurement, Shape, Table
from octavo.recipe import PRESETS, Recipe
from octavo.util import Progress, reading
from octavo.version import __version__


def gemm_shapes(model: nn.Module, rows: Sequence[Row], recipe: Recipe, tokens: Mapping[str, int]) -> dict[str, Shape]:
    """(M, K, N) of the GEMM that each converted layer runs in. Fused layers run as one GEMM: N is their sum.

    `tokens` has M for each of `rows` by name. Layers of which it is 0 are left out, unless it is 0 for all.
    """
    some = any(tokens.values())
    converted = {row.name: row for row in rows if not row.reason and (tokens[row.name] or not some)}
    shapes = {name: (tokens[name], row.shape[1], row.shape[0]) for name, row in converted.items()}
    layers = {id(module): name for name, module in model.named_modules() if name in converted}
    for module in model.modules() if recipe.fusable else ():
        if isinstance(module, FusedModule):
            stack = [converted[layers[id(layer)]] for layer in module.inner if id(layer) in layers]
            if len(stack) == len(module.inner):
                width = sum(row.shape[0] for row in stack)
                shapes.update({row.name: (tokens[row.name], row.shape[1], width) for row in stack})
    return shapes


def skip_uncalled(model: nn.Module, rows: Sequence[Row], forward: ForwardPass) -> tuple[Row, ...]:
    """Give linear layers whose weight the pass reads without calling them a reason to be skipped."""

    def judge(row: Row) -> Row:
        layer = model.get_submodule(row.name)
        never = row.name not in forward.called and not isinstance(layer, RecipeLayer)
        read = never and any(forward.rows_of(weight) for weight in layer.parameters(recurse=False))
        return replace(row, reason="the model reads its weight without calling it") if read and not row.reason else row

    return tuple(map(judge, rows))


def skip_slower(rows: Sequence[Row], shapes: Mapping[str, Shape], speedups: Speedups) -> tuple[Row, ...]:
    """Add the predicted speedups to the rows, and give the layers that FP8 would not speed up a reason to be skipped.

    If the layers that remain are too little work to keep the GPU busy while FP8 is launched, all are skipped.
    """

    def judge(row: Row) -> Row:
        if row.reason:
            return row
        if row.name not in shapes:
            return replace(row, reason="the batch does not reach it: left in BF16")
        speedup = speedups.by_shape.get(shapes[row.name])
        if speedup is None:
            return replace(row, reason=speedups.source)
        return replace(row, speedup=speedup, reason="" if speedup >= LEAST_SPEEDUP else f"{speedup:.2f}x: left in BF16")

    judged = tuple(map(judge, rows))
    remaining = [(shapes[row.name][0], row.shape[1], row.shape[0]) for row in judged if not row.reason]
    if hides_launching(remaining):
        return judged
    reason = "so little work that the GPU would wait for the host: left in BF16"
    return tuple(row if row.reason else replace(row, reason=reason) for row in judged)


# ---- The speedup of FP8 for a layer on this GPU: from a table measured here, from a shipped one, or by timing it now.
#
# `octavo doctor --measure-layers` measures the table of a GPU. It is stored in $OCTAVO_CACHE, or octavo/ in the user's
# cache folder, in a file named after the GPU and the versions of torch and Octavo. Without it, H100 and H200 use the
# shipped table. On other GPUs, and for recipes that the table does not have, `convert` times the model's own layers and
# stores the result too.
#
# A layer is converted from LEAST_SPEEDUP on: layers predicted at 1.03x and 1.05x made a GPT 0.5 % slower. Sizes beyond
# the grid get the speedup of its edge. The times compared are those of the GPU. The host needs longer to launch FP8,
# which counts only in a model of little work, where the GPU waits for the host (`hides_launching`).


LAUNCH_FLOPS = 0.25e12  # BF16 operations of an H100 in the third of a millisecond in which a host launches an FP8 layer
GRID_TOKENS = (512, 2048, 8192, 32768)
GRID_WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SHIPPED = {"H100": "h100.json", "H200": "h100.json"}  # by a part of the GPU's name


@dataclass(frozen=True)
class Speedups:
    """The predicted speedup at each (M, K, N), and where it comes from; or none, and why FP8 is never faster."""

    by_shape: Mapping[Shape, float]
    source: str


def find_speedups(recipe: Recipe, backends: dict[str, Backend], device: torch.device, shapes: set[Shape]) -> Speedups:
    """The speedup of `recipe` over BF16 on `device`, whose GEMMs run on `backends`, for each (M, K, N) of `shapes`.

    Shapes that no table has are timed now, and the times are stored. Under `torchrun` each rank decides for itself. For
    all ranks to decide alike, measure the table before (`octavo doctor --measure-layers`).
    """
    if any(size < 1 for shape in shapes for size in shape):
        raise ValueError(f"tokens, and the sizes of a layer, must be at least 1, got (M, K, N) {min(shapes)}")
    if reason := never_faster(recipe, backends, device):
        return Speedups({}, reason)
    machine, key = this_machine(device), table_key(recipe)
    by_shape: dict[Shape, float] = {}
    sources = []
    for source, table in known_tables(machine):
        predictions = {shape: table.predict(key, shape) for shape in shapes - by_shape.keys()}
        if known := {shape: speedup for shape, speedup in predictions.items() if speedup is not None}:
            by_shape |= known
            sources.append(source)
    if missing := sorted(shapes - by_shape.keys()):
        rows = measure_shapes(recipe, missing, device)
        by_shape |= {row.shape: row.speedup for row in rows}
        sources.append(f"measured now, {store_shapes(machine, rows)}")
    return Speedups(by_shape, f"from {LEAST_SPEEDUP:.2f}x on, {'; '.join(sources)}")


def hides_launching(shapes: Sequence[Shape]) -> bool:
    """True if compiled layers of these (M, K, N) keep the GPU busy for as long as the host needs to launch them in FP8.

    The host needs a third of a millisecond for each, and two thirds for the model. Steps of one small layer take
    0.83 ms in BF16 and 1.01 ms in FP8 (bench/gpu/layer.py, on an H200).
    """
    return 6 * sum(m * k * n for m, k, n in shapes) >= LAUNCH_FLOPS * (len(shapes) + 2)


def never_faster(recipe: Recipe, backends: Mapping[str, Backend], device: torch.device) -> str:
    """Why `recipe` cannot be faster than BF16 on `device`; "" where only a measurement can tell."""
    names = {backend.name for backend in backends.values()}
    if names == {"bf16"}:
        return f"{recipe.name} quantizes nothing: it is BF16"
    if "emulated" in names:
        return f"{device.type} emulates FP8, which is never faster than BF16"
    for gemm, backend in backends.items():
        if backend.name == "dequantized":
            return f"{gemm} runs in BF16 on widened operands ({backend.reason}), which is never faster than BF16"
        if backend.name == "none":
            return f"{gemm} has no FP8 GEMM here ({backend.reason}), and emulation is never faster than BF16"
    return ""


def this_machine(device: torch.device) -> Machine:
    """The GPU `device` and the versions of the software: the times depend on all of these."""
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        gpu=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        cuda=torch.version.cuda or f"HIP {torch.version.hip}",
        torch=str(torch.__version__),
        octavo=__version__,
    )


def table_key(recipe: Recipe) -> str:
    """The name of `recipe` in a table: a preset's name; other recipes have a digest after theirs."""
    recipe = replace(recipe, emulate=False)
    if recipe.name in PRESETS and recipe == PRESETS[recipe.name]():
        return recipe.name
    return f"{recipe.name}-{hashlib.sha256(recipe.to_json().encode()).hexdigest()[:8]}"


def known_tables(machine: Machine) -> list[tuple[str, Table]]:
    """The tables for `machine`, the better one first, each after its description for reports."""
    tables = []
    path = cache_path(machine)
    if path.exists():
        tables.append((f"measured on this GPU ({path})", read_table(path)))
    for part, name in SHIPPED.items():
        if part in machine.gpu:
            table = Table.from_json((files("octavo.rates") / name).read_text())
            tables.append((f"shipped for {part}, {table.machine.gpu}: {table.method}", table))
    return tables


def cache_path(machine: Machine) -> Path:
    """The file of the table of `machine`, in $OCTAVO_CACHE, $XDG_CACHE_HOME/octavo or ~/.cache/octavo."""
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
    words = (machine.gpu, machine.torch, machine.octavo)
    slugs = (re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") for text in words)
    return Path(os.environ.get("OCTAVO_CACHE") or shared) / f"speedups-{'-'.join(slugs)}.json"


def read_table(path: Path) -> Table:
    """The table in the file `path`. A ValueError names the file if it does not hold one."""
    with reading(path, "a table of speedups: move it elsewhere, or measure anew with octavo doctor --measure-layers"):
        return Table.from_json(path.read_text())


def write_table(path: Path, table: Table) -> None:
    """Write `table` whole or not at all, and the folder of its file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, table.to_json())


def measure_shapes(
    recipe: Recipe, shapes: Sequence[Shape], device: torch.device, done: Callable[[], None] = lambda: None
) -> list[Measurement]:
    """Time each (M, K, N) of `shapes` in BF16 and by `recipe`. `done` is called after each."""
    try:
        times = time_linears(recipe, shapes, device, done)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"{device} has not enough memory to time linear layers of (M, K, N) up to {max(shapes)}: run "
            "`octavo doctor --measure-layers` once while nothing else uses it, or convert with fewer tokens"
        ) from error
    key, pairs = table_key(recipe), zip(shapes, times, strict=True)
    return [Measurement(key, *shape, round(bf16_ms, 5), round(fp8_ms, 5)) for shape, (bf16_ms, fp8_ms) in pairs]


def store_shapes(machine: Machine, rows: Sequence[Measurement]) -> str:
    """Add single layers to the cached table. Returns a note for reports; a disk that refuses is not an error."""
    path = cache_path(machine)
    try:
        table = read_table(path) if path.exists() else Table(machine, METHOD)
        write_table(path, replace(table, shapes=(*table.shapes, *rows)))
    except OSError as error:
        return f"not stored: {error}"
    return f"stored in {path}"


def measure_grid(recipes: Sequence[Recipe], device: torch.device, progress: Progress) -> Table:
    """The table of the GPU `device`: every shape of its grid for each of `recipes`."""
    shapes = grid_shapes(torch.cuda.mem_get_info(device)[0])
    count, total = itertools.count(1), len(recipes) * len(shapes)

    def done() -> None:
        progress(next(count), total, "timing")

    rows = [row for recipe in recipes for row in measure_shapes(recipe, shapes, device, done)]
    return Table(this_machine(device), METHOD, grid=tuple(rows))


def grid_shapes(free_bytes: int) -> list[Shape]:
    """Every (M, K, N) of the grid, with K and N up to the widest layer whose two versions fit into `free_bytes`."""
    tokens = max(GRID_TOKENS)
    # 16 bytes an element of x, y and w: gradients, bytes and, for recipes without kernels, float32 copies
    widths = [width for width in GRID_WIDTHS if 16 * (2 * tokens * width + width * width) <= 0.75 * free_bytes]
    if not widths:
        needed = 16 * (2 * tokens + GRID_WIDTHS[0]) * GRID_WIDTHS[0] / 0.75
        raise RuntimeError(
            f"measuring needs {needed / 1e9:.1f} GB of free GPU memory, {free_bytes / 1e9:.1f} GB are: "
            "end the other programs on this GPU"
        )
    return [(m, k, n) for k in widths for n in widths for m in GRID_TOKENS]


# ---- Time `octavo.nn.Linear` against `nn.Linear` on a GPU: compiled, in BF16, forward and backward pass.
#
# Both layers are the real ones. Their weight is an argument, so that one compilation with dynamic sizes serves every
# size. Each pass is replayed as a CUDA graph, so that only the GPU's work is timed. Launching is left out: a graph or
# the rest of a model hides it, and it takes longer with dynamic sizes. The two layers take turns; each turn lies
# between two CUDA events, and nothing waits for the GPU before the last turn. The result is the median turn.


METHOD = (
    "median milliseconds of a forward and backward pass of one linear layer without bias, compiled by torch.compile "
    "and replayed as a CUDA graph, random normal BF16 input, weight and output gradient"
)
WARM_UP = 2  # calls after compilation and before timing
TURNS = 7
TURN_MS = 3.0  # of a turn, so that the events and the switch to the other layer are negligible
COMPILATIONS = 64  # more than needed: the compiler specializes on equal sizes and on sizes of 1


def time_linears(
    recipe: Recipe, shapes: Sequence[Shape], device: torch.device, done: Callable[[], None]
) -> list[tuple[float, float]]:
    """Milliseconds of a forward and backward pass in BF16 and by `recipe`, for each (M, K, N) of `shapes`.

    Torch's random state is restored. `done` is called after each shape.
    """
    times = []
    with (
        torch.cuda.device(device),
        torch.random.fork_rng(devices=[device]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch._dynamo.config.patch(recompile_limit=COMPILATIONS),
    ):
        bf16 = nn.Linear(1, 1, bias=False, device=device)
        fp8 = Linear(1, 1, bias=False, recipe=recipe, device=device)
        forwards = [compiled(bf16), compiled(fp8)]
        for shape in shapes:
            times.append(_time(forwards, fp8, shape, device))
            done()
        torch.cuda.empty_cache()
    return times


def compiled(layer: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """y[M,N] of x[M,K] and w[N,K] by the forward pass of `layer`, compiled for any sizes."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return functional_call(layer, {"weight": w}, (x,))

    # The compiler stores and counts compilations by code object: with a copy of it, each layer has its own.
    own = FunctionType(forward.__code__.replace(), globals(), closure=forward.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True)


def _time(
    forwards: Sequence[Callable[[Tensor, Tensor], Tensor]], fp8: Linear, shape: Shape, device: torch.device
) -> tuple[float, float]:
    m, k, n = shape
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, w, dy = normal(m, k, requires_grad=True), normal(n, k, requires_grad=True), normal(m, n)
    calls = [partial(_pass, forward, x, w, dy) for forward in forwards]
    for call in calls:
        call()
    update_scales(fp8)  # delayed scaling uses its history from the second step on
    for call in calls * WARM_UP:
        call()
    bf16_ms, fp8_ms = interleaved_medians([_recorded(call) for call in calls])
    torch.cuda.empty_cache()  # the memory of the graphs
    return bf16_ms, fp8_ms


def _recorded(call: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=recording_stream(torch.cuda.current_device())):
        call()
    return graph.replay


def _pass(forward: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, dy: Tensor) -> None:
    torch.autograd.grad(forward(x, w), (x, w), dy)


def interleaved_medians(calls: Sequence[Callable[[], None]]) -> list[float]:
    """The median milliseconds of each of `calls`, which take turns on the current stream."""
    repeats = [max(1, round(TURN_MS / _turns([call], [1], 2)[0][-1])) for call in calls]
    return [statistics.median(ms) for ms in _turns(calls, repeats, TURNS)]


def _turns(calls: Sequence[Callable[[], None]], repeats: Sequence[int], turns: int) -> list[list[float]]:
    """For each call, the milliseconds of one of its `repeats` in each turn."""
    marks = [_mark()]
    for _ in range(turns):
        for call, count in zip(calls, repeats, strict=True):
            for _ in range(count):
                call()
            marks.append(_mark())
    torch.cuda.synchronize()
    spans = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    return [[ms / count for ms in spans[i :: len(calls)]] for i, count in enumerate(repeats)]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
