"""The attention "octavo" of transformers' models, and its masks: over a cache of ours, over another, or over none.

A mask of transformers has an entry for each query and key. Ours is the place of the first token that counts in each
sequence, which is all that padding on the left takes, and costs a step nothing. Importing this module imports
transformers.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kv_cache.layer import LayerKVCache, prompt_attention
from octavo.ops import cached_attention

ATTENTION = "octavo"
_modeling: Any = importlib.import_module("transformers.modeling_utils")
_masks: Any = importlib.import_module("transformers.masking_utils")
_causal = _masks.causal_mask_function


class Appended(NamedTuple):
    """What `update` hands to the attention: a layer's storage, and what was just stored there."""

    store: LayerKVCache
    keys: Tensor
    values: Tensor
    alone: bool  # nothing was stored before

    def attend(self, q: Tensor, first: Tensor | None, scale: float) -> Tensor:
        """[B, H, T, D] of the queries of the tokens that were just stored."""
        if self.alone and q.shape[2] > 1:
            return prompt_attention(q, self.keys, self.values, first=first, scale=scale)
        return self.store.attend(q, first=first, scale=scale)


def register_attention() -> None:
    """Enter "octavo" into transformers' registries of attentions and of their masks."""
    _modeling.AttentionInterface.register(ATTENTION, _attention)
    _masks.AttentionMaskInterface.register(ATTENTION, left_padding)


def _attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: [B, T, H, D]."""
    if dropout or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("the attention 'octavo' has no dropout, no softcap and no sinks: use 'sdpa' or 'eager'")
    if attention_mask is not None and (attention_mask.dtype, *attention_mask.shape[1:]) != (torch.int32, 1, 1, 1):
        raise ValueError(
            "the attention 'octavo' takes a two-dimensional attention_mask (left padding), not one of queries by keys: "
            "use 'sdpa' or 'eager'"
        )
    first = None if attention_mask is None else attention_mask.flatten()
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if isinstance(key, Appended):
        y = key.attend(query, first, scale)
    elif key.shape[2] == query.shape[2]:  # no cache
        y = prompt_attention(query, key, value, first=first, scale=scale)
    else:  # another cache
        length = torch.full((), key.shape[2], dtype=torch.int64, device=key.device)
        y = cached_attention(query, key.contiguous(), value.contiguous(), None, None, length, first=first, scale=scale)
    return y.transpose(1, 2).contiguous(), None


def left_padding(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """The mask of the attention "octavo": the first token that counts in each sequence, int32 [B, 1, 1, 1], or None.

    Where a look at the mask would make the host wait in every step (one token, on a GPU), a mask that is not of this
    form gives -1, and attention NaN; elsewhere it is an error.
    """
    causal = mask_function is _causal or (local_size is not None and kv_length <= local_size)
    if use_vmap or not causal:
        raise ValueError(
            "the attention 'octavo' is causal over all tokens, without sliding windows, chunks or packed sequences: "
            "use 'sdpa' or 'eager'"
        )
    if attention_mask is None:
        return None
    at = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    first = attention_mask.int().argmax(1)
    torn = ((at >= first.unsqueeze(1)) & (at < q_offset + q_length) & ~attention_mask.bool()).any(1)
    if _may_look(attention_mask, q_length):
        if bool(torn.any()):
            raise ValueError(
                "the attention 'octavo' takes padding on the left only: each row of attention_mask must be zeros, then "
                "ones (tokenizer.padding_side = 'left')"
            )
        if not bool(first.any()):
            return None
    return torch.where(torn, -1, first).int().view(-1, 1, 1, 1)


def _may_look(mask: Tensor, q_length: int) -> bool:
    """Whether the host may wait for what the mask holds."""
    if torch.compiler.is_compiling():
        return False
    return mask.device.type == "cpu" or (q_length > 1 and not torch.cuda.is_current_stream_capturing())
