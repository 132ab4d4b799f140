"""Queries, keys and values in E4M3, as `fp8_attention` takes them."""

from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import TENSOR
from octavo.ops.quantization import quantize

CAST = Cast(granularity=TENSOR)


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [B, H, T, D] of float32, bfloat16 or float16 to E4M3 with one scale.

    Returns:
        [B, H, T, D], a view of contiguous [B, T, H, D], and the scale float32 [1, 1]. Where x is such a view too, it is
        not copied.
    """
    by_token = x.transpose(1, 2)
    found = quantize(by_token.reshape(-1, by_token.shape[2] * by_token.shape[3]), CAST)
    return found.data.view(by_token.shape).transpose(1, 2), found.scale
