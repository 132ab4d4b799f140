"""Decoder layers of transformers whose norms and MLPs run as ours do, once they are converted.

    n = input_layernorm(x);  q, k, v = q_proj(n), k_proj(n), v_proj(n)      one pass: `NormLinear`
    z = x + o_proj(attention(q, k, v))
    y = z + mlp(post_attention_layernorm(z))                                 one pass: `SwiGLU` with its norm

A layer that is recognised, and its MLP, get a subclass of their class, with its name: parameters, `state_dict`, hooks
and `isinstance` stay as they are, and what is between the projections is transformers' own code still. Where a pass
cannot be made (another recipe, a wrapped or watched layer, no tokens) the class's own forward runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from octavo.nn.mixed import mixed
from octavo.nn.mlp import FusedMLP, SwiGLU
from octavo.nn.norm_linear import RMS_NORMS, NormLinear, watched
from octavo.nn.precomputed import PrecomputedProjections
from octavo.nn.weight_cache import WeightCache

DECODER_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
SILU = ("SiLU", "SiLUActivation")
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def fuse_patterns(model: nn.Module) -> None:
    """Let the decoder layers that are recognised run their norms and MLPs in one pass; idempotent."""
    for module in list(model.modules()):
        if not isinstance(module, DecoderLayer) and type(module).__name__ in DECODER_LAYERS and _is_pattern(module):
            module.qkv = NormLinear(module, "input_layernorm", *PROJECTIONS)
            module.__class__ = mixed(DecoderLayer, type(module))
            mlp: Any = module.mlp
            mlp.weight_cache = WeightCache()
            mlp.__class__ = mixed(SwiGLU, type(mlp))


def _is_pattern(layer: Any) -> bool:
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    mlp = layer.mlp
    return (
        all(type(norm).__name__ in RMS_NORMS for norm in norms)
        and type(mlp).__name__ in MLPS
        and type(mlp.act_fn).__name__ in SILU
    )


class DecoderLayer(nn.Module):
    """A decoder layer of transformers that runs norms and projections, and norm and MLP, in one pass each."""

    qkv: NormLinear
    self_attn: nn.Module
    mlp: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the class's own: hidden_states [B, T, K] and what the attention takes, to [B, T, K]."""
        parts = None if args or watched(self.self_attn) or watched(self.mlp) else self.qkv.fused(hidden_states)
        if parts is None:
            return super().forward(hidden_states, *args, **kwargs)
        q, k, v = parts[0]
        # Attention keeps v as it is for its backward pass: a view would keep all of the stacked q, k, v.
        projections = PrecomputedProjections(
            hidden_states, self.qkv.linears, (q, k, v.contiguous() if v.requires_grad else v)
        )
        attention, _ = self.self_attn(hidden_states=projections, **kwargs)
        if isinstance(self.mlp, FusedMLP):
            return self.mlp.forward_residual(hidden_states, self.post_attention_layernorm, attention)
        y, total = self.mlp(hidden_states, self.post_attention_layernorm, attention)  # a wrapper, which must be called
        return total + y
