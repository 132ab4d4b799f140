"""The attention of transformers from stacked q, k and v in eager training, with one pass for the rotary embedding.

transformers rotates q and k in ten passes, their gradients take sixteen, and a copy stacks the gradients of q, k and v.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.architectures import ARCHITECTURES
from octavo.nn.module_tools import differentiable_once
from octavo.ops import turn_heads


def attend(
    attention: Any, y: Tensor, sizes: Sequence[int], position_embeddings: Any = None, attention_mask: Any = None,
    cache: Any = None, past_key_values: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The output [B, T, K] of an attention of transformers for y [B, T, sum of `sizes`], its q, k and v side by side.

    None where the forward of its class must run: in compiled code, without gradients, and where it is not known to do
    the same. The cache is that which a call of a model makes.
    """
    own, cache = type(attention), past_key_values if cache is None else cache
    known = ARCHITECTURES.get(own.__name__.removesuffix("Attention"))
    if (
        torch.compiler.is_compiling()
        or not y.requires_grad
        or known is None
        or known.block.head_norms
        or not own.__module__.startswith("transformers.models.")
        or own.forward.__module__ != own.__module__  # a subclass of ours has another forward, or somebody replaced it
        or attention.config._attn_implementation != "sdpa"
        or type(cache).__name__ not in ("NoneType", "DynamicCache")
        or position_embeddings is None
    ):
        return None
    cos, sin = position_embeddings
    if cos.dtype != y.dtype or cos.shape[-1] != attention.head_dim or cos.requires_grad:
        return None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    q, k, v = _TurnHeads.apply(y, [size // cos.shape[-1] for size in sizes], cos, sin)  # type: ignore[no-untyped-call]
    if cache is not None:
        k, v = cache.update(k, v, attention.layer_idx)
    dropout = attention.attention_dropout if attention.training else 0.0
    options = {"dropout": dropout, "scaling": attention.scaling, **kwargs}
    z, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](attention, q, k, v, attention_mask, **options)
    return attention.o_proj(z.flatten(2))


class _TurnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, heads: Sequence[int], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """q [B, H, T, D], and k and v [B, G, T, D], as views of one tensor: attention saves all three."""
        ctx.save_for_backward(cos, sin)
        stacked = y.view(*y.shape[:2], -1, cos.shape[-1]).transpose(1, 2)
        turned = turn_heads(*stacked.split_with_sizes(heads, 1), cos, sin, False)
        return turned.transpose(1, 2).split_with_sizes(heads, 1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return turn_heads(*gradients, *ctx.saved_tensors, True).flatten(2), None, None, None
