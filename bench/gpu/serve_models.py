"""Transformers' Llama with random weights: in BF16, packed in memory as `octavo pack` does, and quantized by torchao.

The layers are compiled one by one. They are alike, so the code that is compiled for one serves all. For that, the code
of a layer must not depend on its number: each compiled layer has number 0 and a cache of its own.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.checkpoint.scheme import CHANNEL, Scheme
from octavo.inference.kv_cache import Appended, LayerKVCache, ModelKVCache
from octavo.inference.packed_linear import PackedLinear, fuse, swap_linears
from octavo.inference.transformers_cache import ATTENTION, CACHE, register_attention
from octavo.models import LlamaConfig as LlamaShape
from octavo.ops import quantize

HEAD = "lm_head"


# --- Caches ----------------------------------------------------------------------------------------------------


def filled(dtype: str, k: Tensor, v: Tensor, room: int = 0) -> LayerKVCache:
    """A cache of keys and values [B, G, S, D] with frozen scales, and room for more tokens."""
    return ModelKVCache(1, k.shape[2] + room, dtype).append(0, k, v).store


def random_stores(config: Any, batch: int, context: int, device: str, *dtypes: str) -> dict[str, list[LayerKVCache]]:
    """A cache of each dtype for each layer, of the same `context` - 1 random tokens, with room for one more."""
    stores: dict[str, list[LayerKVCache]] = {dtype: [] for dtype in dtypes}
    shape = (2, batch, config.num_key_value_heads, context - 1, config.head_dim)
    for _ in range(config.num_hidden_layers):
        k, v = torch.randn(shape, device=device, dtype=torch.bfloat16)
        for dtype, layers in stores.items():
            layers.append(filled(dtype, k, v, room=1))
    return stores


class PlainCache:
    """The BF16 keys and values [B, G, S, D] of a store, full but for the last token, as in a StaticCache.

    transformers' own attention reads them.
    """

    def __init__(self, store: LayerKVCache) -> None:
        self.keys, self.values, self.last = store.keys, store.values, store.keys.shape[2] - 1
        self.position = torch.tensor([self.last], device=store.keys.device)

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write k and v [B, G, 1, D] to the last place; return all."""
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        return self.keys, self.values


class OctavoCache:
    """One layer's store as the cache that the attention "octavo" reads."""

    def __init__(self, store: LayerKVCache) -> None:
        self.store, self.last = store, store.keys.shape[2] - 1

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Appended, Appended]:
        self.store.count.advance(k.shape[2])
        appended = self.store.append(k, v)
        return appended, appended


def octavo_caches(model: Any, stores: Sequence[LayerKVCache]) -> list[OctavoCache]:
    """A cache for each layer; the attention of `model` becomes the one that reads them."""
    register_attention()
    model.set_attn_implementation(ATTENTION)
    return [OctavoCache(store) for store in stores]


# --- Models ----------------------------------------------------------------------------------------------------


def build_bf16(shape: LlamaShape, device: str) -> Any:
    """The model in BF16. The deviation of the random weights keeps the size of activations from layer to layer."""
    model = _empty(LlamaConfig.from_dict(shape.to_hf()))
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                drawn = torch.ones(p.shape, device=device) if p.ndim == 1 else torch.empty(p.shape, device=device)
                if p.ndim > 1:
                    drawn.normal_(std=1 if isinstance(module, nn.Embedding) else 1 / math.sqrt(p.shape[1]))
                module._parameters[name] = nn.Parameter(drawn.bfloat16(), requires_grad=False)
    return _ready(model, device)


def build_fp8(wide: Any, device: str, scheme: Scheme = CHANNEL, *, fused: bool = True) -> Any:
    """The same model, its linear layers packed by `scheme`, and `fused`. The other tensors are shared with `wide`."""
    model = _empty(wide.config)
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != HEAD]
    swap_linears(model, dict.fromkeys(linears, scheme))
    state = dict(wide.named_parameters())
    for name in linears:
        q = quantize(state.pop(f"{name}.weight").detach(), scheme.weight)
        state |= {f"{name}.weight": q.data, f"{name}.weight_scale": scheme.stored_scale(q)}
    model.load_state_dict(state, strict=False, assign=True)
    _ready(model, device)
    if fused:
        fuse(model)
    return model


def build_torchao(wide: Any, device: str) -> Any:
    """The same model under torchao's dynamic row-wise FP8."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    model = _empty(wide.config)
    model.load_state_dict(dict(wide.named_parameters()), strict=False, assign=True)
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    quantize_(model, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and name != HEAD)
    return _ready(model, device)


def _empty(config: Any) -> Any:
    with torch.device("meta"):  # with a copy of the config, which names the attention of this model
        return LlamaForCausalLM._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()


def _ready(model: Any, device: str) -> Any:
    """Make the tables that no state_dict holds."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    return model


def compile_layers(model: Any) -> None:
    """Compile each decoder layer for the shapes it will be given."""
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
        layer.compile(fullgraph=True, dynamic=False)


@torch.no_grad()
def forward(model: Any, ids: Tensor, kept: Sequence[PlainCache] | Sequence[OctavoCache] = ()) -> Tensor:
    """Logits [B, V] after the tokens `ids` [B, T]; with caches, which all layers have, after the last that these hold.

    This is transformers' forward for tokens without padding and a full cache, where no mask is needed. Octavo's caches
    forget the tokens, so that the next call or replay writes to the same places: by one kernel for all layers, where
    `crop` takes two a layer. The layers must be compiled: eager code would check the host's count of tokens, which this
    does not set back.
    """
    trunk = model.model
    x = trunk.embed_tokens(ids)
    first = kept[0].last if kept else 0
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    rotary = trunk.rotary_emb(x, position_ids=positions)
    for i, layer in enumerate(trunk.layers):
        x = layer(x, attention_mask=None, position_embeddings=rotary, **{CACHE: kept[i] if kept else None})
    logits: Tensor = model.lm_head(trunk.norm(x[:, -1]))
    if lengths := [cache.store.length for cache in kept if isinstance(cache, OctavoCache)]:
        torch._foreach_sub_(lengths, ids.shape[1])
    return logits


def held(model: nn.Module, *, linears: bool) -> int:
    """Bytes of the linear layers but the head, or of everything, each tensor once."""
    tensors = {}
    for name, module in model.named_modules():
        if not linears or (isinstance(module, nn.Linear | PackedLinear) and name != HEAD):
            owned = (*module._parameters.values(), *module._buffers.values())
            tensors.update({id(t): t.nbytes for t in owned if t is not None})
    return sum(tensors.values())
