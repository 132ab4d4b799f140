"""FP8 weights with BF16 inputs beside BF16 and beside FP8 inputs: the linear layers of Llama-3-8B, and a decoding step.

First each way is compared with the float64 product of its operands. Then calls are timed as CUDA graphs, over weights
that together exceed the L2 cache. The ways are

    bf16           torch's product
    w8a8           octavo.ops.scaled_mm, with the quantization of x
    weight-only    octavo.ops.weight_only_mm, as it chooses
    kernel, native and kernel, bytes       its kernel, which widens E4M3 by the GPU's conversion, or by the integer
                                           instructions of older GPUs
    dequantized    the weight widened to BF16, then torch's product

A decoding step computes one token of one text after 1,023 others, in a Llama-3-8B with random weights. Every mode is
one CUDA graph: compiled layers of BF16, W8A8 and weight-only; and weight-only in eager code, with the attention of
transformers.

    python -m bench.gpu.weight_only [--layers 32] [--quick]      --quick: two shapes, fewer rows
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.gpu import llama
from bench.gpu import serve_models as models
from bench.gpu.gemms import beyond_cache, in_turn
from bench.gpu.llama import GEMMS
from bench.gpu.modes import BASE, W8A8, WEIGHT_ONLY, WEIGHT_ONLY_EAGER
from bench.gpu.timing import Captured, against, decibels, interleaved, summary
from bench.options import option
from octavo.artifact.packed.scheme import WEIGHT
from octavo.numerics import ROW, QTensor
from octavo.ops import find_weight_only_backend, quantize, scaled_mm, weight_only_mm
from octavo.ops.weight_only import kernel
from octavo.recipe import ROW_W, ROW_X
from octavo.runtime.fused import fuse

ROWS = (1, 4, 16, 64, 128, 256, 512, 4096)
CONTEXT = 1024
LEAST_DB = {"w8a8": 25.0}  # against the float64 product of x and the packed weight; 50 dB is BF16's
Way = Callable[[QTensor], Tensor]


def main() -> None:
    quick = "--quick" in sys.argv
    layers = int(option("--layers", "32"))
    result: dict[str, Any] = {"layers": layers, "gemms": [], "decode": decode(layers)}
    print(result["decode"], flush=True)
    shapes = {name: GEMMS[name] for name in ("o", "down")} if quick else GEMMS
    for (name, (n, k)), m in product(shapes.items(), (1, 16, 64, 512) if quick else ROWS):
        result["gemms"].append({"layer": name, **gemm(m, n, k)})
        print(result["gemms"][-1], flush=True)
        record.write("gpu_weight_only", result)


# --- The GEMMs -------------------------------------------------------------------------------------------------


def ways(x: Tensor) -> dict[str, Way]:
    """The ways to multiply x [M, K] with a packed weight [N, K]."""

    def dequantized(w: QTensor) -> Tensor:
        return x @ kernel.dequantize(w.data, w.scale, ROW, torch.bfloat16).t()

    def by_kernel(native: bool, w: QTensor) -> Tensor:
        return kernel.weight_only_mm(x, w.data, w.scale, ROW, None, None, native=native)

    return {
        "w8a8": lambda w: scaled_mm(quantize(x, ROW_X), w, fast_accumulation=True),
        "weight-only": lambda w: weight_only_mm(x, w),
        "kernel, native": partial(by_kernel, True),
        "kernel, bytes": partial(by_kernel, False),
        "dequantized": dequantized,
    }


def operands(m: int, n: int, k: int) -> tuple[Tensor, list[Tensor], list[QTensor]]:
    """x [M, K], and weights [N, K] in BF16 and packed, which together are too large for the L2 cache."""
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    wide = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(beyond_cache(n, k))]
    return x, wide, [quantize(w, ROW_W) for w in wide]


def gemm(m: int, n: int, k: int) -> dict[str, Any]:
    """Microseconds of each way, and the worst SQNR of a row."""
    x, wide, packed = operands(m, n, k)
    exact = x.double() @ packed[0].dequantize().double().t()
    worst, us = {}, {"bf16": in_turn(lambda w: x @ w.t(), wide)}
    for name, way in ways(x).items():
        worst[name] = min(decibels(*rows) for rows in zip(exact, way(packed[0]).double(), strict=True))
        assert worst[name] > LEAST_DB.get(name, 45), f"{name}, {m} x {n} x {k}: {worst[name]:.1f} dB in a row"
        us[name] = in_turn(way, packed)
    runs = find_weight_only_backend(x.device, x.dtype, ROW, m).name
    return {"m": m, "n": n, "k": k, "us": us, "worst_db": worst, "runs": runs}


# --- A decoding step -------------------------------------------------------------------------------------------


def decode(layers: int) -> dict[str, Any]:
    """Milliseconds of a step of each mode, and its SQNR against BF16's logits."""
    wide = models.build_bf16(replace(llama.CONFIG, layers=layers), "cuda")
    ids = torch.randint(0, wide.config.vocab_size, (1, 1), device="cuda")
    stores = models.random_stores(wide.config, 1, CONTEXT, "cuda", "bf16")
    caches = [models.PlainCache(store) for store in stores["bf16"]]
    packed = {W8A8: models.build_fp8(wide, "cuda"), WEIGHT_ONLY: models.build_fp8(wide, "cuda", WEIGHT)}
    for model in packed.values():
        fuse(model)
    steps = {WEIGHT_ONLY_EAGER: capture(packed[WEIGHT_ONLY], ids, caches)}
    for name, model in {BASE: wide, **packed}.items():
        models.compile_layers(model)
        steps[name] = capture(model, ids, caches)
    quality = against(BASE, steps)
    times = interleaved(dict(steps), rounds=8, repeat=8, warmup=2)
    return {"context": CONTEXT, "sqnr": quality, "rounds": times, "ms": {name: summary(t) for name, t in times.items()}}


def capture(model: Any, ids: Tensor, caches: list[Any]) -> Captured:
    return Captured(partial(models.forward, model, ids, CONTEXT - 1, caches))


if __name__ == "__main__":
    main()
