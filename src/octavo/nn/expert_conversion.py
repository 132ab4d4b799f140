"""The experts that `convert` changes: ours, and those of transformers that compute the same function.

transformers keeps the experts of a layer in one module, with the parameters of `octavo.nn.Experts`. Such a module
becomes a subclass of its class whose forward is ours: parameters, `state_dict`, hooks and `isinstance` stay as they
are. Routers stay in high precision.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.backends import grouped_backends
from octavo.nn.conversion_report import Row
from octavo.nn.experts import Experts
from octavo.nn.grouped_linear import LEAST_SIDE, GroupedLinear
from octavo.nn.mixed_class import mix_classes, parts_of
from octavo.nn.module_class import class_name, is_fsdp_module
from octavo.nn.transformers_fusion import SILU
from octavo.ops.checks import FLOATS
from octavo.ops.grouped_gemm import ALIGNMENT
from octavo.recipe import Recipe

# Classes of transformers that compute down(silu(gate) * up) with weights [E, 2F, K] and [E, K, F] and no biases.
KNOWN = frozenset(
    f"{name}Experts"
    for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "DeepseekV2", "DeepseekV3", "Olmoe", "Glm4Moe")
) | {"DeepseekV3NaiveMoe", "Glm4MoeNaiveMoe"}


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of stacked experts in `model` that can run in FP8, by name."""
    return {name: module for name, module in model.named_modules() if _is_ours(module) or _is_known(module)}


def stacks_of(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The stacks of matrices [E, N, K] of a module of experts called `name`, by the names of the parameters."""
    named = module.named_parameters(recurse=False)
    return {f"{name}.{leaf}".lstrip("."): parameter for leaf, parameter in named if parameter.ndim == 3}


def expert_rows(
    experts: Mapping[str, nn.Module], recipe: Recipe, device: torch.device, skip: Sequence[str], *, only_if_faster: bool
) -> tuple[Row, ...]:
    """A row of the report for each stack of matrices; all of a module are converted, or none.

    Args:
        skip: globs of names of modules to leave as they are.
        only_if_faster: leave those that FP8 does not speed up on the GPU, and all where it is emulated.
    """
    rows = []
    for name, module in experts.items():
        weights = stacks_of(name, module)
        reason = next((f"skip={glob!r}" for glob in skip if fnmatchcase(name, glob)), "")
        reason = reason or _reason(module, list(weights.values()), recipe, device)
        if not reason and only_if_faster and device.type != "cuda":
            reason = "FP8 is emulated here: left in BF16"
        elif not reason and only_if_faster and min(size for w in weights.values() for size in w.shape[1:]) < LEAST_SIDE:
            reason = f"a side below {LEAST_SIDE}, where FP8 is slower on an H200: left in BF16"
        rows += [Row(weight, tuple(p.shape), reason) for weight, p in weights.items()]
    return tuple(rows)


def computed_stacks(model: nn.Module) -> list[str]:
    """The names of the stacks of experts' matrices that run in FP8."""
    found = {name: m for name, m in converted_experts(model).items() if m.recipe.quantized}
    return [weight for name, module in found.items() for weight in stacks_of(name, module)]


def converted_experts(model: nn.Module) -> dict[str, Any]:
    """The modules of experts that have a recipe, by name."""
    return {name: m for name, m in find_experts(model).items() if getattr(m, "recipe", None) is not None}


def to_fp8_experts(module: Any, recipe: Recipe | None, name: str) -> None:
    """Change a module of `find_experts` in place so that our code computes it, by `recipe` if there is one."""
    if not _is_ours(module):
        module.__class__ = mix_classes(Experts, type(module))
    module.recipe, module.name = recipe, name


def restore_experts(module: Any) -> bool:
    """Undo the conversion of a module of experts, and return whether `module` was one.

    Experts that ranks share keep our class: their own code cannot compute a part of them.
    """
    if not _is_ours(module) or module.recipe is None:
        return False
    del module.recipe, module.name
    if "parallel" in vars(module):
        return True
    if theirs := parts_of(type(module))[1:]:
        (module.__class__,) = theirs
    return True


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, Experts | GroupedLinear)


def _is_known(module: Any) -> bool:
    """Whether this is a module of transformers' experts whose class, parameters and activation are known."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return class_name(module) in KNOWN and names == set(Experts.matrices) and type(module.act_fn).__name__ in SILU


def _reason(module: nn.Module, weights: Sequence[Tensor], recipe: Recipe, device: torch.device) -> str:
    """Why experts with these weights stay in high precision, or ""."""
    if recipe.fusable is None:
        return f"the recipe {recipe.name} has no grouped GEMM: rowwise has one"
    if is_fsdp_module(module):
        return "fully_shard made it a unit of its own: convert the model before fully_shard"
    if any(w.dtype not in FLOATS for w in weights):
        return f"its weights are {weights[0].dtype}: FP8 is computed from float32, bfloat16 or float16"
    missing = [backend.reason for backend in grouped_backends(recipe, device).values() if backend.name == "none"]
    if missing and not recipe.emulate:
        return missing[0]
    if device.type == "cuda" and any(size % ALIGNMENT for w in weights for size in w.shape[1:]):
        return f"its matrices have sides that are no multiples of {ALIGNMENT}"
    return ""
