"""Causal attention and its gradient in float64: exact, and with each rounding to E4M3 by ml_dtypes."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from attention_oracle import wide
from torch import Tensor

from octavo.nn.attention_layers import attend_fp8
from octavo.numerics import TENSOR, Cast
from octavo.ops import fp8_attention, fp8_attention_backward, quantize

P_SCALE = 2.0**-8


class Quantized(NamedTuple):
    """A tensor [B, T, H, D] in E4M3 as [B, H, T, D], with its scale [1, 1]."""

    data: Tensor
    scale: Tensor

    @property
    def wide(self) -> np.ndarray:
        return wide(self.data) * float(self.scale)


def quantized(x: Tensor) -> Quantized:
    """x [B, H, T, D] quantized as a whole."""
    by_token = x.transpose(1, 2)
    found = quantize(by_token.reshape(-1, by_token.shape[2] * by_token.shape[3]), Cast(granularity=TENSOR))
    return Quantized(found.data.view(by_token.shape).transpose(1, 2), found.scale)


def given(batch, heads, kv_heads, tokens, keys, dim=128, device="cpu"):
    """q, k, v and dy in BF16, of different magnitudes."""
    shapes = (heads, tokens), (kv_heads, keys), (kv_heads, keys), (heads, tokens)
    factors = 2.0, 1.0, 0.3, 1e-4
    return tuple(
        (factor * torch.randn(batch, rows, count, dim, device=device)).bfloat16().transpose(1, 2)
        for factor, (count, rows) in zip(factors, shapes, strict=True)
    )


def exact(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dq, dk and dv of unrounded tensors, float64."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    y = F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)
    return [y.detach(), *torch.autograd.grad(y, wide, dy.double())]


def gradients(x, scales, attend=attend_fp8):
    """y, dq, dk and dv of the layers' attention."""
    leaves = [t.detach().clone().requires_grad_() for t in x[:3]]
    y = attend(*leaves, scales)
    return [y.detach(), *torch.autograd.grad(y, leaves, x[3])]


def both_passes(x, between=lambda: None):
    """y and the gradients, the tensors that they were computed of, and the largest gradients."""
    q, k, v, dy = map(quantized, x)
    scales = q.scale, k.scale, v.scale
    attended = fp8_attention(q.data, k.data, v.data, *scales)
    out_scales = torch.stack([g.abs().amax().float() / 100 for g in exact(*x)[1:]])
    by_token = dy.data.transpose(1, 2).contiguous()
    between()
    *gradients, amax = fp8_attention_backward(
        by_token, q.data, k.data, v.data, attended.o, attended.stats, dy.scale, *scales, out_scales
    )
    return [attended.y, *gradients], (q, k, v, dy, out_scales), amax


def rounded(q, k, v, dy, out_scales, ds_scale):
    """y, dq, dk and dv as the reference defines them, one head at a time, float64."""
    scale, shared = q.data.shape[3] ** -0.5, q.data.shape[1] // k.data.shape[1]
    y, dq = np.zeros_like(q.wide), np.zeros_like(q.wide)
    dk, dv = np.zeros_like(k.wide), np.zeros_like(v.wide)
    for b in range(y.shape[0]):
        for h in range(y.shape[1]):
            g = h // shared
            s = q.wide[b, h] @ k.wide[b, g].T * scale
            s[~np.tri(*s.shape, s.shape[1] - s.shape[0], dtype=bool)] = -np.inf
            p = np.exp(s - s.max(1, keepdims=True))
            total = p.sum(1, keepdims=True)
            y[b, h] = to_e4m3(to_e4m3(p, P_SCALE) @ v.wide[b, g] / total, float(v.scale))
            p = p / total
            dv[b, g] += to_e4m3(p, P_SCALE).T @ dy.wide[b, h]
            delta = (dy.wide[b, h] * y[b, h]).sum(1, keepdims=True)
            ds = to_e4m3(p * (dy.wide[b, h] @ v.wide[b, g].T - delta) * scale, ds_scale)
            dq[b, h] = ds @ k.wide[b, g]
            dk[b, g] += ds.T @ q.wide[b, h]
    return [y, *(to_e4m3(x, float(s)) for x, s in zip((dq, dk, dv), out_scales, strict=True))]


def to_e4m3(x: np.ndarray, scale: float) -> np.ndarray:
    """x rounded to a number of E4M3 times the scale; larger ones saturate."""
    return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
