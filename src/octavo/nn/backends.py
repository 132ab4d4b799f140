"""What each of a recipe's three GEMMs runs on, here: the same decision that the GEMM's door takes when it is called."""

from __future__ import annotations

import torch

from octavo.ops import Backend, find_backend
from octavo.recipe import Recipe


def gemm_backends(recipe: Recipe, device: torch.device) -> dict[str, Backend]:
    """The backend of y, dx and dw on `device`; "bf16" (the autocast dtype, or the input's) where there is no cast."""
    backends = {}
    for name, first, second in (("y", "x", "w"), ("dx", "dy", "w"), ("dw", "dy", "x")):
        gemm = getattr(recipe, name)
        if not gemm.quantized:
            backends[name] = Backend("bf16", "no cast: the autocast dtype")
            continue
        a, b = getattr(gemm, first), getattr(gemm, second)
        backends[name] = find_backend(device, a.granularity, b.granularity, (a.format, b.format))
    return backends
