"""The recipes that the table of recipes compares, and models for other libraries: torchao, and Liger Kernel's loss.

BF16 is the baseline, and runs a second time as the control.
"""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from octavo.numerics.scaling import History
from octavo.ops.dispatch import gemm_backends
from octavo.recipe import GEMMS, PRESETS, Recipe, delayed, tensorwise

BASE = "bf16"
OURS = {name: preset() for name, preset in PRESETS.items()}
CONTROL = "bf16_rounded"  # from the same weights, rounded to BF16: its gap to BF16 is chance alone


@dataclass(frozen=True)
class Variant:
    """A recipe, and the words of the table for it."""

    recipe: Recipe
    words: str


def promoted(recipe: Recipe, *gemms: str) -> Recipe:
    """`recipe` without fast accumulation in these GEMMs."""
    found: dict[str, Any] = {gemm: getattr(recipe, gemm) for gemm in gemms}
    return replace(recipe, **{name: gemm and replace(gemm, fast_accumulation=False) for name, gemm in found.items()})


def stochastic(recipe: Recipe) -> Recipe:
    """`recipe` with the gradient dy rounded stochastically."""
    assert recipe.dx is not None
    assert recipe.dw is not None
    dy = replace(recipe.dx.a, rounding="stochastic")
    return replace(recipe, dx=replace(recipe.dx, a=dy), dw=replace(recipe.dw, a=dy))


VARIANTS: dict[str, Variant] = {
    BASE: Variant(OURS["bf16"], "the baseline"),
    CONTROL: Variant(OURS["bf16"], "the control: the same start, rounded to BF16"),
    "rowwise": Variant(OURS["rowwise"], "the default; fast accumulation in y and dx"),
    "rowwise_exact_dx": Variant(promoted(OURS["rowwise"], "dx"), "`rowwise`, no fast accumulation in dx"),
    "rowwise_dw_bf16": Variant(OURS["rowwise_dw_bf16"], "`rowwise`, dw in BF16"),
    "rowwise_forward": Variant(OURS["rowwise_forward"], "`rowwise` in y, dx and dw in BF16 from its bytes"),
    "rowwise_stochastic": Variant(stochastic(OURS["rowwise"]), "`rowwise`, gradients rounded stochastically"),
    "rowwise_rotated": Variant(
        replace(OURS["rowwise"], rotate=("y",)), "`rowwise`, x and w rotated by a Hadamard matrix, for y alone"
    ),
    "rowwise_rotated_dx": Variant(
        replace(OURS["rowwise"], rotate=("dx",)), "`rowwise`, dy and w rotated along the outputs, for dx alone"
    ),
    "rowwise_rotated_dw": Variant(
        replace(OURS["rowwise"], rotate=("dw",)), "`rowwise`, dy and x rotated along the tokens, for dw alone"
    ),
    "tensorwise": Variant(OURS["tensorwise"], "a scale a tensor, gradients in E5M2"),
    "tensorwise_e4m3": Variant(tensorwise("e4m3"), "a scale a tensor, gradients in E4M3"),
    "tensorwise_stochastic": Variant(stochastic(OURS["tensorwise"]), "`tensorwise`, gradients rounded stochastically"),
    "tensorwise_rotated": Variant(
        OURS["tensorwise_rotated"], "`tensorwise`, x and w rotated by a Hadamard matrix, for y alone"
    ),
    **{  # by the format of the gradients and the headroom 2^margin above the largest amax
        f"delayed_{gradients}_margin_{margin}": Variant(
            delayed(gradients, History(margin=float(margin))),
            f"delayed scaling, gradients in {gradients.upper()}, headroom {2**margin}",
        )
        for gradients in ("e5m2", "e4m3")
        for margin in (0, 1, 2)
    },
    "blockwise": Variant(OURS["blockwise"], "x and dy in groups of 128, w in squares of 128"),
    "groupwise": Variant(OURS["groupwise"], "groups of 64, float32 scales"),
    "mxfp8": Variant(OURS["mxfp8"], "groups of 32, E8M0 scales"),
    "mxfp4": Variant(
        OURS["mxfp4"], "four bits, groups of 32, E8M0 scales; dy rounded stochastically, dx and dw rotated"
    ),
    "nvfp4": Variant(OURS["nvfp4"], "four bits, groups of 16, E4M3 scales; dy rounded stochastically, dw rotated"),
}


def recipe_of(name: str) -> Recipe:
    """The recipe of a variant, called by the variant's name; GEMMs that the device lacks are emulated."""
    return replace(VARIANTS[name].recipe, name=name, emulate=True)


def implementations(name: str, device: torch.device) -> dict[str, str]:
    """The backends of y, dx and dw on `device`; "bf16" for a GEMM without casts, and "emulated" where there is none."""
    backends = gemm_backends(VARIANTS[name].recipe, device)
    return {gemm: "emulated" if backends[gemm].name == "none" else backends[gemm].name for gemm in GEMMS}


def use_torchao(model: nn.Module, recipe: str, *, fp8_gather: bool = False) -> int:
    """Convert the linear layers of `model` but an output head to torchao's FP8 training; returns how many.

    With `fp8_gather` FSDP2 gathers the weights in FP8, which only `tensorwise` can; then call `update_torchao` after
    each optimizer step. Without a GPU torchao emulates its GEMMs.
    """
    float8: Any = importlib.import_module("torchao.float8")
    names = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=fp8_gather, emulate=not torch.cuda.is_available())
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)
    return len(names)


def use_liger_loss(model: nn.Module) -> None:
    """Let a Llama of transformers compute its loss by Liger Kernel, and nothing else."""
    liger: Any = importlib.import_module("liger_kernel.transformers")
    liger.apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, model=model)


def update_torchao(model: nn.Module) -> None:
    """Compute the scales of weights that FSDP2 gathers in FP8: one all-reduce for all of them."""
    importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)
