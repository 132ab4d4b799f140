"""The tables of docs/gpus.md: the GEMM of each recipe and packing scheme on each GPU. They hold no measurements."""

import json
from collections.abc import Callable, Iterator
from importlib.resources import files

from bench.report.tables import Result, Row
from octavo.artifact.packed.scheme import SCHEMES, Scheme
from octavo.nn.backends import gemm_backends, grouped_backends, in_formats_of
from octavo.ops import Backend
from octavo.ops.gpu_architecture import ARCHITECTURES, GpuArchitecture
from octavo.recipe import PRESETS, Recipe, rowwise
from octavo.runtime.fnuz import scheme_on
from octavo.runtime.gemm_path import find_gemm

Backends = Callable[[Recipe, GpuArchitecture], dict[str, Backend]]
SHOWN = [ARCHITECTURES[key] for key in ("ampere", "ada", "hopper", "blackwell", "rtx_blackwell", "mi300", "mi350")]


def recipes_by_gpu(_: dict[str, Result]) -> Iterator[Row]:
    for preset in PRESETS.values():
        if (recipe := preset()).quantized:
            yield {"recipe": f"`{recipe.name}`", **{gpu.name: _recipe_on(gpu, recipe) for gpu in SHOWN}}
    for gradients in ("e4m3", "e5m2"):
        experts = {gpu.name: _recipe_on(gpu, rowwise(gradients), grouped_backends) for gpu in SHOWN}
        yield {"recipe": f"stacks of experts, by `rowwise`, {gradients} gradients", **experts}


def _recipe_on(gpu: GpuArchitecture, recipe: Recipe, find: Backends = gemm_backends) -> str:
    backends = find(in_formats_of(gpu, recipe), gpu).values()
    names = list(dict.fromkeys(backend.name for backend in backends))
    return "none" if "none" in names else ", ".join(names)


def schemes_by_gpu(_: dict[str, Result]) -> Iterator[Row]:
    for scheme in SCHEMES.values():
        yield {"scheme": f"`{scheme.name}`", **{gpu.name: _scheme_on(gpu, scheme) for gpu in SHOWN}}


def _scheme_on(gpu: GpuArchitecture, scheme: Scheme) -> str:
    cast, backend = find_gemm(scheme_on(scheme, gpu), gpu)
    return backend.name if cast else f"weight-only, {backend.name}"


def sources_of_dispatch(_: dict[str, Result]) -> str:
    record = json.loads((files("octavo.ops.gemm") / "dispatch.json").read_text())
    return "\n".join(f"- {source}" for source in record["sources"].values())
