"""PyTorch's attention of a prompt, or of a piece of it, to the tokens up to it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, *, first: Tensor | None = None, scale: float) -> Tensor:
    """PyTorch's attention of the last T tokens of a text to those up to them.

    Args:
        q: [B, H, T, D].
        k, v: [B, G, S, D] of all S tokens.
        first: int32 [B], the first token of each sequence that is not padding. A token before it sees only itself. A
            negative one makes the result NaN.
        scale: multiplied into q @ k^T.

    Returns:
        [B, H, T, D] in q's dtype.
    """
    (new, tokens), gqa = (q.shape[2], k.shape[2]), q.shape[1] != k.shape[1]
    if first is None and new in (1, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, scale=scale, enable_gqa=gqa)
    if first is None and _has_flash(q) and not torch.compiler.is_compiling():  # without a mask in memory
        from torch.nn.attention.bias import causal_lower_right  # imports TorchDynamo: about a second

        aligned = causal_lower_right(new, tokens)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=aligned, scale=scale, enable_gqa=gqa)
    if gqa and q.device.type != "cpu":
        # With a mask, enable_gqa takes PyTorch's slow path, so keys and values are repeated for each query head.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        gqa = False
    j = torch.arange(tokens, device=q.device)
    position = j[tokens - new :].unsqueeze(1)
    mask = j <= position  # [T, S]
    if first is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    mask = mask & (j >= first.view(-1, 1, 1, 1)) | (j == position)  # [B, 1, T, S]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return y.masked_fill((first < 0).view(-1, 1, 1, 1), torch.nan)


def _has_flash(q: Tensor) -> bool:
    """Whether PyTorch's flash attention takes the queries."""
    return q.is_cuda and q.element_size() == 2 and q.shape[3] <= 256
