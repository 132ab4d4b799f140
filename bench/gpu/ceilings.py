"""The ceilings of this GPU: copy bandwidth, GEMM rates at the stack's shapes, and the time of attention.

The errors of fast and of promoted accumulation are measured too, against float64 on the same eight-bit operands.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu.harness import DEVICE, Options, Results, benchmark, decibels, interleaved, medians, sized
from bench.gpu.llama import CONFIG, GEMMS, MLP_WIDTH, TOKENS
from octavo.numerics import ROW, TENSOR, Cast, QTensor, block, group
from octavo.ops import quantize, scaled_mm

CASTS = {"tensor": (TENSOR, TENSOR), "row": (ROW, ROW), "1x128 by 128x128": (group(128), block(128, 128))}


def gemms() -> list[dict[str, Any]]:
    """TFLOP/s of the three GEMMs of each layer, in each way."""
    rows = []
    for name, (n, k) in GEMMS.items():
        for which, (a, b, inner) in {"y": (TOKENS, n, k), "dx": (TOKENS, k, n), "dw": (n, k, TOKENS)}.items():
            ms = medians(interleaved(ways(a, b, inner), rounds=5, repeat=4))
            rate = {way: 2 * a * b * inner / took / 1e9 for way, took in ms.items()}
            rows.append({"layer": name, "gemm": which, "shape": [a, b, inner], "tflops": rate})
    return rows


def ways(m: int, n: int, k: int) -> dict[str, Any]:
    """A GEMM [m, k] @ [n, k]^T in BF16 and in each eight-bit layout that the GPU has, as closures."""
    a, b = (torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16) for rows in (m, n))
    found: dict[str, Any] = {"bf16": lambda: a @ b.t()}
    for name, (left, right) in CASTS.items():
        x, w = quantize(a, Cast(granularity=left)), quantize(b, Cast(granularity=right))
        found[name] = lambda x=x, w=w: scaled_mm(x, w)
        if left in (TENSOR, ROW):
            found[f"{name}, fast"] = lambda x=x, w=w: scaled_mm(x, w, fast_accumulation=True)
    return found


def attention() -> float:
    """Milliseconds of causal attention, forward and backward: 32 query and 8 key heads of 128, 8,192 tokens."""
    heads, kv_heads, d = CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim
    shapes = ((1, TOKENS, n, d) for n in (heads, kv_heads, kv_heads))
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    dy = torch.randn_like(q)

    def step() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(y, inputs, dy)

    return medians(interleaved({"attention": step}, rounds=8, repeat=3))["attention"]


DATA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "log-normal channels": lambda x: x * torch.randn(x.shape[1], device=x.device).exp(),
    "all of one sign": lambda x: x.abs(),
}


def accumulation() -> list[dict[str, Any]]:
    """dB of a GEMM's result against float64 on the same operands, and of the whole (quantization and all)."""
    torch.manual_seed(0)
    rows = []
    for data, make in DATA.items():
        for k in sized((4096, 8192, 28672), (256,)):
            x, w = (make(torch.randn(sized(2048, 64), k, device=DEVICE)) for _ in range(2))
            a, b = (quantize(t, Cast(granularity=ROW)) for t in (x, w))
            same, exact = wide(a) @ wide(b).t(), x.double() @ w.double().t()
            row: dict[str, Any] = {"data": data, "k": k}
            for name, fast in (("fast", True), ("promoted", False)):
                y = scaled_mm(a, b, out_dtype=torch.float32, fast_accumulation=fast)
                row[name] = {"gemm": decibels(same, y), "whole": decibels(exact, y)}
            rows.append(row)
    return rows


def wide(q: QTensor) -> torch.Tensor:
    return q.data.double() * q.scale.double()


@benchmark()
def main(_: Options) -> Results:
    x = torch.randn(TOKENS * 2 * MLP_WIDTH, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    ms = medians(interleaved({"copy": lambda: y.copy_(x)}, rounds=8, repeat=4))["copy"]
    copy = 4 * x.numel() / ms / 1e9  # TB/s, read and written
    yield "gpu_ceilings", {"copy": copy, "gemm": gemms(), "attention_ms": attention(), "accumulation": accumulation()}
