"""The GEMMs that a recipe runs on the GPU of a plan, by the table that decides on a machine too."""

from octavo.nn.backends import gemm_backends, grouped_backends, in_formats_of
from octavo.ops import Backend
from octavo.ops.gpu_architecture import ARCHITECTURES
from octavo.plan.hardware import Gpu
from octavo.recipe import Recipe, get_recipe


def chosen_recipe(recipe: str | Recipe, gpu: Gpu) -> Recipe:
    """The recipe of a setting; "auto" is `rowwise` where the GPU has FP8 GEMMs, else `bf16`."""
    return get_recipe(("rowwise" if gpu.fp8 else "bf16") if recipe == "auto" else recipe)


def find_gemms(recipe: Recipe, gpu: Gpu) -> dict[str, Backend]:
    """The backends of y, dx and dw of `recipe`, in the eight-bit formats of `gpu`."""
    architecture = ARCHITECTURES[gpu.architecture]
    return gemm_backends(in_formats_of(architecture, recipe), architecture)


def has_grouped_gemms(recipe: Recipe, gpu: Gpu) -> bool:
    """Whether experts run in FP8 by `recipe` on `gpu`."""
    architecture = ARCHITECTURES[gpu.architecture]
    found = grouped_backends(in_formats_of(architecture, recipe), architecture)
    return bool(found) and all(backend.name != "none" for backend in found.values())


def check_gemms(recipe: Recipe, gpu: Gpu) -> None:
    """Raise a ValueError if `gpu` lacks a GEMM of `recipe`."""
    if recipe.quantized and gpu.fp8 is None:
        raise ValueError(f"{gpu.name} has no FP8 GEMMs, which the recipe {recipe.name} needs: give --recipe bf16")
    for gemm, backend in find_gemms(recipe, gpu).items():
        if backend.name == "none":
            raise ValueError(
                f"{gpu.name} has no GEMM for {gemm} of the recipe {recipe.name} ({backend.reason}): give "
                "--recipe rowwise, or another of those that `octavo doctor --gpu` shows for it"
            )
