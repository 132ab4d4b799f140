"""What a learner wants to see of a mixed-precision run: which dtype everything has, and how large the weights are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def observed_dtypes(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, str]:
    """The dtype of every leaf module's output during `forward()`, and of its loss.

    Layers of a stack are one entry, their index written *; where they differ the entry names each dtype.
    """
    seen: dict[str, set[str]] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(key, set()).add(str(output.dtype).removeprefix("torch."))

        return hook

    leaves = [(name, m) for name, m in model.named_modules() if name and next(m.parameters(False), None) is not None]
    handles = [module.register_forward_hook(note(name)) for name, module in leaves]
    try:
        loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    return {name: " ".join(sorted(dtypes)) for name, dtypes in seen.items()} | {
        "loss": str(loss.dtype).removeprefix("torch.")
    }


@torch.no_grad()
def weight_ranges(model: nn.Module) -> dict[str, tuple[float, float]]:
    """(smallest, largest) element of every parameter, read from the device in one transfer."""
    names = [name for name, _ in model.named_parameters()]
    extremes = torch.stack([torch.stack(p.aminmax()).float() for p in model.parameters()])
    return {name: (low, high) for name, (low, high) in zip(names, extremes.tolist(), strict=True)}
