"""Causal attention in E4M3 with its gradient (`octavo.ops.fp8_attention`).

q, k, v and dy are quantized with one scale each, which is computed from the tensor. cuDNN rounds dq, dk and dv to E4M3
as it writes them, so their scales must be known before. They come from the largest magnitudes of earlier backward
passes, with room for `HEADROOM` times as much. For the first pass these magnitudes are estimated:

    |dq| <= scale * amax(dy) * amax(v) * amax(k)        |dk| the same with amax(q)        |dv| <= 4 * amax(dy)
"""

from typing import Any

import torch
from torch import Tensor

from octavo.nn.layer_limits import differentiable_once
from octavo.nn.scale_buffers import ScaleBuffers
from octavo.numerics import TENSOR, Cast
from octavo.numerics.formats import E4M3
from octavo.ops import fp8_attention, fp8_attention_backward, quantize
from octavo.ops.attention_fp8 import GRADIENT_TILE

CAST = Cast(granularity=TENSOR)
SHORTEST = 8192  # tokens of a text: with fewer, both passes are faster in BF16, casts included
HEADROOM = 4.0  # E4M3 is as dense in each binade, so that room costs little
DECAY = 0.9  # of the largest magnitudes, in each backward pass


class GradientScales(ScaleBuffers):
    """The scales of the gradients of one attention.

    Args:
        device: of the scales.
        shortest: tokens of the shortest text whose attention runs in E4M3.

    Attributes:
        amax: float32 [3], the largest magnitudes of dq, dk and dv in earlier backward passes, decayed; zeros before the
            first. It is not in the `state_dict`: a resumed run begins as the first pass does.
    """

    amax: Tensor

    def __init__(self, device: torch.device | str | None = None, shortest: int = SHORTEST) -> None:
        super().__init__()
        self.shortest = shortest
        self.register_buffer("amax", torch.zeros(3, device=device), persistent=False)

    def takes(self, q: Tensor, k: Tensor, dropout: float = 0.0) -> bool:
        """Whether the attention of q [B, H, T, D] to k [B, G, S, D] runs in E4M3."""
        whole = q.device.type == "cpu" or q.shape[2] % GRADIENT_TILE == 0
        return not dropout and k.shape[2] == q.shape[2] >= self.shortest and whole

    def scales(self, expected: Tensor) -> Tensor:
        """float32 [3]; `expected` are the largest magnitudes to expect without earlier passes."""
        return torch.where(self.amax > 0, self.amax, expected) * (HEADROOM / E4M3.max)

    def observe(self, amax: Tensor) -> None:
        """Record the largest magnitudes of a backward pass. Those that are not finite are ignored."""
        with torch.no_grad():
            kept = self.amax * DECAY
            self.amax.copy_(torch.where(amax.isfinite(), torch.maximum(kept, amax), kept))


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [B, H, T, D] of float32, bfloat16 or float16 to E4M3 with one scale.

    Returns:
        [B, H, T, D], a view of contiguous [B, T, H, D], and the scale float32 [1, 1]. Where x is such a view too, it is
        not copied.
    """
    by_token = x.transpose(1, 2)
    found = quantize(by_token.reshape(-1, by_token.shape[2] * by_token.shape[3]), CAST)
    return found.data.view(by_token.shape).transpose(1, 2), found.scale


def attend_fp8(q: Tensor, k: Tensor, v: Tensor, gradients: GradientScales, *, scale: float | None = None) -> Tensor:
    """softmax(scale * q k^T) v in E4M3, where token t sees the tokens 0..t. Differentiable.

    Args:
        q: [B, H, T, D] of float32, bfloat16 or float16.
        k, v: [B, G, T, D] of q's dtype, with H a multiple of G.
        gradients: the scales of dq, dk and dv.
        scale: 1 / sqrt(D) by default.

    Returns:
        [B, H, T, D] in q's dtype, a view of contiguous [B, T, H, D].

    Raises:
        ValueError: for another shape or dtype.
        RuntimeError: the GPU, its libraries or the head size do not have FP8 attention.
    """
    y: Tensor = _Attention.apply(q, k, v, gradients, scale)  # type: ignore[no-untyped-call]
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gradients: GradientScales, scale: float | None) -> Tensor:
        (q_data, q_scale), (k_data, k_scale), (v_data, v_scale) = (quantize_heads(x) for x in (q, k, v))
        scales = q_scale, k_scale, v_scale
        y, o, stats = fp8_attention(q_data, k_data, v_data, *scales, scale=scale, dtype=q.dtype)
        ctx.gradients, ctx.scale, ctx.dtype = gradients, scale, q.dtype
        ctx.save_for_backward(q_data, k_data, v_data, o, stats, *scales)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, k, v, o, stats, q_scale, k_scale, v_scale = ctx.saved_tensors
        gradients: GradientScales = ctx.gradients
        data, dy_scale = quantize_heads(dy)
        dy_amax = dy_scale.view(1) * E4M3.max
        factor = (q.shape[3] ** -0.5 if ctx.scale is None else ctx.scale) * E4M3.max**2 * v_scale.view(1)
        expected = torch.cat((factor * k_scale.view(1), factor * q_scale.view(1), torch.full_like(dy_amax, 4.0)))
        out_scales = gradients.scales(expected * dy_amax)
        operands = data.transpose(1, 2), q, k, v, o, stats, dy_scale, q_scale, k_scale, v_scale, out_scales
        dq, dk, dv, amax = fp8_attention_backward(*operands, scale=ctx.scale, dtype=ctx.dtype)
        gradients.observe(amax)
        return dq, dk, dv, None, None
