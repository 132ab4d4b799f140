"""The attention "octavo" for models of transformers, and its mask.

It works with `QuantizedKVCache`, with another cache, and without a cache. transformers' own masks have an entry for
each pair of query and key. This mask is the index of the first token in each sequence that is not padding: enough for
left padding, and a decoding step need not build it. Importing this module imports transformers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from octavo.kv_cache.model import Appended, UnservedError
from octavo.kv_cache.prompts import prompt_attention
from octavo.ops import cached_attention

ATTENTION = "octavo"


def register_attention() -> None:
    """Register "octavo" as an attention, and its mask, in transformers."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, left_padding)


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
    """The function that transformers calls; returns [B, T, H, D]."""
    if dropout or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UnservedError("the attention 'octavo' has no dropout, no softcap and no sinks: use 'sdpa' or 'eager'")
    if attention_mask is not None and (attention_mask.dtype, *attention_mask.shape[1:]) != (torch.int32, 1, 1, 1):
        raise ValueError(
            "the attention 'octavo' takes a two-dimensional attention_mask (left padding), not a mask of queries by "
            "keys: use 'sdpa' or 'eager'"
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
    """The mask of the attention "octavo": the index of each sequence's first token, int32 [B, 1, 1, 1], or None.

    A mask other than left padding is an error. Reading the mask on the host would make every decoding step on a GPU
    wait; there, such a mask gives -1 instead, and attention returns NaN.
    """
    # Qwen2-MoE without a sliding window has one of 0, and asks for its mask although no layer reads it.
    whole = local_size is not None and (kv_length <= local_size or local_size == 0)
    causal = mask_function is causal_mask_function or whole
    if use_vmap or not causal:
        raise UnservedError(
            "the attention 'octavo' is causal over all tokens, without sliding windows, chunks or packed sequences: "
            "use 'sdpa' or 'eager'"
        )
    if attention_mask is None:
        return None
    pos = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    first = attention_mask.int().argmax(1)
    wrong = ((pos >= first.unsqueeze(1)) & (pos < q_offset + q_length) & ~attention_mask.bool()).any(1)
    if _host_may_read(attention_mask, q_length):
        if bool(wrong.any()):
            raise ValueError(
                "the attention 'octavo' takes padding on the left only: each row of attention_mask must be zeros, then "
                "ones (tokenizer.padding_side = 'left')"
            )
        if not bool(first.any()):
            return None
    return torch.where(wrong, -1, first).int().view(-1, 1, 1, 1)


def _host_may_read(mask: Tensor, q_length: int) -> bool:
    """Whether the host may read the mask: on the CPU, or in a prompt, but not while a graph is captured or compiled."""
    if torch.compiler.is_compiling():
        return False
    return mask.device.type == "cpu" or (q_length > 1 and not torch.cuda.is_current_stream_capturing())
