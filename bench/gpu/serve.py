"""Serving Llama-3-8B's shape on one GPU: BF16 compiled, torchao's dynamic row-wise FP8, and packed models.

The weights are random, made and packed on the GPU. First the logits in FP8 are compared with BF16's, and those of fused
layers with those of single ones. Then the bytes of the weights are counted, and three things are timed: decode of one
token at a context of 1,024, for 1 and for 64 texts, with BF16 and FP8 caches; prefill of 8,192 tokens to the logits of
the last; and the GEMM of small M alone. Layers are compiled and all modes take turns in one process. Each part is
printed and written when it is done.

    python -m bench.gpu.serve [--layers 32]
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.gpu import llama
from bench.gpu import serve_models as models
from bench.gpu.decoding import decode, runs
from bench.gpu.gemms import SHAPES, beyond_cache, in_turn
from bench.gpu.kernels import copy_ms
from bench.gpu.llama import TOKENS
from bench.gpu.modes import BASE, SERVE, SERVE_GRAPH, SERVE_TORCHAO
from bench.gpu.timing import Captured, against, decibels, interleaved, summary
from bench.options import option
from octavo.numerics import ROW, Cast, QTensor
from octavo.ops import quantize
from octavo.ops.gemm.cublaslt import scaled_mm_cublaslt
from octavo.ops.gemm.kernel import scaled_mm as scaled_mm_triton
from octavo.runtime.fused import fuse

CONTEXT, BATCHES = 1024, (1, 64)
ROWS = (1, 8, 16, 32, 64, 128)
Step = Callable[[], Tensor]


def main() -> None:
    layers = int(option("--layers", "32"))
    torch._dynamo.config.recompile_limit = 64
    result: dict[str, Any] = {"layers": layers}

    def note(section: str, found: Any) -> None:
        result[section] = found
        print(section, found, flush=True)
        record.write("gpu_serve", result)

    wide = models.build_bf16(replace(llama.CONFIG, layers=layers), "cuda")
    packed = models.build_fp8(wide, "cuda")
    note("check", check(wide, packed))
    note("memory", memory(wide, packed))
    for batch in BATCHES:
        note(f"decode {batch}", decode(wide, packed, batch, CONTEXT))
    note("prefill", prefill(wide, packed))
    note("kernels", kernels())


def check(wide: Any, packed: Any) -> dict[str, float]:
    """SQNR of the packed model's logits, fused, against BF16's and against its own before it was fused."""
    ids = torch.randint(0, wide.config.vocab_size, (4, 64), device="cuda")
    exact, apart = models.forward(wide, ids), models.forward(packed, ids)
    with torch.no_grad():
        theirs = wide(ids, use_cache=False, logits_to_keep=1).logits[:, 0]
    assert decibels(theirs, exact) > 40, "`forward` must compute what transformers computes"
    fuse(packed)
    fused = models.forward(packed, ids)
    found = {"fused against bf16": decibels(exact, fused), "fused against layer by layer": decibels(apart, fused)}
    found["layer by layer against bf16"] = decibels(exact, apart)
    assert all(db > 10 for db in found.values()), found
    return found


def memory(wide: Any, packed: Any) -> dict[str, dict[str, int]]:
    """Bytes of the linear layers, the head aside, and of the whole model."""
    return {
        name: {"linears": models.held(model, linears=True), "model": models.held(model, linears=False)}
        for name, model in (("bf16", wide), ("ours", packed))
    }


def prefill(wide: Any, packed: Any) -> dict[str, Any]:
    ids = torch.randint(0, wide.config.vocab_size, (1, TOKENS), device="cuda")
    torch._dynamo.reset()
    compared = {BASE: wide, SERVE: packed}
    if record.installed("torchao"):
        compared[SERVE_TORCHAO] = models.build_torchao(wide, "cuda")
    for model in compared.values():
        models.compile_layers(model)
    steps: dict[str, Step] = {name: partial(models.forward, model, ids) for name, model in compared.items()}
    quality = against(BASE, steps)
    steps[SERVE_GRAPH] = Captured(steps[SERVE])
    times = interleaved(steps, rounds=6, repeat=2, warmup=2)
    return {"tokens": TOKENS, "sqnr": quality, "ms": {name: summary(t) for name, t in times.items()}}


# --- The GEMM alone --------------------------------------------------------------------------------------------


def kernels() -> list[dict[str, Any]]:
    """Microseconds of our kernel, of cuBLASLt, of BF16, and of a copy of the FP8 bytes, by shape and rows."""
    rows = []
    for n, k in SHAPES:
        for m in ROWS:
            row = gemm(m, n, k)
            rows.append(row)
            print(row, flush=True)
        torch.cuda.empty_cache()
    return rows


def gemm(m: int, n: int, k: int) -> dict[str, Any]:
    """One shape."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    count = beyond_cache(n, k)
    wide = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    a, bs = quantize(x, Cast()), [quantize(w, Cast()) for w in wide]

    def ours(b: QTensor) -> Tensor:
        return scaled_mm_triton(a.data, a.scale, b.data, b.scale, None, torch.bfloat16, True)

    def native(b: QTensor) -> Tensor:
        return scaled_mm_cublaslt(a.data, a.scale, ROW, b.data, b.scale, ROW, None, torch.bfloat16, True)

    y, exact = ours(bs[0]), (a.data.double() * a.scale) @ (bs[0].data.double() * bs[0].scale).t()
    assert decibels(exact, y) > 40, f"{m} x {n} x {k}: {decibels(exact, y)} dB"
    moved = count * (n * k + 4 * n + m * (k + 4 + 2 * n))
    times = {"us": in_turn(ours, bs), "cublaslt_us": in_turn(native, bs), "bf16_us": in_turn(lambda w: x @ w.t(), wide)}
    copy = 1e3 * copy_ms(moved) / count
    return {"m": m, "n": n, "k": k, **times, "copy_us": copy, "share": copy / times["us"], "runs": runs(m, n)}


if __name__ == "__main__":
    main()
