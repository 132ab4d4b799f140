"""Does FP8 pay for a layer on this GPU? From a table measured here, else one that is shipped, else from timing it now.

The table of a GPU is measured by `octavo doctor --measure` and kept in $OCTAVO_CACHE, or octavo/ in the user's cache
folder, under the names of the GPU and the versions of torch and Octavo: another of any of these is another table.
Where there is none, H100 and H200 use the one shipped; other GPUs, and recipes that it does not hold, have the model's
own layers timed when `convert` asks, which are kept as well.

A gain counts from LEAST_GAIN on: layers predicted at 1.03x and 1.05x made a GPT 0.5 % slower. Sizes beyond the grid are
judged as its edge. What is compared is the GPU's work (`octavo.nn.speedup.measure`). The host takes longer to launch it
in FP8, which counts only where the GPU waits for the host: in a model of little work (`hides_launching`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import torch

from octavo.nn.speedup.measure import METHOD, time_linears
from octavo.nn.speedup.table import Machine, Measurement, Shape, Table
from octavo.ops import Backend
from octavo.progress import Progress
from octavo.recipe import PRESETS, Recipe
from octavo.version import __version__

LEAST_GAIN = 1.05
LAUNCH_FLOPS = 0.35e12  # BF16 operations of an H100 in the half millisecond in which a host launches an FP8 layer
GRID_TOKENS = (512, 2048, 8192, 32768)
GRID_WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SHIPPED = {"H100": "gains_h100.json", "H200": "gains_h100.json"}  # by a part of the GPU's name


@dataclass(frozen=True)
class Gains:
    """The predicted gain at each (M, K, N), and where it is known from: or no gains, and why FP8 is never faster."""

    by_shape: Mapping[Shape, float]
    source: str


def find_gains(recipe: Recipe, backends: Mapping[str, Backend], device: torch.device, shapes: set[Shape]) -> Gains:
    """What `recipe` gains over BF16 on `device`, whose GEMMs run on `backends`, for each (M, K, N) of `shapes`.

    Shapes of which no table tells are timed and kept. Under `torchrun` each rank decides for itself: so that all decide
    alike, measure beforehand (`octavo doctor --measure`).

    Raises:
        ValueError: a size below one, or a cached table that cannot be read.
        RuntimeError: no memory is left to time a layer.
    """
    if any(size < 1 for shape in shapes for size in shape):
        raise ValueError(f"tokens, and the sizes of a layer, must be at least 1, got (M, K, N) {min(shapes)}")
    if reason := never_faster(recipe, backends, device):
        return Gains({}, reason)
    machine, key = this_machine(device), table_key(recipe)
    by_shape: dict[Shape, float] = {}
    sources = []
    for source, table in known_tables(machine):
        found = {shape: table.predict(key, shape) for shape in shapes - by_shape.keys()}
        if told := {shape: gain for shape, gain in found.items() if gain is not None}:
            by_shape |= told
            sources.append(source)
    if missing := sorted(shapes - by_shape.keys()):
        rows = measure(recipe, missing, device)
        by_shape |= {row.shape: row.gain for row in rows}
        sources.append(f"measured now, {keep_shapes(machine, rows)}")
    return Gains(by_shape, f"from {LEAST_GAIN:.2f}x on, {'; '.join(sources)}")


def hides_launching(shapes: Sequence[Shape]) -> bool:
    """Whether layers of these (M, K, N), compiled, keep the GPU busy for as long as the host takes to launch them in
    FP8: half a millisecond each, and as much for the model (bench/gpu/layer.py, on the host of an H100)."""
    return 6 * sum(m * k * n for m, k, n in shapes) >= LAUNCH_FLOPS * (len(shapes) + 1)


def never_faster(recipe: Recipe, backends: Mapping[str, Backend], device: torch.device) -> str:
    """Why `recipe` cannot be faster than BF16 on `device`, or nothing: then it has to be measured."""
    names = {backend.name for backend in backends.values()}
    if names == {"bf16"}:
        return f"{recipe.name} quantizes nothing: it is BF16"
    if "emulated" in names:
        return f"{device.type} emulates FP8, which is never faster than BF16"
    for gemm, backend in backends.items():
        if backend.name == "none":
            return f"{gemm} has no FP8 GEMM here ({backend.reason}), and emulation is never faster than BF16"
    return ""


def this_machine(device: torch.device) -> Machine:
    """What times on the GPU `device` depend on."""
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        gpu=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        cuda=torch.version.cuda or f"HIP {torch.version.hip}",
        torch=str(torch.__version__),
        octavo=__version__,
    )


def table_key(recipe: Recipe) -> str:
    """What a table calls `recipe`: a preset's name; with a digest where it is another recipe, of whatever name."""
    recipe = replace(recipe, emulate=False)
    if recipe.name in PRESETS and recipe == PRESETS[recipe.name]():
        return recipe.name
    return f"{recipe.name}-{hashlib.sha256(recipe.to_json().encode()).hexdigest()[:8]}"


