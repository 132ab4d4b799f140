"""`nn.MultiheadAttention` that computes its projections by a recipe.

PyTorch's module keeps the projections of query, key and value in one parameter, and reads the weight of its output
layer without calling it. Converted, it is the same function of the same parameters, in training and in evaluation:

    q, k, v = split(x @ in_proj_weight[3E,E]^T + in_proj_bias)      one product if query, key and value are one tensor
    y = out_proj(attention(q, k, v))                                a converted linear layer, which is called

The attention itself is PyTorch's `scaled_dot_product_attention`, or a softmax where the weights are asked for.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.linear import RecipeLayer
from octavo.nn.mixed_class import parts_of

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_convertible(module: nn.MultiheadAttention) -> bool:
    """Whether `module`, converted or not, can be converted: no subclass, and no keys of its own."""
    own_keys = module.bias_k is not None or module.add_zero_attn
    return parts_of(type(module))[-1] is nn.MultiheadAttention and not own_keys


def input_weights(module: Any) -> dict[str, nn.Parameter]:
    """The weights of the projections of query, key and value by name: one parameter [3E, E], or three."""
    names = ("in_proj_weight",) if module.in_proj_weight is not None else _SEPARATE
    return {name: getattr(module, name) for name in names}


class MultiheadAttention(RecipeLayer):
    """A converted `nn.MultiheadAttention`. `octavo.cast_once` does not cache the weights of its input projections."""

    embed_dim: int
    num_heads: int
    dropout: float
    batch_first: bool
    out_proj: nn.Module
    in_proj_bias: Tensor | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`; nested tensors are not taken."""
        check: Any = vars(F)["_mha_shape_check"]  # of ranks, with the messages of PyTorch
        batched = bool(check(query, key, value, key_padding_mask, attn_mask, self.num_heads))
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask: pass the causal mask as attn_mask too")
        q, k, v = (self._heads(t, batched=batched) for t in self._project(query, key, value))  # [B, H, T, E/H]
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, k)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), p)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))  # [B, T, E]
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v [..., E]; those of one and the same tensor in one product."""
        e, weights = self.embed_dim, list(input_weights(self).values())
        if len(weights) == 3:
            biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            inputs = (query, key, value)
            return [self.compute(x, w, b, None) for x, w, b in zip(inputs, weights, biases, strict=True)]
        outputs: list[Tensor] = []
        for x, rows in _runs(query, key, value, e):
            bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
            outputs += torch.split(self.compute(x, weights[0][rows], bias, None), e, dim=-1)
        return outputs

    def _heads(self, t: Tensor, *, batched: bool) -> Tensor:
        """[B, H, T, E/H] of [B, T, E], [T, B, E] or [T, E]."""
        t = t.unsqueeze(0) if not batched else t if self.batch_first else t.transpose(0, 1)
        return t.reshape(*t.shape[:-1], self.num_heads, t.shape[-1] // self.num_heads).transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """The sum of both masks as a tensor to add to the scores [B, H, T, S], with -inf where a mask is True."""
        (b, h, t, _), s = q.shape, k.shape[2]
        mask = None
        if attn_mask is not None:
            expected = (t, s) if attn_mask.ndim == 2 else (b * h, t, s)
            if attn_mask.shape != expected:
                raise ValueError(f"attn_mask must be {list(expected)}, got {list(attn_mask.shape)}")
            mask = _added(attn_mask, q.dtype).view(-1, 1 if attn_mask.ndim == 2 else h, t, s)
        if padding is not None:
            padding = padding if padding.ndim == 2 else padding.unsqueeze(0)
            if padding.shape != (b, s):
                raise ValueError(f"key_padding_mask must be {[b, s]}, got {list(padding.shape)}")
            hidden = _added(padding, q.dtype).view(b, 1, 1, s)
            mask = hidden if mask is None else mask + hidden
        return mask


def _runs(query: Tensor, key: Tensor, value: Tensor, e: int) -> list[tuple[Tensor, slice]]:
    """The inputs, equal neighbours once, each with the rows of the weight [3E, E] that it is multiplied by."""
    if query is key and key is value:
        return [(query, slice(0, 3 * e))]
    if key is value:
        return [(query, slice(0, e)), (key, slice(e, 3 * e))]
    return [(query, slice(0, e)), (key, slice(e, 2 * e)), (value, slice(2 * e, 3 * e))]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
