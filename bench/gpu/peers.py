"""Models for other libraries: torchao, Transformer Engine, and the loss of Liger Kernel.

Transformer Engine replaces the plain blocks of the layer stack by modules of its own, with the same weights. Its fused
modules take the norms and the MLP; rope, attention and the residual sums stay PyTorch's. This was written from the
sources of Transformer Engine 2.20 and has run with a stand-in for the library only.
"""

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.llama import PlainBlock, attend

RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}


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


def use_transformer_engine(model: nn.Module, recipe: str) -> None:
    """Replace the `PlainBlock`s of an `Engine`. Its forward runs under `autocast`."""
    te: Any = importlib.import_module("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    layers: Any = model.layers
    model.layers = nn.ModuleList(EngineBlock(te, layer) for layer in layers)
    chosen = getattr(recipes, RECIPES[recipe])()
    object.__setattr__(model, "autocast", lambda: te.autocast(enabled=True, recipe=chosen))


class EngineBlock(nn.Module):
    """Norm with q, k, v; o; norm with the SwiGLU MLP: three modules of Transformer Engine."""

    def __init__(self, te: Any, plain: PlainBlock) -> None:
        super().__init__()
        attention, mlp = plain.attention, plain.mlp
        q, k, v, o, down = (m.weight for m in (attention.q, attention.k, attention.v, attention.o, mlp.down))
        inner = torch.cat((mlp.gate.weight, mlp.up.weight))
        options: dict[str, Any] = {"bias": False, "params_dtype": q.dtype, "device": q.device}
        normed = options | {"eps": plain.norm1.eps, "normalization": "RMSNorm"}
        width = q.shape[1]
        self.sizes = [q.shape[0], k.shape[0], v.shape[0]]
        self.qkv = te.LayerNormLinear(width, sum(self.sizes), **normed)
        self.o = te.Linear(o.shape[1], width, **options)
        self.mlp = te.LayerNormMLP(width, down.shape[1], activation="swiglu", **normed)
        copies = (
            (self.qkv.layer_norm_weight, plain.norm1.weight), (self.qkv.weight, torch.cat((q, k, v))),
            (self.o.weight, o), (self.mlp.layer_norm_weight, plain.norm2.weight),
            (self.mlp.fc1_weight, inner), (self.mlp.fc2_weight, down),
        )  # fmt: skip
        with torch.no_grad():
            for target, source in copies:
                target.copy_(source)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.o(attend(self.qkv(x).split(self.sizes, 2), cos, sin))
        return x + self.mlp(x)  # type: ignore[no-any-return]
