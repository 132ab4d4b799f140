"""The linear layers of Llama-3-8B in INT8 beside FP8 and BF16, as `octavo.load` runs them.

    bf16, channel, int8    the layer: the input is quantized in each call
    int8 GEMM              our kernel alone, on operands that are quantized already
    torch._int_mm          cuBLASLt's GEMM of the same operands, to int32 sums without scales; for more than 16 rows

First the layer's output is compared with float64 (`bench.gpu.schemes.check`), and our kernel's sums with those of
torch._int_mm, bit for bit. Then calls take turns: up to 16 rows as CUDA graphs, over weights that together exceed the
L2 cache.

    python -m bench.gpu.int8 [--quick] [--tune]    --quick: one layer, fewer rounds
                                                   --tune: also prints the times of other tilings of our kernel
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.gpu.gemms import beyond_cache
from bench.gpu.llama import GEMMS
from bench.gpu.schemes import check, linear, microseconds, pack
from bench.gpu.timing import interleaved
from octavo.artifact.packed.scheme import CHANNEL, INT8
from octavo.int8 import int8_mm, kernel
from octavo.numerics import QTensor
from octavo.runtime.packed_linear import PackedLinear

ROWS = (1, 16, 512, 8192)
FEW = 16  # rows, up to which the time of a call is that of reading the weight
LEAST_INT_MM = 17  # rows that torch._int_mm takes
Calls = Sequence[Callable[[], Tensor]]
# Of our kernel, for more than 64 rows: BLOCK_M, BLOCK_N, BLOCK_K, stages, warps.
TILINGS = [
    (128, 128, 128, 3, 4), (128, 128, 128, 3, 8), (128, 128, 128, 4, 8), (128, 256, 64, 4, 8), (128, 256, 128, 3, 8),
    (128, 256, 128, 4, 8), (256, 128, 128, 3, 8), (64, 256, 128, 3, 4), (64, 128, 128, 4, 4),
]  # fmt: skip


def main() -> None:
    quick = "--quick" in sys.argv
    layers = {"down": GEMMS["down"]} if quick else GEMMS
    rows = []
    for name, (n, k) in layers.items():
        for m in ROWS:
            rows.append({"layer": name, "m": m, "n": n, "k": k, **measure(m, n, k, 3 if quick else 8)})
            print(rows[-1], flush=True)
            if "--tune" in sys.argv and m > kernel.MAX_SMALL_M:
                tune(m, n, k)
            torch.cuda.empty_cache()
            record.write("gpu_int8", {"rows": rows})


def measure(m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a call of each way, and the worst SQNR of a row of each layer."""
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    wide = [linear(n, k) for _ in range(beyond_cache(n, k) if m <= FEW else 1)]
    packed = {scheme.name: [pack(layer, scheme, x) for layer in wide] for scheme in (CHANNEL, INT8)}
    worst = {name: check(layers[0], x)["worst_db"] for name, layers in packed.items()}
    operands = [operands_of(layer, x) for layer in packed[INT8.name]]
    calls: dict[str, Calls] = {"bf16": [partial(layer, x) for layer in wide]}
    calls |= {name: [partial(layer, x) for layer in layers] for name, layers in packed.items()}
    calls["int8 GEMM"] = [partial(int8_mm, a, b) for a, b in operands]
    if m >= LEAST_INT_MM:
        calls["torch._int_mm"] = [partial(int_mm, a, b) for a, b in operands]
        check_sums(*operands[0])
    return {"us": microseconds(calls, rounds, few=m <= FEW), "worst_db": worst}


def operands_of(layer: PackedLinear, x: Tensor) -> tuple[QTensor, QTensor]:
    a = layer.operand(x)
    assert isinstance(a, QTensor)
    return a, layer.packed_weight()


def int_mm(a: QTensor, b: QTensor) -> Tensor:
    """int32 [M, N]."""
    return torch._int_mm(a.data, b.data.t())  # [M,K] @ [K,N]


def check_sums(a: QTensor, b: QTensor) -> None:
    """Our kernel, with scales of 1, has the sums of torch._int_mm."""
    ones = [QTensor(q.data, torch.ones_like(q.scale), q.format, q.granularity) for q in (a, b)]
    assert torch.equal(int8_mm(*ones, out_dtype=torch.float32), int_mm(a, b).float()), list(a.shape)


def tune(m: int, n: int, k: int) -> None:
    """Print the microseconds of each of `TILINGS`."""
    a, b = (torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for shape in ((m, k), (n, k)))
    scales = [torch.ones(rows, 1, device="cuda") for rows in (m, n)]
    steps = {
        str(each): partial(
            kernel.int8_mm, a, scales[0], b, scales[1], None, None, torch.bfloat16, kernel.Tiling(*each)
        )
        for each in TILINGS
    }  # fmt: skip
    for name, ms in interleaved(steps, rounds=3, repeat=3).items():
        us = 1e3 * statistics.median(ms)
        print(f"    {name}: {us:.1f} us, {2e-6 * m * n * k / us:.0f} TOPS")


if __name__ == "__main__":
    main()
