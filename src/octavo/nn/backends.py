"""The backends of the three GEMMs of a recipe: the same decision that a scaled GEMM makes when it is called."""

import torch

from octavo.ops import Backend, find_backend
from octavo.ops.gpu_architecture import find_architecture
from octavo.recipe import Recipe, fnuz, rowwise, tensorwise


def gemm_backends(recipe: Recipe, device: torch.device) -> dict[str, Backend]:
    """The backends of y, dx and dw on `device`; "bf16" for a GEMM without casts, which runs in the autocast dtype."""
    backends = {}
    for name, gemm in (("y", recipe.y), ("dx", recipe.dx), ("dw", recipe.dw)):
        if gemm is None:
            backends[name] = Backend("bf16", "the recipe casts nothing here: the GEMM runs in the autocast dtype")
        else:
            a, b = gemm.a, gemm.b
            e8m0 = a.scale == "e8m0", b.scale == "e8m0"
            backends[name] = find_backend(device, a.granularity, b.granularity, (a.format, b.format), e8m0=e8m0)
    return backends


def pick_recipe(device: torch.device) -> Recipe:
    """`rowwise` if `device` has its GEMMs, else `tensorwise`; on an MI300 in FNUZ formats.

    Raises:
        ValueError: a GPU that has the GEMMs of neither.
    """
    recipes = [rowwise(), tensorwise(), fnuz(rowwise()), fnuz(tensorwise())]
    for recipe in recipes:
        backends = gemm_backends(recipe, device)
        if all(backend.name != "none" for backend in backends.values()):
            return recipe
    raise ValueError(
        f"{find_architecture(device).name} has no FP8 GEMM: FP8 needs an Ada, Hopper or Blackwell GPU of NVIDIA, or an "
        "MI300 or MI350 of AMD; train in BF16 here"
    )
