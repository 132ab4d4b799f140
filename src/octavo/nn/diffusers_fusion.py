"""Blocks of diffusers' transformers whose norms and MLPs are fused with quantization, once they are converted.

    x = x + attn1(norm1(x))                q, k, v in one pass with the norm: `NormLinear`
    x = x + attn2(norm2(x), text)          q in one pass with the norm; k and v are those of the text
    x = x + ff(norm3(x))                   the MLP with its norm in one pass: `GEGLU`

They are the `BasicTransformerBlock`s of a U-Net such as SDXL's. As in `octavo.nn.transformers_fusion`, a block becomes
a subclass of its class with the same name, and the attention is diffusers' own code. Saved for the backward pass are
the three x, q, k, v, the outputs of the attentions, and the input of the GEGLU.
"""

from typing import Any

from torch import Tensor, nn

from octavo.nn.mixed_class import mix_classes
from octavo.nn.mlp import GEGLU
from octavo.nn.module_class import is_of_library
from octavo.nn.norm_linear import NormLinear, child, watched
from octavo.nn.precomputed import PrecomputedProjections


def fuse_diffusion_blocks(model: nn.Module) -> None:
    """Fuse the norms and MLPs of diffusers' blocks; idempotent."""
    for module in list(model.modules()):
        if not isinstance(module, DiffusionBlock) and _is_known(module):
            block: Any = module
            block.fused_qkv = NormLinear(block, "norm1", "attn1.to_q", "attn1.to_k", "attn1.to_v")
            block.fused_q = None if block.attn2 is None else NormLinear(block, "norm2", "attn2.to_q")
            block.fused_mlp = GEGLU(block.ff, "net.0.proj", "net.2")
            block.__class__ = mix_classes(DiffusionBlock, type(block))


def is_plain_attention(attention: Any) -> bool:
    """Whether `attention` is diffusers' `Attention` and calls PyTorch's attention, between its four layers alone."""
    if not is_of_library(attention, "diffusers", "Attention"):
        return False
    if type(attention.processor).__name__ != "AttnProcessor2_0":
        return False
    norms = attention.group_norm, attention.spatial_norm
    changed = attention.residual_connection or attention.rescale_output_factor != 1 or attention.to_out is None
    return not changed and all(norm is None for norm in norms)


def _is_known(block: Any) -> bool:
    """Whether `block` is a block of diffusers with layer norms, plain attentions, and a GEGLU without dropout."""
    if not is_of_library(block, "diffusers", "BasicTransformerBlock") or block.norm_type != "layer_norm":
        return False
    special = block.only_cross_attention or block.pos_embed is not None or hasattr(block, "fuser")
    attentions = [each for each in (block.attn1, block.attn2) if each is not None]
    activation, _, outer, *_ = net = block.ff.net
    dropped = any(isinstance(module, nn.Dropout) and module.p for module in net)
    mlp = is_of_library(activation, "diffusers", "GEGLU") and isinstance(outer, nn.Linear) and not dropped
    return mlp and not special and all(map(is_plain_attention, attentions))


class DiffusionBlock(nn.Module):
    """A block of diffusers that runs norms and projections, and norm and MLP, in one pass each."""

    fused_qkv: NormLinear
    fused_q: NormLinear | None
    fused_mlp: GEGLU

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the class's own forward: hidden_states [B, T, K] to [B, T, K]; encoder_hidden_states [B, S, J]."""
        block: Any = self
        attn1, attn2, mlp = block.attn1, block.attn2, child(self, "fused_mlp")
        called = [attn1, block.ff, block.ff.net[0], *([] if attn2 is None else [attn2])]
        alone = attn2 is not None and encoder_hidden_states is None
        if alone or cross_attention_kwargs or block._chunk_size is not None or any(map(watched, called)):
            return super().forward(
                hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
                cross_attention_kwargs, **kwargs,
            )  # fmt: skip
        y, x = _attend(child(self, "fused_qkv"), attn1, hidden_states, None, attention_mask=attention_mask)
        if attn2 is not None:
            text = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
            y, x = _attend(child(self, "fused_q"), attn2, x, y, **text)
        return mlp.forward_residual(x, block.norm3, y)


def _attend(
    projections: NormLinear, attention: nn.Module, x: Tensor, residual: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The attention of the norm of x + residual [B, T, K], and x + residual."""
    fused = projections.fused(x, residual)
    if fused is None:
        total = x if residual is None else x + residual
        return attention(projections.norm(total), **kwargs), total
    outputs, total = fused
    return attention(PrecomputedProjections(total, projections.linears, outputs), **kwargs), total
