"""Attention over a cache in float64, a query at a time, from bytes that ml_dtypes reads.

And arguments of `rotate_append`: the queries, keys and values of new tokens as views of one buffer, and a cache.
"""

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def wide(data: Tensor) -> np.ndarray:
    """What is stored, as float64."""
    data = data.cpu()
    if data.dtype == torch.float8_e4m3fn:
        return data.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return data.double().numpy()


def stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> np.ndarray:
    """What x [B, G, T, D] is stored as, float64: float32 arithmetic and one rounding."""
    if scale is None:
        return x.to(dtype).double().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        y = x.float().numpy() * (np.float32(1) / scale.numpy()).reshape(-1, 1, 1)
        if dtype == torch.int8:
            return np.nan_to_num(np.clip(np.rint(y), -127, 127), nan=0.0).astype(np.float64)
        return np.clip(y, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def attention64(q, keys, values, k_scale, v_scale, used, first, scale):
    """The result [B, H, T, D], and the same of |v|, to which its error is compared."""
    x, k, v = q.double().cpu().numpy(), wide(keys), wide(values)
    batch, heads, new, _ = x.shape
    shared = heads // k.shape[1]
    actual, size = np.zeros_like(x), np.zeros_like(x)
    for b in range(batch):
        for h in range(heads):
            g = h // shared
            ks, vs = (1.0 if s is None else float(s[g]) for s in (k_scale, v_scale))
            for t in range(new):
                low, high = 0 if first is None else first[b], used - new + t + 1
                if low < high:
                    s = k[b, g, low:high] @ x[b, h, t] * (ks * scale)
                    p = np.exp(s - s.max())
                    p /= p.sum()
                    actual[b, h, t] = p @ v[b, g, low:high] * vs
                    size[b, h, t] = p @ np.abs(v[b, g, low:high]) * vs
    return torch.from_numpy(actual), torch.from_numpy(size)


def given(kind, batch, heads, kv_heads, new, dim, room, dtype=torch.bfloat16):
    """q, keys, values and scales: magnitudes that differ by head, every stored byte filled."""
    q = (torch.randn(batch, heads, new, dim) * 2).to(dtype)
    if kind == "bf16":
        return q, *(torch.randn(batch, kv_heads, room, dim).to(dtype) for _ in range(2)), None, None
    low = 0.004 if kind == "int8" else 0.001
    scales = (low * 4 ** torch.rand(kv_heads) for _ in range(2))
    data = (torch.randint(-127, 128, (batch, kv_heads, room, dim), dtype=torch.int8) for _ in range(2))
    if kind == "fp8":  # -127 as a byte is -0.0137, 126 is 448: no NaN among them, subnormals too
        data = (d.clamp(-127, 126).where(d != -1, 0).view(torch.float8_e4m3fn) for d in data)
    k, v = data
    k_scale, v_scale = scales
    return q, k, v, k_scale, v_scale


def every_bf16() -> Tensor:
    """[1, 2, 64, 512]: every BF16 there is, NaN and infinities included."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1, 2, 64, 512)


def tables(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B or 1, T, D], each angle twice."""
    batch, tokens, dim = shape
    angle = 3 * torch.randn(batch, tokens, dim // 2)
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def projections(batch: int, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
    """q [B, T, H * D], k and v [B, T, G * D] as parts of one tensor."""
    widths = [n * dim for n in (heads, kv_heads, kv_heads)]
    return (2 * torch.randn(batch, tokens, sum(widths))).to(dtype).split(widths, -1)


def new_cache(kind: str, batch: int, kv_heads: int, room: int, dim: int, used: int) -> tuple:
    """keys, values, k_scale, v_scale, length and clipped; some of `projections` saturate."""
    data = (torch.zeros(batch, kv_heads, room, dim, dtype=DTYPES[kind]) for _ in range(2))
    scales = (None if kind == "bf16" else 0.005 + 0.02 * torch.rand(kv_heads) for _ in range(2))
    return *data, *scales, torch.tensor(used), torch.zeros(2, dtype=torch.int64)