def known_tables(machine: Machine) -> list[tuple[str, Table]]:
    """The tables that tell of `machine`, the better one first, each with what a report calls it."""
    tables = []
    path = cache_path(machine)
    if path.exists():
        tables.append((f"measured on this GPU ({path})", read_table(path)))
    for part, name in SHIPPED.items():
        if part in machine.gpu:
            table = Table.from_json((files("octavo.nn.speedup") / name).read_text())
            tables.append((f"shipped for {part}, {table.machine.gpu}: {table.method}", table))
            break
    return tables


def cache_path(machine: Machine) -> Path:
    """Where the table of `machine` is kept: in $OCTAVO_CACHE, $XDG_CACHE_HOME/octavo or ~/.cache/octavo."""
    if own := os.environ.get("OCTAVO_CACHE"):
        folder = Path(own)
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
    return folder / f"gains-{_slug(machine.gpu)}-{_slug(machine.torch)}-{_slug(machine.octavo)}.json"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def read_table(path: Path) -> Table:
    """The table in the file `path`; a ValueError that names the file where it is none."""
    try:
        return Table.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} must be a table of gains, and cannot be read ({error}): delete it, or measure anew with "
            "`octavo doctor --measure`"
        ) from error


def write_table(path: Path, table: Table) -> None:
    """Write `table` whole or not at all, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_text(table.to_json())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def measure(
    recipe: Recipe, shapes: Sequence[Shape], device: torch.device, done: Callable[[], None] = lambda: None
) -> list[Measurement]:
    """Time each (M, K, N) of `shapes` both ways; `done` is called after each."""
    try:
        times = time_linears(recipe, shapes, device, done)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"{device} has no memory left to time linear layers of (M, K, N) up to {max(shapes)}: run "
            "`octavo doctor --measure` once while nothing else is on it, or convert with fewer tokens"
        ) from error
    key = table_key(recipe)
    return [
        Measurement(key, *shape, round(bf16_ms, 5), round(fp8_ms, 5))
        for shape, (bf16_ms, fp8_ms) in zip(shapes, times, strict=True)
    ]


def keep_shapes(machine: Machine, rows: Sequence[Measurement]) -> str:
    """Add single layers to the cached table; what came of it. A cache that cannot be written costs time, no result."""
    path = cache_path(machine)
    try:
        table = read_table(path) if path.exists() else Table(machine, METHOD)
        write_table(path, replace(table, shapes=(*table.shapes, *rows)))
    except OSError as error:
        return f"not kept: {error}"
    return f"kept in {path}"


def measure_grid(recipes: Sequence[Recipe], device: torch.device, progress: Progress) -> Table:
    """The table of the GPU `device`: every shape of its grid for each of `recipes`. Tells `progress` how many of how
    many are done."""
    shapes = grid_shapes(torch.cuda.mem_get_info(device)[0])
    count, total = itertools.count(1), len(recipes) * len(shapes)

    def done() -> None:
        progress(next(count), total, "timing")

    rows = [row for recipe in recipes for row in measure(recipe, shapes, device, done)]
    return Table(this_machine(device), METHOD, grid=tuple(rows))


def grid_shapes(free_bytes: int) -> list[Shape]:
    """Every (M, K, N) of the grid: K and N up to the widest layer that `free_bytes` of memory hold both ways."""
    tokens = max(GRID_TOKENS)
    # six bytes an element of x, y and w and of what is made of them; recipes without kernels make float32 copies
    widths = [width for width in GRID_WIDTHS if 16 * (2 * tokens * width + width * width) <= 0.75 * free_bytes]
    if not widths:
        needed = 16 * (2 * tokens + GRID_WIDTHS[0]) * GRID_WIDTHS[0] / 0.75
        raise RuntimeError(
            f"measuring needs {needed / 1e9:.1f} GB of free GPU memory, {free_bytes / 1e9:.1f} GB are: "
            "end what else runs on this GPU"
        )
    return [(m, k, n) for k in widths for n in widths for m in GRID_TOKENS]
