"""The attention of transformers from stacked q, k and v, with rotary embedding in one pass, forward and backward.

In eager code transformers rotates in ten passes, and the gradients of q, k and v take sixteen, and a copy into one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.architectures import ARCHITECTURES
from octavo.nn.module_tools import class_name, differentiable_once
from octavo.ops import turn_heads


def attend(
    attention: Any, y: Tensor, sizes: Sequence[int], position_embeddings: Any = None, attention_mask: Any = None,
    **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The output [B, T, K] of an attention of transformers for y [B, T, sum of sizes], all its q, k and v; None with a
    cache, norms of heads, tables for a part of a head or another attention than PyTorch's: its own forward must run."""
    known = ARCHITECTURES.get(class_name(attention).removesuffix("Attention"))
    plain = known is not None and not known.block.head_norms and attention.config._attn_implementation == "sdpa"
    if not plain or position_embeddings is None or any(kwargs.get(k) is not None for k in ("cache", "past_key_values")):
        return None
    cos: Tensor = position_embeddings[0]
    if cos.shape[-1] != attention.head_dim or cos.dtype not in (y.dtype, torch.float32):
        return None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    heads = _TurnHeads.apply(y, sizes, *position_embeddings)  # type: ignore[no-untyped-call]
    options = {"dropout": attention.attention_dropout * attention.training, "scaling": attention.scaling} | kwargs
    z, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](attention, *heads, attention_mask, **options)
    return attention.o_proj(z.flatten(2))  # type: ignore[no-any-return]


class _TurnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """q [B, H, T, D], and k and v [B, G, T, D], as views of one tensor: attention saves all three."""
        ctx.save_for_backward(cos, sin)
        turned = turn_heads(*y.split_with_sizes(sizes, -1), cos, sin, False)
        by_head = (x.view(*x.shape[:2], -1, cos.shape[2]) for x in turned.split_with_sizes(sizes, -1))
        return tuple(x.transpose(1, 2) for x in by_head)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return turn_heads(*(g.transpose(1, 2).flatten(2) for g in gradients), *ctx.saved_tensors, True), *[None] * 3
