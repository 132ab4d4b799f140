"""Decoder layers of transformers whose norms and MLPs are fused with quantization, once they are converted.

    n = input_layernorm(x);  q, k, v = q_proj(n), k_proj(n), v_proj(n)      one pass: `NormLinear`
    z = x + o_proj(attention(q, k, v))
    y = z + mlp(post_attention_layernorm(z))                                 one pass: `SwiGLU` with its norm

A decoder layer of a known class, and its MLP, become subclasses of their classes, with the same names: parameters,
`state_dict`, hooks and `isinstance` stay as they are, and the attention is still transformers' own code. Where the
passes cannot be fused (another recipe, a wrapped or watched layer, no tokens) the class's own forward runs, unless the
layer is parallel (`octavo.nn.parallel`).
"""

from typing import Any

from torch import Tensor, nn

from octavo.nn.mixed_class import mix_classes
from octavo.nn.mlp import FusedMLP, SwiGLU
from octavo.nn.module_class import class_name
from octavo.nn.norm_linear import RMS_NORMS, NormLinear, child, watched
from octavo.nn.parallel import parallel_of
from octavo.nn.precomputed import PrecomputedProjections
from octavo.nn.weight_cache import WeightCache

DECODER_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
SILU = ("SiLU", "SiLUActivation")
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def fuse_decoder_layers(model: nn.Module) -> None:
    """Fuse the norms and MLPs of the decoder layers whose classes are known; idempotent."""
    for module in list(model.modules()):
        if not isinstance(module, DecoderLayer) and is_known(module):
            module.qkv = NormLinear(module, "input_layernorm", *PROJECTIONS)
            module.__class__ = mix_classes(DecoderLayer, type(module))
            mlp: Any = module.mlp
            mlp.weight_cache = WeightCache()
            mlp.__class__ = mix_classes(SwiGLU, type(mlp))


def is_known(layer: Any) -> bool:
    """Whether `layer` is a decoder layer of transformers whose class, norms and MLP are known."""
    if class_name(layer) not in DECODER_LAYERS:
        return False
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    mlp = layer.mlp
    return (
        all(type(norm).__name__ in RMS_NORMS for norm in norms)
        and class_name(mlp) in MLPS
        and type(mlp.act_fn).__name__ in SILU
    )


class DecoderLayer(nn.Module):
    """A decoder layer of transformers that runs norms and projections, and norm and MLP, in one pass each."""

    qkv: NormLinear
    self_attn: nn.Module
    mlp: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the class's own forward: hidden_states [B, T, K] to [B, T, K]; `kwargs` go to the attention."""
        attend, mlp, qkv = child(self, "self_attn"), child(self, "mlp"), child(self, "qkv")
        if parallel_of(qkv.linears) is not None:  # transformers' own code takes the part of a sequence for all of it
            fused = qkv(hidden_states)
        else:
            fused = None if args or watched(attend) or watched(mlp) else qkv.fused(hidden_states)
        if fused is None:
            return super().forward(hidden_states, *args, **kwargs)
        q, k, v = fused[0]
        # Attention saves v for its backward pass. As a view, v would keep all of the stacked q, k, v in memory.
        projections = PrecomputedProjections(
            hidden_states, qkv.linears, (q, k, v.contiguous() if v.requires_grad else v)
        )
        attention, _ = attend(hidden_states=projections, **kwargs)
        if isinstance(mlp, FusedMLP):
            return mlp.forward_residual(hidden_states, child(self, "post_attention_layernorm"), attention)
        y, total = mlp(hidden_states, self.post_attention_layernorm, attention)  # a wrapper, which must be called
        return total + y
