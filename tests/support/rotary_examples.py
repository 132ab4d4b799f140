"""Arguments of `rotate_append`: the queries, keys and values of new tokens as views of one buffer, and a cache."""

import torch
from attention_oracle import DTYPES


def tables(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B or 1, T, D], each angle twice."""
    batch, tokens, dim = shape
    angle = 3 * torch.randn(batch, tokens, dim // 2)
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def projections(batch: int, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
    """q [B, T, H * D], k and v [B, T, G * D] as parts of one tensor."""
    widths = [n * dim for n in (heads, kv_heads, kv_heads)]
    return (2 * torch.randn(batch, tokens, sum(widths))).to(dtype).split(widths, -1)


def cache(kind: str, batch: int, kv_heads: int, room: int, dim: int, used: int) -> tuple:
    """keys, values, k_scale, v_scale, length and clipped; some of `projections` saturate."""
    data = (torch.zeros(batch, kv_heads, room, dim, dtype=DTYPES[kind]) for _ in range(2))
    scales = (None if kind == "bf16" else 0.005 + 0.02 * torch.rand(kv_heads) for _ in range(2))
    return *data, *scales, torch.tensor(used), torch.zeros(2, dtype=torch.int64)
