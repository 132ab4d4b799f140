"""The grouped GEMMs of row scales on a Hopper: our Triton kernel beside PyTorch's CUTLASS kernel and BF16's.

y, dx and dw of the inner layer of Mixtral's experts and of many small ones, with promoted and with fast accumulation,
and with E5M2 gradients, which CUTLASS's kernel does not take. Scales are ones. The SQNR against a BF16 product of the
same operands comes first. Then the kernels take turns, and at last our kernel runs with many tilings. Change `choose`
in octavo.ops.kernels.grouped_gemm by these, and the choice in octavo.ops.dispatch by the table.

    python -m bench.gpu.grouped_rows
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.gpu.harness import decibels, fastest, once
from bench.gpu.moe import SHAPES, Products, Shape, transposed
from octavo.numerics import Cast
from octavo.ops import library_gemms as cutlass
from octavo.ops import quantize
from octavo.ops.kernels import grouped_gemm as ours
from octavo.ops.kernels.grouped_gemm import Tiling, choose, choose_dw, likely_rows
from octavo.ops.launching import compile_only

Product = Callable[[], Tensor]
BF16 = torch.bfloat16
ACCUMULATION = {"promoted": False, "fast": True}
# The rows of both operands in a tile, stages and warps that are worth a try.
FAST = [(128, 256, 3, 8), (256, 128, 4, 8), (256, 128, 3, 8), (128, 128, 4, 8), (128, 128, 3, 4), (128, 128, 2, 4)]
PROMOTED = [(128, 128, 3, 8), (64, 128, 3, 4), (128, 64, 3, 4), (128, 256, 3, 8), (256, 128, 3, 8)]
TILINGS = {"y": ("fast", FAST), "dw": ("promoted", PROMOTED)}


class Gemm(NamedTuple):
    """A product of eight-bit operands.

    Attributes:
        wide: it in BF16.
        cutlass: it by PyTorch's kernel, for a way to accumulate; None if the kernel does not take the formats.
        ours: it by our kernel, for a way to accumulate and a tiling.
        chosen: its tiling for a way to accumulate.
    """

    wide: Product
    cutlass: Callable[..., Tensor] | None
    ours: Callable[[bool, Tiling | None], Tensor]
    chosen: Callable[[bool], Tiling]


def main() -> None:
    result = {name: measure(name, shape) for name, shape in SHAPES.items()}
    print(record.write("gpu_grouped_rows", {"shapes": result}))


def measure(name: str, shape: Shape) -> dict[str, Any]:
    p = Products(shape)
    gemms = gemms_of(p)
    with compile_only():  # in several threads
        for gemm, found in gemms.items():
            for how, tiling in [*((how, None) for how in ACCUMULATION), *tilings_of(gemm)]:
                found.ours(ACCUMULATION[how], tiling)
    ways = {f"{gemm}, bf16": product for gemm, product in p.in_bf16().items()}
    db = {}
    for gemm, found in gemms.items():
        wide = found.wide()
        for way, product in ways_of(gemm, found).items():
            db[way], ways[way] = round(decibels(wide, product()), 2), product
            assert db[way] > 20, (way, db[way])  # NaN is not
    tflops = p.tflops(ways)
    print(f"{name}: {shape}")
    for way, rate in tflops.items():
        print(f"    {way:28} {rate:8.1f} TFLOP/s  {db.get(way, '')}", flush=True)
    tilings = {f"{gemm}, {how}": timed(gemms[gemm], how, tried, p.flops) for gemm, (how, tried) in TILINGS.items()}
    return {"shape": vars(shape), "db": db, "gemm_tflops": tflops, "tilings": tilings}


def gemms_of(p: Products) -> dict[str, Gemm]:
    e5m2 = quantize(p.dy, Cast("e5m2", scale="pow2"))
    return {
        "y": of_rows(p.x_q.data, p.w_q.data, p.offsets),
        "dx": of_rows(p.dy_q.data, p.wt_q.data, p.offsets),
        "dw": of_columns(p.dy_t, p.x_t, p.offsets),
        "dx of e5m2": of_rows(e5m2.data, p.wt_q.data, p.offsets),
        "dw of e5m2": of_columns(transposed(e5m2), p.x_t, p.offsets),
    }


def of_rows(a: Tensor, b: Tensor, offsets: Tensor) -> Gemm:
    """a [M, K] with b [E, N, K]."""
    operands = a, torch.ones_like(a[:, :1], dtype=torch.float32), b, torch.ones_like(b[..., :1], dtype=torch.float32)
    return Gemm(
        lambda: F.grouped_mm(a.to(BF16), b.to(BF16).transpose(1, 2), offs=offsets),
        partial(cutlass.grouped_mm, *operands, offsets) if a.dtype == b.dtype else None,
        partial(ours.grouped_mm, *operands, offsets, BF16),
        partial(choose, likely_rows(len(a), len(b)), device=a.device),
    )


def of_columns(a: Tensor, b: Tensor, offsets: Tensor) -> Gemm:
    """a [N, M] with b [K, M]."""
    scale = torch.ones(len(offsets), len(a), 1, device=a.device)
    return Gemm(
        lambda: F.grouped_mm(a.to(BF16), b.to(BF16).t(), offs=offsets),
        partial(cutlass.grouped_mm_dw, a, scale, b, offsets) if a.dtype == b.dtype else None,
        partial(ours.grouped_mm_dw, a, scale, b, offsets, BF16),
        partial(choose_dw, len(b), a.shape[1], len(offsets), device=a.device),
    )


def ways_of(name: str, gemm: Gemm) -> dict[str, Product]:
    ways: dict[str, Product] = {}
    for how, fast in ACCUMULATION.items():
        if gemm.cutlass is not None:
            ways[f"{name}, cutlass, {how}"] = partial(gemm.cutlass, fast=fast)
        ways[f"{name}, triton, {how}"] = partial(gemm.ours, fast, None)
    return ways


def tilings_of(gemm: str) -> list[tuple[str, Tiling | None]]:
    how, tried = TILINGS.get(gemm, ("", []))
    return [(how, Tiling(*each)) for each in tried]


def timed(gemm: Gemm, how: str, tried: list[tuple[int, int, int, int]], flops: float) -> list[tuple[list[int], float]]:
    """TFLOP/s of the chosen tiling, then of the best."""
    fast, chosen = ACCUMULATION[how], gemm.chosen(ACCUMULATION[how])

    def ms(tiling: Tiling) -> float:
        product = partial(gemm.ours, fast, tiling)
        product()
        return median(once(product, 4) for _ in range(3))

    found = [
        (list(tiling), round(flops / took / 1e9, 1))
        for tiling, took in fastest(chosen, map(Tiling._make, tried), ms, 4)
    ]
    for tiling, rate in found:
        print(f"    {how} {tiling!s:22} {rate:8.1f} TFLOP/s", flush=True)
    return found


if __name__ == "__main__":
    main()
