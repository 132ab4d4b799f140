"""The backends of the three GEMMs of a recipe: the same decision that a scaled GEMM makes when it is called.

Each function takes a device, or the architecture of a GPU that need not be here.
"""

from pathlib import Path

from octavo.numerics.cast import Cast
from octavo.ops import Backend, find_backend, find_grouped_backend
from octavo.ops.gemm import backend_on
from octavo.ops.gpu_architecture import GpuArchitecture, Place, find_architecture, takes_fnuz
from octavo.recipe import PRESETS, Recipe, fnuz, get_recipe, rowwise, tensorwise


def gemm_backends(recipe: Recipe, place: Place) -> dict[str, Backend]:
    """The backends of y, dx and dw; "bf16" for a GEMM without casts, which runs in the autocast dtype."""
    backends = {}
    for name, gemm in (("y", recipe.y), ("dx", recipe.dx), ("dw", recipe.dw)):
        if gemm is None:
            backends[name] = Backend("bf16", "the recipe casts nothing here: the GEMM runs in the autocast dtype")
        else:
            backends[name] = product_backend(gemm.a, gemm.b, place)
    return backends


def grouped_backends(recipe: Recipe, place: Place) -> dict[str, Backend]:
    """The backends of the grouped GEMMs y, dx and dw of experts; none for a recipe that has no grouped GEMMs."""
    if recipe.fusable is None:
        return {}
    gemms = {"y": recipe.fusable.y, "dx": recipe.fusable.dx, "dw": recipe.fusable.dw}
    return {name: find_grouped_backend(place, (gemm.a.format, gemm.b.format)) for name, gemm in gemms.items()}


def product_backend(a: Cast, b: Cast, place: Place) -> Backend:
    """The backend of a product of operands that are cast by `a` and `b`."""
    formats, e8m0 = (a.format, b.format), (a.scale == "e8m0", b.scale == "e8m0")
    if isinstance(place, GpuArchitecture):
        return backend_on(place, a.granularity, b.granularity, formats, e8m0=e8m0)
    return find_backend(place, a.granularity, b.granularity, formats, e8m0=e8m0)


def choose_recipe(recipe: str | Path | Recipe, place: Place) -> Recipe:
    """The recipe of a name, of a file, or `pick_recipe` for "auto". A preset on an MI300 gets that GPU's formats.

    Raises:
        ValueError: no such recipe; or "auto" on a GPU without FP8 GEMMs.
        TypeError: neither a name nor a path nor a `Recipe`.
    """
    if recipe == "auto":
        return pick_recipe(place)
    found = get_recipe(recipe)
    return in_formats_of(place, found) if isinstance(recipe, str) and recipe in PRESETS else found


def in_formats_of(place: Place, recipe: Recipe) -> Recipe:
    """A preset in the eight-bit formats of a GPU: FNUZ on an MI300."""
    return fnuz(recipe) if recipe.quantized and takes_fnuz(place) else recipe


def find_fix(recipe: Recipe, place: Place) -> str:
    """The change after which a recipe runs in FP8 at `place`; "" if it runs, or if no recipe does."""
    if _runs(recipe, place):
        return ""
    try:
        best = pick_recipe(place)
    except ValueError:
        return ""
    if takes_fnuz(place) and not _has_fnuz(recipe) and _runs(fnuz(recipe), place):
        return "write the formats e4m3fnuz and e5m2fnuz in the recipe's file, in place of e4m3 and e5m2"
    if _has_fnuz(recipe) and not takes_fnuz(place):
        return "write the formats e4m3 and e5m2 in the recipe's file, in place of e4m3fnuz and e5m2fnuz"
    return f"take the recipe {best.name.removesuffix('_fnuz')}"


def pick_recipe(place: Place) -> Recipe:
    """`rowwise` if the GPU has its GEMMs, else `tensorwise`; on an MI300 in FNUZ formats.

    Raises:
        ValueError: a GPU that has the GEMMs of neither.
    """
    for recipe in (in_formats_of(place, rowwise()), in_formats_of(place, tensorwise())):
        if _runs(recipe, place):
            return recipe
    gpu = place if isinstance(place, GpuArchitecture) else find_architecture(place)
    raise ValueError(
        f"{gpu.name} has no FP8 GEMM: FP8 needs an Ada, Hopper or Blackwell GPU of NVIDIA, or an "
        "MI300 or MI350 of AMD; train in BF16 here"
    )


def _runs(recipe: Recipe, place: Place) -> bool:
    return all(backend.name != "none" for backend in gemm_backends(recipe, place).values())


def _has_fnuz(recipe: Recipe) -> bool:
    casts = [cast for gemm in (recipe.y, recipe.dx, recipe.dw) if gemm is not None for cast in (gemm.a, gemm.b)]
    return any(cast.format.endswith("fnuz") for cast in casts)
