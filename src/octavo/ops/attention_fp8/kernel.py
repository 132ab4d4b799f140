"""FP8 attention in cuDNN, and the widening of its results as a Triton kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention_fp8 import graphs
from octavo.ops.inductor import launcher
from octavo.ops.launching import allocate
from octavo.ops.triton_support import cdiv

BLOCK = 4096  # elements of a program


def attend(
    q: Tensor, k: Tensor, v: Tensor, scales: Mapping[str, Tensor], p_scale: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `attend_reference`, for q, k and v whose last dimension is contiguous."""
    batch, heads, tokens, dim = q.shape
    o, stats = allocate(q, (batch, tokens, heads, dim)), allocate(q, (batch, heads, tokens), torch.float32)
    amax = allocate(q, (2,), torch.float32)
    descale_s, scale_s = _constants(q.device, p_scale)
    tensors = {"q": q, "k": k, "v": v, **{f"descale_{name}": scales[name] for name in ("q", "k", "v")}}
    tensors |= {"descale_s": descale_s, "scale_s": scale_s, "scale_o": scales["v"].reciprocal()}
    tensors |= {"o": o, "stats": stats, "amax_s": amax[:1], "amax_o": amax[1:]}
    graphs.run("forward", graphs.Shape.of(q, k, v, scale), tensors)
    return widen(o, scales["v"], dtype), o, stats


def attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    stats: Tensor,
    scales: Mapping[str, Tensor],
    p_scale: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same as `attend_backward_reference`, for q, k and v whose last dimension is contiguous, and dy and o over
    memory of [B, T, H, D]."""
    by_token = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v)]
    gradients = [allocate(q, shape) for shape in by_token]
    amax, amax_ds = (allocate(q, (size,), torch.float32) for size in (3, 1))
    descale_s, scale_s = _constants(q.device, p_scale)
    tensors = {"q": q, "k": k, "v": v, "o": o, "dO": dy, "stats": stats, "descale_s": descale_s, "scale_s": scale_s}
    tensors |= {f"descale_{name}": scales[name] for name in ("q", "k", "v", "o", "dO", "dP")}
    tensors |= {f"scale_{name}": scales[name].reciprocal() for name in ("dP", "dQ", "dK", "dV")}
    for i, name in enumerate(("dQ", "dK", "dV")):
        tensors |= {name: gradients[i], f"amax_{name}": amax[i : i + 1]}
    graphs.run("backward", graphs.Shape.of(q, k, v, scale), {**tensors, "amax_dP": amax_ds})
    dq, dk, dv = (widen(g, scales[name], dtype) for g, name in zip(gradients, ("dQ", "dK", "dV"), strict=True))
    return dq, dk, dv, amax


@cache
def _constants(device: torch.device, p_scale: float) -> tuple[Tensor, Tensor]:
    """The scale of the probabilities and its inverse, float32 [1] each."""
    with torch.inference_mode(False):
        return torch.full((1,), p_scale, device=device), torch.full((1,), 1 / p_scale, device=device)


def widen(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """data * scale of a contiguous tensor in E4M3, computed in float32 and rounded once to `dtype`."""
    result = allocate(data, tuple(data.shape), dtype)
    count = data.numel()
    launcher(_widen_kernel, (cdiv(count, BLOCK),))(data, scale, result, count, BLOCK=BLOCK, num_warps=8)
    return result


@triton.jit
def _widen_kernel(data_ptr, scale_ptr, result_ptr, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    x = tl.load(data_ptr + offs, mask, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    tl.store(result_ptr + offs, x.to(result_ptr.dtype.element_ty), mask)
