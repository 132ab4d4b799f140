"""The tables of docs/gpus.md: the GEMM of each recipe and packing scheme on each GPU. They hold no measurements."""

import json
from collections.abc import Callable, Iterator
from importlib.resources import files

from bench.report.filler import Row
from octavo.checkpoint.scheme import SCHEMES, Scheme, find_gemm, scheme_on
from octavo.ops import Backend
from octavo.ops.dispatch import gemm_backends, grouped_backends, in_formats_of
from octavo.ops.launching import ARCHITECTURES, GpuArchitecture
from octavo.recipe import PRESETS, Recipe, rowwise

SHOWN = [ARCHITECTURES[key] for key in ("ampere", "ada", "hopper", "blackwell", "rtx_blackwell", "mi300", "mi350")]


def recipes_by_gpu() -> Iterator[Row]:
    presets = [preset() for preset in PRESETS.values()]
    rows = [(f"`{recipe.name}`", recipe, gemm_backends) for recipe in presets if recipe.quantized]
    for gradients in ("e4m3", "e5m2"):
        name = f"stacks of experts, by `rowwise`, {gradients} gradients"
        rows.append((name, rowwise(gradients), grouped_backends))
    yield from (
        {"recipe": name, "gpu": gpu.name, "gemm": recipe_on(gpu, recipe, find)}
        for name, recipe, find in rows
        for gpu in SHOWN
    )


def recipe_on(
    gpu: GpuArchitecture, recipe: Recipe, find: Callable[[Recipe, GpuArchitecture], dict[str, Backend]]
) -> str:
    backends = find(in_formats_of(gpu, recipe), gpu).values()
    names = list(dict.fromkeys(backend.name for backend in backends))
    return "none" if "none" in names else ", ".join(names)


def schemes_by_gpu() -> Iterator[Row]:
    for scheme in SCHEMES.values():
        yield from ({"scheme": scheme.name, "gpu": gpu.name, "gemm": scheme_gemm(gpu, scheme)} for gpu in SHOWN)


def scheme_gemm(gpu: GpuArchitecture, scheme: Scheme) -> str:
    cast, backend = find_gemm(scheme_on(scheme, gpu), gpu)
    return backend.name if cast else f"weight-only, {backend.name}"


def sources_of_dispatch() -> str:
    record = json.loads((files("octavo.ops") / "dispatch.json").read_text())
    return "\n".join(f"- {source}" for source in record["sources"].values())
