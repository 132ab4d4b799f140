"""Attention of long prompts in E4M3 (`octavo.ops.fp8_attention`), where that is faster than PyTorch's in BF16."""

from torch import Tensor

from octavo.nn.quantized_attention import quantize_heads
from octavo.ops import fp8_attention, fp8_attention_limit

SHORTEST, FEWEST = 4096, 1024  # tokens of a text, and queries: with fewer, BF16 is faster than FP8 with its casts


def is_faster_in_fp8(q: Tensor, tokens: int, first: Tensor | None) -> bool:
    """Whether the attention of queries [B, H, T, D] to `tokens` tokens is faster in FP8. It takes no padding."""
    long = first is None and tokens >= SHORTEST and q.shape[2] >= FEWEST
    return long and not fp8_attention_limit(q.device, q.shape[3])


def fp8_prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None, *, scale: float
) -> Tensor:
    """Attention of the last T tokens of a text to those up to them, in E4M3.

    Args:
        q: [B, H, T, D] of float32, bfloat16 or float16, quantized here with one scale.
        k, v: [B, G, S, D] of all S tokens, either E4M3 as a cache stores them, or of q's dtype and quantized here.
        scales: of keys and of values in E4M3, float32 with one element each.
        scale: multiplied into q @ k^T.

    Returns:
        [B, H, T, D] in q's dtype, a view of contiguous [B, T, H, D].
    """
    q_data, q_scale = quantize_heads(q)
    if scales is None:
        (k, k_scale), (v, v_scale) = quantize_heads(k), quantize_heads(v)
    else:
        k_scale, v_scale = scales
    return fp8_attention(q_data, k, v, q_scale, k_scale, v_scale, scale=scale, dtype=q.dtype).y
