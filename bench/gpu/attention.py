"""Causal attention in FP8 beside PyTorch's in BF16: one layer, forward and both passes, and the prefill of a Llama.

The heads are Llama-3-8B's: 32 of queries and 8 of keys, of 128 elements, and of 64. Results and gradients come first,
against float64 on one group of heads. `cuDNN alone` begins with operands in E4M3; the other modes of FP8 begin in BF16,
with their casts, but for the keys and values of an FP8 cache. A step is a CUDA graph, so that the time of the host does
not count. The prefill is that of `bench.gpu.serve`.

    python -m bench.gpu.attention
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu import llama
from bench.gpu.harness import DEVICE, Options, Results, Step, benchmark, captured, decibels, interleaved, medians, sized
from bench.gpu.serve import prefill_fp8_attention
from octavo.inference.kv_cache import fp8_prompt_attention
from octavo.nn.attention_layers import GradientScales, attend_fp8, quantize_heads
from octavo.ops import fp8_attention, fp8_attention_backward

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKENS = sized((2048, 4096, 8192, 32768), (256,))
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
ROWS = 1024  # queries that the oracle computes at a time
OURS, CACHED, ALONE = "ours", "ours, FP8 KV cache", "ours, cuDNN alone"
Operand = tuple[Tensor, Tensor]  # [B, H, T, D] in E4M3 and its scale


def measure(tokens: int, dim: int = DIM) -> dict[str, Any]:
    """The SQNR of each mode, and its milliseconds forward, and of both passes."""
    torch.manual_seed(0)
    shapes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, dy = (torch.randn(1, tokens, n, dim, device=DEVICE).bfloat16().transpose(1, 2) for n in shapes)
    passes = modes(q, k, v, dy)
    cell: dict[str, Any] = {"tokens": tokens}
    cell["db"] = {name: quality(*run(), q, k, v, dy) for name, run in passes["both"].items()}
    repeat = max(2, min(20, 200_000_000 // tokens**2))
    for which, steps in passes.items():
        times = interleaved({name: captured(step) for name, step in steps.items()}, rounds=10, repeat=repeat)
        cell[which] = {"rounds": times, "ms": medians(times)}
    return cell


def modes(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> dict[str, dict[str, Step]]:
    """The steps of each pass by mode. A step of both passes returns y and the gradients."""
    forward, both = dict[str, Step](), dict[str, Step]()
    in_bf16 = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    for name, backend in BACKENDS.items():
        call = sdpa_kernel(backend)(in_bf16)
        forward[f"BF16, {name}"] = partial(torch.no_grad()(call), q, k, v)
        both[f"BF16, {name}"] = partial(train, call, q, k, v, dy)
    call = partial(attend_fp8, gradients=GradientScales(DEVICE))
    for _ in range(2):  # the first pass has no scales of earlier ones
        train(call, q, k, v, dy)
    forward[OURS] = partial(fp8_prompt_attention, q, k, v, scale=q.shape[3] ** -0.5)
    both[OURS] = partial(train, call, q, k, v, dy)
    operands = [quantize_heads(x) for x in (q, k, v, dy)]
    (k_data, k_scale), (v_data, v_scale) = operands[1:3]
    stored = k_data.contiguous(), v_data.contiguous(), (k_scale, v_scale)  # as a cache holds them: [B, G, S, D]
    forward[CACHED] = partial(fp8_prompt_attention, q, *stored, scale=q.shape[3] ** -0.5)
    forward[ALONE], both[ALONE] = partial(alone, *operands[:3]), partial(alone, *operands)
    return {"forward": forward, "both": both}


def train(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """y, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    y = call(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def alone(q: Operand, k: Operand, v: Operand, dy: Operand | None = None) -> tuple[Tensor, ...]:
    """cuDNN with the widening of its results, of operands in E4M3: y, and with dy dq, dk and dv."""
    data, scales = (q[0], k[0], v[0]), (q[1], k[1], v[1])
    y, o, stats = fp8_attention(*data, *scales)
    if dy is None:
        return (y,)
    out_scales = torch.full((3,), 0.02, device=DEVICE)  # of Gaussian data
    g, g_scale = dy
    *gradients, _ = fp8_attention_backward(g.transpose(1, 2), *data, o, stats, g_scale, *scales, out_scales)
    return y, *gradients


def quality(y: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *given: Tensor) -> dict[str, float]:
    """The SQNR of a mode on the first group of heads, in dB."""
    group = HEADS // KV_HEADS
    q, k, v, dy = (x[0, : x.shape[1] // KV_HEADS] for x in given)
    expected = attention64(q, k[0], v[0], dy)
    found = y[0, :group], dq[0, :group], dk[0, 0], dv[0, 0]
    named = zip(("y", "dq", "dk", "dv"), expected, found, strict=True)
    return {name: decibels(exact, actual.double()) for name, exact, actual in named}


def attention64(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """y and dq [H, T, D], dk and dv [T, D], of q and dy [H, T, D] and of the k and v [T, D] that all heads share,
    by autograd in float64, some queries at a time."""
    wide_q, wide_k, wide_v = wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    y, places = torch.empty_like(q, dtype=torch.float64), torch.arange(q.shape[1], device=q.device)
    for head, rows in product(range(len(q)), torch.split(places, ROWS)):
        seen = places <= rows[:, None]
        found = F.scaled_dot_product_attention(wide_q[head, rows], wide_k, wide_v, attn_mask=seen)
        torch.autograd.backward(found, dy[head, rows].double())
        y[head, rows] = found.detach()
    gradients: list[Any] = [x.grad for x in wide]
    return y, *gradients


@benchmark()
def main(_: Options) -> Results:
    result: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "cells": [], "cells_of_64": []}
    for tokens, (name, dim) in product(TOKENS, (("cells", DIM), ("cells_of_64", 64))):
        result[name].append(measure(tokens, dim))
        yield "gpu_attention", result
    yield "gpu_attention", result | {"prefill": prefill_fp8_attention(llama.CONFIG)}
