"""Attention modules of transformers that rotate and store with one kernel, where their cache is a `QuantizedKVCache`.

transformers' own attention takes some ten kernels for the rotary embedding of a token. The classes below become
subclasses with the same names: parameters, `state_dict`, hooks and `isinstance` stay as they are. With another cache,
in training, in compiled code and wherever else the short way does not hold, the class's own forward runs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.kv_cache.model import ModelKVCache
from octavo.nn.mixed_class import mix_classes
from octavo.nn.norm_linear import child, watched
from octavo.nn.precomputed import PrecomputedProjections

ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
HEAD_NORMS = ("Qwen3RMSNorm",)


def serve_attention(model: nn.Module) -> None:
    """Make the attention modules of known classes in `model` a `ServedAttention`; idempotent."""
    for module in list(model.modules()):
        if not isinstance(module, ServedAttention) and type(module).__name__ in ATTENTIONS:
            module.__class__ = mix_classes(ServedAttention, type(module))


class ServedAttention(nn.Module):
    """An attention of transformers: projections, rotary embedding with the cache, attention, output projection."""

    layer_idx: int
    head_dim: int
    scaling: float

    def forward(
        self,
        hidden_states: Tensor | PrecomputedProjections,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As the class's own forward: hidden_states [B, T, K] to [B, T, K] and None."""
        cache: Any = getattr(past_key_values, "model_cache", None)
        norms = self._head_norms()
        if norms is None or not self._serves(cache, hidden_states, position_embeddings, attention_mask):
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        assert position_embeddings is not None
        q, k, v = self._projections(hidden_states)
        q, appended = cache.rotate_append(self.layer_idx, q, k, v, *position_embeddings, **norms)
        past_key_values.layers[self.layer_idx].is_initialized = True
        first = None if attention_mask is None else attention_mask.flatten()
        y = appended.attend(q, first, self.scaling)  # [B, H, T, D]
        batch, _, tokens, _ = y.shape
        y = y.reshape(batch, 1, -1) if tokens == 1 else y.transpose(1, 2).flatten(2)
        return child(self, "o_proj")(y), None

    def _serves(
        self, cache: Any, x: Tensor | PrecomputedProjections, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> bool:
        if not isinstance(cache, ModelKVCache) or tables is None:
            return False
        if torch.is_grad_enabled() or self.training or torch.compiler.is_compiling():
            return False
        return (
            (tables[0].dtype, tables[0].shape[-1]) == (x.dtype, self.head_dim)
            and 0 not in x.shape
            and (mask is None or (mask.dtype, *mask.shape[1:]) == (torch.int32, 1, 1, 1))
            and not torch.is_autocast_enabled(x.device.type)
        )

    def _projections(self, x: Tensor | PrecomputedProjections) -> tuple[Tensor, ...]:
        layers = (child(self, name) for name in ("q_proj", "k_proj", "v_proj"))
        if isinstance(x, PrecomputedProjections):
            return tuple([x.output_of(layer) for layer in layers])
        return tuple([layer(x) for layer in layers])

    def _head_norms(self) -> dict[str, Any] | None:
        """The norms of the heads as `rotate_append` takes them; None if they are of an unknown kind, or watched."""
        norms: list[Any] = [self._modules.get(name) for name in ("q_norm", "k_norm")]
        if norms == [None, None]:
            return {}
        if any(type(norm).__name__ not in HEAD_NORMS or watched(norm) for norm in norms):
            return None
        q_norm, k_norm = norms
        return {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": q_norm.variance_epsilon}
