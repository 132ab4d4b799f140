"""The models that `gpu_serve` measures: transformers' Llama of Llama-3-8B's shape with random weights, in BF16, packed
in memory as `octavo pack` would, and quantized by torchao; and a forward pass whose layers are compiled one by one.

The layers are alike, so that what is compiled for one serves all: the code of a layer must not depend on its number,
and so each gets a cache of its own: in BF16, or in E4M3 as `QuantizedKVCache` has it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu.kv_cache import filled
from octavo.artifact.packed.scheme import CHANNEL
from octavo.kv_cache.transformers_cache import QuantizedKVCache, QuantizedKVCacheLayer
from octavo.ops import quantize
from octavo.runtime.packed_linear import PackedLinear, swap_linears
from octavo.runtime.stacked_linear import PackedStack

SHAPE = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
HEAD = "lm_head"


class LayerCache:
    """Keys and values [B, heads, S, d] of one layer, full but for one place, as those of a StaticCache."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        self.keys, self.values, self.position = keys, values, position

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write k and v [B, heads, 1, d] to their place; return all."""
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        return self.keys, self.values


def caches(model: Any, batch: int, context: int, device: str) -> list[LayerCache]:
    """Of `context` - 1 random tokens, the next of which is the last that fits."""
    config = model.config
    shape = (2, batch, config.num_key_value_heads, context, config.head_dim)
    position = torch.tensor([context - 1], device=device)
    drawn = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(config.num_hidden_layers))
    return [LayerCache(both[0], both[1], position) for both in drawn]


def quantized_caches(model: Any, kept: Sequence[LayerCache]) -> list[QuantizedKVCacheLayer]:
    """The same caches in E4M3; the attention of `model` becomes the one that reads them."""
    cache = QuantizedKVCache.for_model(model, kept[0].keys.shape[2], "fp8")
    for layer, wide in zip(cache.layers, kept, strict=True):
        # Not by its `update`, which marks the addresses: the code of a layer would then be for that layer alone.
        layer.store = filled("fp8", wide.keys[:, :, :-1], wide.values[:, :, :-1], room=1)
    return list(cache.layers)


def build_bf16(layers: int, device: str, **changes: Any) -> Any:
    """The model in BF16, every weight normal with the deviation that keeps the size of what it is given."""
    model = _empty(LlamaConfig(**SHAPE | {"num_hidden_layers": layers} | changes))
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                drawn = torch.ones(p.shape, device=device) if p.ndim == 1 else torch.empty(p.shape, device=device)
                if p.ndim > 1:
                    drawn.normal_(std=1 if isinstance(module, nn.Embedding) else 1 / math.sqrt(p.shape[1]))
                module._parameters[name] = nn.Parameter(drawn.bfloat16(), requires_grad=False)
    return _ready(model, device)


def build_fp8(wide: Any, device: str) -> Any:
    """The same model, its linear layers packed by channel, what is not packed shared with `wide`; not fused."""
    model = _empty(wide.config)
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != HEAD]
    swap_linears(model, dict.fromkeys(linears, CHANNEL))
    state = dict(wide.named_parameters())
    for name in linears:
        q = quantize(state.pop(f"{name}.weight").detach(), CHANNEL.weight)
        state |= {f"{name}.weight": q.data, f"{name}.weight_scale": CHANNEL.stored_scale(q)}
    model.load_state_dict(state, strict=False, assign=True)
    return _ready(model, device)


def build_torchao(wide: Any, device: str) -> Any:
    """The same model under torchao's dynamic row-wise FP8."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    model = _empty(wide.config)
    model.load_state_dict(dict(wide.named_parameters()), strict=False, assign=True)
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    quantize_(model, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and name != HEAD)
    return _ready(model, device)


def _empty(config: Any) -> Any:
    with torch.device("meta"):  # a config of its own: it names the model's attention
        return LlamaForCausalLM._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()


def _ready(model: Any, device: str) -> Any:
    """What no state holds, and the same number for all layers."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    return model


def compile_layers(model: Any, **options: Any) -> None:
    """Compile each decoder layer for the shapes it will be given."""
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, **options)


@torch.no_grad()
def forward(model: Any, ids: Tensor, first: int = 0, kept: Sequence[Any] | None = None) -> Tensor:
    """Logits [B, V] after the tokens `ids` [B, T], of which the first is at position `first`.

    What transformers' forward does for tokens without padding and a cache that is full: no mask is made.
    """
    trunk = model.model
    x = trunk.embed_tokens(ids)
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    rotary = trunk.rotary_emb(x, position_ids=positions)
    for i, layer in enumerate(trunk.layers):
        x = layer(
            x,
            attention_mask=None,
            position_embeddings=rotary,
            past_key_values=None if kept is None else kept[i],
        )
    logits: Tensor = model.lm_head(trunk.norm(x[:, -1]))
    return logits


@torch.no_grad()
def forward_again(model: Any, ids: Tensor, first: int, kept: Sequence[QuantizedKVCacheLayer]) -> Tensor:
    """`forward`, after which the caches forget its tokens: the next call, a replay too, writes to the same places.

    One kernel for all layers, where `crop` takes two for each. For layers that are compiled: the host's own count of
    tokens, which eager code checks, goes on.
    """
    logits = forward(model, ids, first, kept)
    torch._foreach_sub_([layer.store.length for layer in kept if layer.store is not None], ids.shape[1])
    return logits


def held(model: nn.Module, *, linears: bool) -> int:
    """Bytes of the linear layers but the head, or of everything, each tensor once."""
    tensors = {}
    for name, module in model.named_modules():
        if not linears or (isinstance(module, nn.Linear | PackedLinear | PackedStack) and name != HEAD):
            owned = (*module._parameters.values(), *module._buffers.values())
            tensors.update({id(t): t.nbytes for t in owned if t is not None})
    return sum(tensors.values())
