"""The grouped GEMMs of row scales on a Hopper: our Triton kernel beside PyTorch's CUTLASS kernel and BF16's.

y, dx and dw of the inner layer of Mixtral's experts and of many small ones, with promoted and with fast accumulation,
and with E5M2 gradients, which CUTLASS's kernel does not take. Scales are ones. The SQNR against a BF16 product of the
same operands comes first, and must be above 20 dB. Then the kernels take turns. Change the choice in
octavo.ops.dispatch by the table. `bench.gpu.tune grouped-rows` tries many tilings of our kernel.

    python -m bench.gpu.grouped_rows
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.gpu.harness import each_decibels, parser_of, show
from bench.gpu.moe import SHAPES, Products, Shape, transposed
from octavo.numerics import ROW, Cast
from octavo.ops import library_gemms as cutlass
from octavo.ops import quantize
from octavo.ops.kernels import grouped_gemm as ours
from octavo.ops.launching import Operands, compile_only

Product = Callable[[], Tensor]
BF16 = torch.bfloat16
ACCUMULATION = {"promoted": False, "fast": True}


class Gemm(NamedTuple):
    """A product of eight-bit operands: in BF16, and by the kernels, for a way to accumulate (and a tiling of ours)."""

    wide: Product
    cutlass: Callable[..., Tensor] | None  # None if the kernel does not take the formats
    ours: Callable[..., Tensor]


def main() -> None:
    parser_of(__doc__).parse_args()
    result = {name: measure(shape) for name, shape in SHAPES.items()}
    print(record.write("gpu_grouped_rows", {"shapes": result}))


def measure(shape: Shape) -> dict[str, Any]:
    p = Products(shape)
    gemms = gemms_of(p)
    with compile_only():  # in several threads
        for found in gemms.values():
            for fast in ACCUMULATION.values():
                found.ours(fast, None)
    ways = {f"{gemm}, bf16": product for gemm, product in p.in_bf16().items()}
    db = {}
    for gemm, found in gemms.items():
        wide = found.wide()
        for way, product in ways_of(gemm, found).items():
            (db[way],), ways[way] = each_decibels([wide], [product()], 20), product
    result = {"shape": vars(shape), "db": db, "gemm_tflops": p.tflops(ways)}
    show(result)
    return result


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
    scale_a, scale_b = (torch.ones_like(t[..., :1], dtype=torch.float32) for t in (a, b))
    return Gemm(
        lambda: F.grouped_mm(a.to(BF16), b.to(BF16).transpose(1, 2), offs=offsets),
        partial(cutlass.grouped_mm, a, scale_a, b, scale_b, offsets) if a.dtype == b.dtype else None,
        partial(ours.grouped_mm, Operands(a, b, scale_a, scale_b, ROW, ROW), offsets, BF16),
    )


def of_columns(a: Tensor, b: Tensor, offsets: Tensor) -> Gemm:
    """a [N, M] with b [K, M]."""
    scale = torch.ones(len(offsets), len(a), 1, device=a.device)
    return Gemm(
        lambda: F.grouped_mm(a.to(BF16), b.to(BF16).t(), offs=offsets),
        partial(cutlass.grouped_mm_dw, a, scale, b, offsets) if a.dtype == b.dtype else None,
        partial(ours.grouped_mm_dw, Operands(a, b, scale, scale, ROW, ROW), offsets, BF16),
    )


def ways_of(name: str, gemm: Gemm) -> dict[str, Product]:
    ways: dict[str, Product] = {}
    for how, fast in ACCUMULATION.items():
        if gemm.cutlass is not None:
            ways[f"{name}, cutlass, {how}"] = partial(gemm.cutlass, fast=fast)
        ways[f"{name}, triton, {how}"] = partial(gemm.ours, fast, None)
    return ways


if __name__ == "__main__":
    main()
