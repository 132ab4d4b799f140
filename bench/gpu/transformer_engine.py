"""The layer stack's plain blocks in Transformer Engine's modules, with the same weights: for `gpu_stack`, where it is
installed. Its fused modules take the norms and the MLP, as their authors mean them to be used; rope, attention and the
residual sums stay PyTorch's.

Written from the sources of Transformer Engine 2.20, whose compiled part is too large for where this was written: run
with a stand-in only.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.cache import causal_attention
from octavo.models.llama import rotate

RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}


def transformer_engine(model: nn.Module, recipe: str) -> None:
    """Put blocks of Transformer Engine in the place of the model's `PlainBlock`s; its forward runs under `autocast`."""
    te: Any = importlib.import_module("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    layers: Any = model.layers
    model.layers = nn.ModuleList(EngineBlock(te, layer) for layer in layers)
    how = getattr(recipes, RECIPES[recipe])()
    object.__setattr__(model, "autocast", lambda: te.autocast(enabled=True, recipe=how))


class EngineBlock(nn.Module):
    """norm + q, k, v; attention; o; norm + SwiGLU MLP: three modules of Transformer Engine."""

    def __init__(self, te: Any, plain: Any) -> None:
        super().__init__()
        q, k, v, o, down = (layer.weight for layer in (plain.q, plain.k, plain.v, plain.o, plain.down))
        inner = torch.cat((plain.gate.weight, plain.up.weight))
        options: dict[str, Any] = {"bias": False, "params_dtype": q.dtype, "device": q.device}
        normed = options | {"eps": plain.norm1.eps, "normalization": "RMSNorm"}
        width = q.shape[1]
        self.sizes = [q.shape[0], k.shape[0], v.shape[0]]
        self.qkv = te.LayerNormLinear(width, sum(self.sizes), **normed)
        self.o = te.Linear(o.shape[1], width, **options)
        self.mlp = te.LayerNormMLP(width, down.shape[1], activation="swiglu", **normed)
        filled = (
            (self.qkv.layer_norm_weight, plain.norm1.weight), (self.qkv.weight, torch.cat((q, k, v))),
            (self.o.weight, o), (self.mlp.layer_norm_weight, plain.norm2.weight),
            (self.mlp.fc1_weight, inner), (self.mlp.fc2_weight, down),
        )  # fmt: skip
        with torch.no_grad():
            for mine, given in filled:
                mine.copy_(given)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (-1, cos.shape[1])) for y in self.qkv(x).split(self.sizes, 2))
        heads = (y.transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        x = x + self.o(causal_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]
