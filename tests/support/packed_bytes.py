"""The model that the bytes of a packed folder describe, in float32 and without rounding of inputs."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import open_theirs


@torch.no_grad()
def dequantized(model: Path, packed: Path) -> Any:
    """transformers' `model` in float32, with weight * scale of the folder `packed` in place of each packed weight; in
    the layout compressed-tensors, by a scheme with one scale for each output channel or tensor."""
    theirs, stored = open_theirs(model, torch.float32), load_file(packed / "model.safetensors")
    for name, scale in stored.items():
        if name.endswith(".weight_scale"):
            weight = stored[name.removesuffix("_scale")].float() * scale.float()
            theirs.get_submodule(name.removesuffix(".weight_scale")).weight.copy_(weight)
    return theirs
