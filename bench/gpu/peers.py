"""Models for other libraries: torchao, and the loss of Liger Kernel."""

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn


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
