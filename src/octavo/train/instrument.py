"""Measurements of a mixed-precision run: the precision of each layer, all dtypes, and the range of the weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.nn.backends import gemm_backends
from octavo.nn.coverage import find_coverage
from octavo.nn.delayed import histories
from octavo.nn.expert_conversion import computed_stacks
from octavo.nn.linear import RecipeLayer
from octavo.nn.weight_cache import local_part


def precision_of(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The precision that the parameters of `model` are computed in, read from its modules, as JSON values.

    Returns:
        `recipes`: for each recipe the `layers` that run it, and the backend of their GEMMs `y`, `dx` and `dw` ("bf16":
        unquantized, in the autocast dtype). `fp8_share`: the share of the parameters, 0 to 1, that FP8 GEMMs read.
        `high_precision`: the shares of the other parameters by name (repeated layers are one entry, their index
        written *), of `embeddings`, and of `other` (norms, biases and other vectors).
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RecipeLayer)}
    recipes: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items():
        entry = recipes.setdefault(layer.recipe.name, _backends(layer, device) | {"layers": []})
        entry["layers"].append(name)
    computed = [name for name, layer in layers.items() if layer.recipe.quantized]
    coverage = find_coverage(model, [*computed, *computed_stacks(model)])
    rest = {left.name: left.share for left in coverage.left}
    high = rest | {"embeddings": coverage.embeddings, "other": coverage.other}
    return {
        "recipes": recipes,
        "fp8_share": round(coverage.computed, 6),
        "high_precision": {name: round(share, 6) for name, share in high.items()},
    }


def _backends(layer: RecipeLayer, device: torch.device) -> dict[str, str]:
    found = {gemm: backend.name for gemm, backend in gemm_backends(layer.recipe, device).items()}
    return {gemm: "emulated" if name == "none" and layer.recipe.emulate else name for gemm, name in found.items()}


def observed_dtypes(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, str]:
    """The dtype of every leaf module's output during `forward()`, and of its loss.

    Repeated layers are one entry, their index written *. If they differ, the entry names each dtype.
    """
    seen: dict[str, set[str]] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(key, set()).add(str(output.dtype).removeprefix("torch."))

        return hook

    leaves = [(name, m) for name, m in model.named_modules() if name and next(m.parameters(False), None) is not None]
    with ExitStack() as hooks:
        for name, module in leaves:
            hooks.enter_context(module.register_forward_hook(note(name)))
        loss = forward()
    found = {name: " ".join(sorted(dtypes)) for name, dtypes in seen.items()}
    return found | {"loss": str(loss.dtype).removeprefix("torch.")}


@torch.no_grad()
def weight_ranges(model: nn.Module) -> dict[str, tuple[float, float]]:
    """(smallest, largest) element of every parameter, read from the device in one transfer.

    Parameters may be sharded (DTensor: FSDP2, tensor parallel): every rank returns the extremes of the whole, and every
    rank must call this.
    """
    names = [name for name, _ in model.named_parameters()]
    parameters: list[Any] = list(model.parameters())
    extremes = torch.stack([_extremes(p) for p in parameters])  # [P, 2], (smallest, -largest): both reduced by MIN
    meshes = dict.fromkeys(p.device_mesh for p in parameters if hasattr(p, "device_mesh"))
    for mesh in meshes:
        for group in mesh.get_all_groups():
            dist.all_reduce(extremes, dist.ReduceOp.MIN, group)
    return {name: (low, -negated) for name, (low, negated) in zip(names, extremes.tolist(), strict=True)}


def scales_of(model: nn.Module) -> dict[str, float]:
    """The scale of every history of the recipe `delayed` that has one, by name, such as LAYER.histories.x."""
    known = {name: history.scale for name, history in histories(model) if history.ready}
    values = torch.cat([scale.view(1) for scale in known.values()]).tolist() if known else []
    return dict(zip(known, values, strict=True))


def _extremes(p: Any) -> Tensor:
    """(smallest, -largest) of a parameter, or of the part that lies on this rank: [2] FP32."""
    local = local_part(p)
    if local.numel() == 0:  # a parameter with fewer rows than there are ranks
        return torch.full((2,), torch.inf, device=local.device)
    low, high = local.aminmax()
    return torch.stack([low, -high]).float()
